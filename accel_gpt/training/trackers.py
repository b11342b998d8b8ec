"""What goes to Accelerate's trackers besides the records: config, samples, how charts are grouped.

A run that resumes goes on in the same run of `wandb` and `trackio`: its name there is kept in
`tracker_run` in its folder.
"""

import contextlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain, to_yaml
from accel_gpt.errors import UserError
from accel_gpt.files import write_file
from accel_gpt.redact import redact

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Charts = dict[str, dict[str, list[Any]]]
PROJECT = "accel_gpt"


def start_trackers(accelerator: Accelerator, config: Config, step: int, charts: Charts) -> None:
    """Open Accelerate's trackers; TensorBoard forgets what lies beyond the resumed step.

    Raises `UserError` where another than TensorBoard does not start, as wandb without a login.
    """
    kwargs: dict[str, Any] = {"tensorboard": {"purge_step": step + 1}}
    if set(config.log.trackers) <= {"tensorboard"}:
        accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
    else:
        if accelerator.is_main_process:
            kwargs |= resumable(Path(config.out_dir))
        try:
            with nobody_asked():
                accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
        except Exception as error:  # of a package that we do not know
            raise UserError(
                f"log.trackers is {', '.join(config.log.trackers)}, of which one does not start: "
                f"{redact(str(error))}"
            ) from error
    if accelerator.is_main_process:
        plain = to_flat(to_plain(config))
        told = {key: redact(str(value)) for key, value in plain.items()}
        for tracker in accelerator.trackers:
            if isinstance(tracker, TensorBoardTracker):
                group_charts(tracker.writer, charts)
                tracker.log({"config": as_code(to_yaml(config))}, step=step)
            else:
                tracker.store_init_configuration(told)


@contextmanager
def nobody_asked() -> Iterator[None]:
    """Without a keyboard: what asks for a login in the middle of a run fails instead."""
    before = sys.stdin
    with Path(os.devnull).open() as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def resumable(out_dir: Path) -> dict[str, Any]:
    """How wandb and trackio are told which run goes on; wandb only what it is given."""
    name = run_name(out_dir)
    only = {"disable_git": True, "save_code": False, "x_disable_meta": True}  # it has argv, too
    silent = {"console": "off", "silent": True}
    named = {"id": name, "name": name, "resume": "allow", "dir": str(out_dir)}
    return {
        "wandb": {**named, "settings": {**only, **silent}},
        "trackio": {"name": name, "resume": "allow"},
    }


def run_name(out_dir: Path) -> str:
    """The name of the run with trackers that keep the runs of many folders together."""
    path = out_dir / "tracker_run"
    if not path.is_file():
        folder = re.sub(r"[^\w.-]+", "-", out_dir.resolve().name)
        write_file(path, [f"{folder}-{secrets.token_hex(4)}\n".encode()])
    return path.read_text(encoding="utf-8").strip()


def reopen_tensorboard(accelerator: Accelerator, purge_step: int, charts: Charts) -> None:
    """A new file of curves, which forgets the steps from `purge_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            with contextlib.suppress(OSError):  # of a full disk: once more
                tracker.writer.close()
            tracker.writer = SummaryWriter(tracker.logging_dir, purge_step=purge_step)
            group_charts(tracker.writer, charts)


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """Where TensorBoard's thread ends without a traceback: its error is raised where it is used."""
    before = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            before(error)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def chart_groups(config: Config, has_mfu: bool) -> Charts:
    """What belongs together on TensorBoard's page of custom scalars: group -> chart -> lines.

    A line of a chart is any key that one of its patterns matches; no standard error is one.
    """
    groups = {
        "loss": {
            "train and val": ["^train/loss$", "^eval/train_loss$", "^eval/val_loss($|/)"],
            "bits per byte": ["^eval/val_bits_per_byte($|/)"],
        },
        "optimization": {
            "lr": ["^train/lr$"],
            "grad norm": ["^train/grad_norm$"],
            "skipped updates and spikes": ["^train/skipped$", "^train/spikes$"],
        },
        "speed": {
            "tokens per second": ["^perf/tokens_per_second$"],
            "ms per step": ["^perf/step_ms$"],
        },
        "memory": {"GB": ["^perf/memory_gb$"]},
    }
    if has_mfu:
        groups["speed"]["MFU"] = ["^perf/mfu$"]
    if to_flat(to_plain(config)).get("eval.hellaswag"):
        groups["HellaSwag"] = {"accuracy": ["^eval/hellaswag_acc(_norm)?$"]}
    return {
        group: {title: ["Multiline", lines] for title, lines in charts.items()}
        for group, charts in groups.items()
    }


def group_charts(writer: "SummaryWriter", charts: Charts) -> None:
    """Begin a file of curves with what belongs together; each file of a run tells the same."""
    writer.add_custom_scalars(charts)
    writer.flush()


def write_samples(accelerator: Accelerator, out_dir: Path, step: int, text: str) -> None:
    """Keep the samples of a step in the trackers and as `samples/step_00001000.txt`."""
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        marked = as_code(text) if isinstance(tracker, TensorBoardTracker) else text
        tracker.log({"samples": marked}, step=step)
    folder = out_dir / "samples"
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step:08d}.txt").write_text(text + "\n", encoding="utf-8")


def as_code(text: str) -> str:
    """Text that TensorBoard, which reads Markdown, shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
