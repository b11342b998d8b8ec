"""What goes to Accelerate's trackers besides the records: config, samples, how charts are grouped.

A run that resumes goes on in the same run of `wandb` and `trackio`: its name there is kept in
`tracker_run` in its folder.
"""

import contextlib
import re
import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from torch.utils.tensorboard import SummaryWriter

from accel_gpt.config import Config
from accel_gpt.errors import UserError
from accel_gpt.files import write_file
from accel_gpt.parse import to_flat, to_plain, to_yaml
from accel_gpt.run.command import without_secrets

PROJECT = "accel_gpt"
Charts = dict[str, dict[str, list[Any]]]
ALONE = ("tensorboard",)  # local, and it knows its run by the folder


def start_trackers(accelerator: Accelerator, config: Config, step: int, charts: Charts) -> None:
    """Open Accelerate's trackers; TensorBoard forgets what lies beyond the resumed step.

    Raises `UserError` where one does not start, as wandb for want of a login.
    """
    others = [name for name in config.log.trackers if name not in ALONE]
    kwargs: dict[str, Any] = {"tensorboard": {"purge_step": step + 1}}
    if others and accelerator.is_main_process:
        kwargs |= resumable(Path(config.out_dir))
    try:
        accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"log.trackers is {', '.join(config.log.trackers)}, of which one did not start: {error}"
        ) from error
    if not accelerator.is_main_process:
        return
    told = to_yaml(config)
    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            group_charts(tracker.writer, charts)
            tracker.log({"config": as_code(told)}, step=step)
        else:
            plain = {key: str(value) for key, value in to_flat(to_plain(config)).items()}
            tracker.store_init_configuration(
                {key: without_secrets(value) for key, value in plain.items()}
            )


def resumable(out_dir: Path) -> dict[str, Any]:
    """How wandb and trackio are told which run goes on; they say nothing on the terminal."""
    name = run_name(out_dir)
    settings = {"console": "off", "disable_git": True, "save_code": False, "silent": True}
    return {
        "wandb": {
            **{"id": name, "name": name, "resume": "allow", "dir": str(out_dir)},
            "settings": settings,
        },
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
    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            with contextlib.suppress(OSError):  # of a full disk: once more
                tracker.writer.close()
            tracker.writer = SummaryWriter(tracker.logging_dir, purge_step=purge_step)
            group_charts(tracker.writer, charts)


def chart_groups(config: Config, has_mfu: bool) -> Charts:
    """What belongs together on TensorBoard's page of custom scalars: group -> chart -> lines.

    A line of a chart is any key that begins as one of its patterns says.
    """
    groups = {
        "loss": {
            "train and val": ["^train/loss$", "^eval/train_loss", "^eval/val_loss"],
            "bits per byte": ["^eval/val_bits_per_byte"],
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
        groups["HellaSwag"] = {"accuracy": ["^eval/hellaswag_acc"]}
    return {
        group: {title: ["Multiline", lines] for title, lines in charts.items()}
        for group, charts in groups.items()
    }


def group_charts(writer: SummaryWriter, charts: Charts) -> None:
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
