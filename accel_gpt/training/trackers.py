"""Accelerate's trackers: starting them, the config and samples, TensorBoard's groups of charts.

A resumed run continues the same run of `wandb` and `trackio`: its name there is kept in
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
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain, to_yaml
from accel_gpt.errors import UserError
from accel_gpt.files import write_file
from accel_gpt.redact import redact

Charts = dict[str, dict[str, list[Any]]]
PROJECT = "accel_gpt"


def start_trackers(accelerator: Accelerator, config: Config, step: int, charts: Charts) -> None:
    """Start Accelerate's trackers; TensorBoard drops the steps after the resumed one.

    Raises `UserError` where a tracker other than TensorBoard fails to start, as wandb without a
    login.
    """
    kwargs: dict[str, Any] = {"tensorboard": {"purge_step": step + 1}}
    if set(config.log.trackers) <= {"tensorboard"}:
        accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
    else:
        if accelerator.is_main_process:
            kwargs |= resumable(Path(config.out_dir))
        try:
            with no_keyboard():
                accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
        except Exception as error:  # each package has its own
            raise UserError(
                f"log.trackers is {', '.join(config.log.trackers)}, of which one does not start: "
                f"{redact(str(error))}"
            ) from error
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            add_charts(tracker, charts)
            tracker.log({"config": as_code(to_yaml(config))}, step=step)
        else:
            options = to_flat(to_plain(config))
            tracker.store_init_configuration({k: redact(str(v)) for k, v in options.items()})


@contextmanager
def no_keyboard() -> Iterator[None]:
    """An empty standard input: a tracker that asks for a login fails instead of waiting."""
    stdin = sys.stdin
    with Path(os.devnull).open() as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = stdin


def resumable(out_dir: Path) -> dict[str, Any]:
    """Options with which wandb and trackio continue a run; wandb records only what it is given."""
    name = run_name(out_dir)
    only = {"disable_git": True, "save_code": False, "x_disable_meta": True}  # it has argv, too
    silent = {"console": "off", "silent": True}
    named = {"id": name, "name": name, "resume": "allow", "dir": str(out_dir)}
    return {
        "wandb": {**named, "settings": {**only, **silent}},
        "trackio": {"name": name, "resume": "allow"},
    }


def run_name(out_dir: Path) -> str:
    """The name of the run in trackers that keep the runs of many folders together."""
    path = out_dir / "tracker_run"
    if not path.is_file():
        folder = re.sub(r"[^\w.-]+", "-", out_dir.resolve().name)
        write_file(path, [f"{folder}-{secrets.token_hex(4)}\n".encode()])
    return path.read_text(encoding="utf-8").strip()


def reopen_tensorboard(accelerator: Accelerator, purge_step: int, charts: Charts) -> None:
    """Begin a new file of curves, which drops the steps from `purge_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            with contextlib.suppress(OSError):  # of a full disk: once more
                tracker.writer.close()
            tracker.writer = SummaryWriter(tracker.logging_dir, purge_step=purge_step)
            add_charts(tracker, charts)


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """TensorBoard's thread ends without a traceback: its error is raised where it is used."""
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
    """TensorBoard's page of custom scalars: group -> chart -> patterns of the keys of its lines."""
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
    if config.eval.hellaswag:
        groups["HellaSwag"] = {"accuracy": ["^eval/hellaswag_acc(_norm)?$"]}
    return {
        group: {title: ["Multiline", lines] for title, lines in charts.items()}
        for group, charts in groups.items()
    }


def add_charts(tracker: TensorBoardTracker, charts: Charts) -> None:
    """Begin a file of curves with the groups of charts."""
    tracker.writer.add_custom_scalars(charts)
    tracker.writer.flush()


def write_samples(accelerator: Accelerator, out_dir: Path, step: int, text: str) -> None:
    """Write the samples of a step to the trackers and to `samples/step_00001000.txt`."""
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        in_markdown = isinstance(tracker, TensorBoardTracker)
        tracker.log({"samples": as_code(text) if in_markdown else text}, step=step)
    folder = out_dir / "samples"
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step:08d}.txt").write_text(text + "\n", encoding="utf-8")


def as_code(text: str) -> str:
    """`text` as TensorBoard, which reads Markdown, shows it unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
