"""Start Accelerate's trackers, write config and samples to them, group TensorBoard's charts.

A resumed run continues the same run of `wandb` and `trackio`. The file `tracker_run` in the run's
folder stores the name of that run.
"""

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from accel_gpt.errors import UserError
from accel_gpt.files import write_file
from accel_gpt.training.run_folder import TRACKER_RUN

PROJECT = "accel_gpt"


class Trackers:
    """The trackers of a run. Ranks other than 0 have none."""

    def __init__(
        self, accelerator: Accelerator, names: Sequence[str], out_dir: Path, has_mfu: bool
    ) -> None:
        self.accelerator = accelerator
        self.names = names
        self.out_dir = out_dir
        self.charts = chart_groups(has_mfu)

    def start(self, step: int, yaml: str, options: Mapping[str, Any]) -> None:
        """Start all trackers. TensorBoard drops the steps after `step`, from which the run resumes.

        They store the config, as YAML or by dotted keys. Raises `UserError` if a tracker does not
        start, for example wandb without a login.
        """
        if not self.names:
            return
        accelerator = self.accelerator
        kwargs: dict[str, Any] = {"tensorboard": {"purge_step": step + 1}}
        if accelerator.is_main_process and set(self.names) - {"tensorboard"}:
            kwargs |= resumable(self.out_dir)
        try:
            accelerator.init_trackers(PROJECT, init_kwargs=kwargs)
        except Exception as error:  # each package has its own error classes
            raise UserError(
                f"a tracker of log.trackers ({', '.join(self.names)}) did not start: "
                f"{error}; check its login, or remove it from log.trackers"
            ) from error
        if not accelerator.is_main_process:
            return
        texts = {key: str(value) for key, value in options.items()}
        for tracker in accelerator.trackers:
            if isinstance(tracker, TensorBoardTracker):
                self.add_charts(tracker)
                tracker.log({"config": as_code(yaml)}, step=step)
            else:
                tracker.store_init_configuration(texts)

    def reopen(self, step: int) -> None:
        """Open a new TensorBoard file. It makes TensorBoard drop `step` and all later steps."""
        from torch.utils.tensorboard import SummaryWriter

        for tracker in self.accelerator.trackers:
            if isinstance(tracker, TensorBoardTracker):
                with contextlib.suppress(OSError):  # the disk is still full
                    tracker.writer.close()
                wait_for_next_name(Path(tracker.logging_dir))
                tracker.writer = SummaryWriter(tracker.logging_dir, purge_step=step)
                self.add_charts(tracker)

    def finish(self) -> None:
        """Write the last values and close all trackers."""
        trackers = self.accelerator.trackers
        self.accelerator.trackers = []  # even if one of them raises an error
        for tracker in trackers:
            tracker.finish()

    def close_tensorboard(self) -> None:
        """Write TensorBoard's last values and end its thread, as the run ends with an error.

        The other trackers notice the error themselves when the process ends.
        """
        for tracker in self.accelerator.trackers:
            if isinstance(tracker, TensorBoardTracker):
                with contextlib.suppress(OSError):  # the disk is full
                    tracker.writer.close()

    def add_charts(self, tracker: TensorBoardTracker) -> None:
        """Write the groups of charts to a new TensorBoard file."""
        tracker.writer.add_custom_scalars(self.charts)
        tracker.writer.flush()

    def log_samples(self, step: int, text: str) -> None:
        """Write the samples of a step to all trackers."""
        for tracker in self.accelerator.trackers:
            in_markdown = isinstance(tracker, TensorBoardTracker)
            tracker.log({"samples": as_code(text) if in_markdown else text}, step=step)


def wait_for_next_name(folder: Path) -> None:
    """Wait until no TensorBoard file in `folder` has the current second in its name.

    TensorBoard reads files in the order of their names. A name begins with the time in seconds and
    ends with a number that is not padded: within one second, file 10 would come before file 9.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def resumable(out_dir: Path) -> dict[str, Any]:
    """Return options that make wandb and trackio resume the run of the same name.

    The first launch chooses the name. wandb records nothing except the values that it is given.
    """
    path = out_dir / TRACKER_RUN
    if not path.is_file():
        folder = re.sub(r"[^\w.-]+", "-", out_dir.resolve().name)
        write_file(path, [f"{folder}-{secrets.token_hex(4)}\n".encode()])
    name = path.read_text(encoding="utf-8").strip()
    wandb_settings = {
        "disable_git": True,
        "save_code": False,
        "x_disable_meta": True,  # the metadata would include the command line
        "console": "off",
        "silent": True,
    }
    wandb = {
        "id": name,
        "name": name,
        "resume": "allow",
        "dir": str(out_dir),
        "settings": wandb_settings,
    }
    return {"wandb": wandb, "trackio": {"name": name, "resume": "allow"}}


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """Suppress tracebacks from TensorBoard's thread: its writer raises the same error."""
    before = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            before(error)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def chart_groups(has_mfu: bool) -> dict[str, dict[str, list[Any]]]:
    """Return TensorBoard's custom scalars: group -> chart -> patterns of the metrics in it."""
    charts = {
        "loss/train and val": ["^train/loss$", "^eval/train_loss$", "^eval/val_loss($|/)"],
        "loss/bits per byte": ["^eval/val_bits_per_byte($|/)"],
        "optimization/lr": ["^train/lr$"],
        "optimization/grad norm": ["^train/grad_norm$"],
        "optimization/skipped updates and spikes": ["^train/skipped$", "^train/spikes$"],
        "speed/tokens per second": ["^perf/tokens_per_second$"],
        "speed/ms per step": ["^perf/step_ms$"],
        "speed/MFU": ["^perf/mfu$"],
        "memory/GB": ["^perf/memory_gb$"],
    }
    if not has_mfu:
        del charts["speed/MFU"]
    groups: dict[str, dict[str, list[Any]]] = {}
    for name, patterns in charts.items():
        group, _, title = name.partition("/")
        groups.setdefault(group, {})[title] = ["Multiline", patterns]
    return groups


def as_code(text: str) -> str:
    """Indent `text` as a code block of Markdown, so that TensorBoard shows it unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
