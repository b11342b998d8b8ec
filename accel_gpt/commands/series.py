"""Runs that belong together, as those of a sweep: each an `accel-gpt train` in its own folder.

One after another on a CPU, side by side on GPUs, one on each. What a run prints is in `output.log`
in its folder. Finished runs are skipped and others resume, so that a series that was killed and is
started again ends with the same losses.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import plural
from accel_gpt.console import write_err
from accel_gpt.files import write_file
from accel_gpt.launcher import PREEMPTED, SIGNALS, child_error, launch_child
from accel_gpt.training.run_folder import RunFolder

POLL_SECONDS, PROGRESS_SECONDS = 0.2, 30.0  # of waiting; between two lines about a run


@dataclass(frozen=True)
class SeriesRun:
    """One run of a series."""

    name: str  # in what is printed
    folder: Path
    arguments: Sequence[str]  # of `accel-gpt train`: CONFIG --section.key value ...
    steps: int  # finished with a checkpoint of this step, or a later one

    @property
    def finished(self) -> bool:
        """Whether the run has reached its step."""
        return max(RunFolder(self.folder).checkpoints, default=0) >= self.steps


def series_run(name: str, out: Path, config: Config, steps: int, folder: str = "") -> SeriesRun:
    """The run of a `config`, which is written beside its `folder` in `out` (empty: `name`)."""
    path = out / (folder or name)
    file = out / f"{path.name}.yaml"
    out.mkdir(parents=True, exist_ok=True)
    write_file(file, [to_yaml(config).encode()])
    return SeriesRun(name, path, [str(file)], steps)


class Child:
    """The process of a run; `device`: its CUDA_VISIBLE_DEVICES."""

    def __init__(self, run: SeriesRun, device: str | None) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.run, self.device, self.log = run, device, run.folder / "output.log"
        self.started = self.printed = time.monotonic()
        environment = {"ACCELERATE_MIXED_PRECISION": "no"}  # as launched: stops if we are killed
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        words = [*run.arguments, "--out_dir", str(run.folder)]
        words += ["--hub.push", "never", "--checkpoint.copy_to", "null"]  # not all to one place
        with self.log.open("ab") as log:
            self.process = launch_child(
                ["train", *words],
                environment=environment,
                stdout=log,
                stderr=log,
                own_group=True,
            )

    def print_progress(self) -> None:
        """Print the step that the run has logged, now and then."""
        if time.monotonic() - self.printed > PROGRESS_SECONDS:
            self.printed = time.monotonic()
            step = RunFolder(self.run.folder).step
            write_err(f"{self.run.name}: step {step:,} of {self.run.steps:,}")

    def failure(self) -> str | None:
        """Print how the run ended; a sentence if it has not finished."""
        run, code = RunFolder(self.run.folder), self.process.returncode
        if not code and self.run.finished:
            loss = run.metrics.last("eval/val_loss")
            words = "" if loss is None else f", val loss {loss:.4f}"
            seconds = time.monotonic() - self.started
            write_err(f"{self.run.name}: step {run.step:,}{words} after {seconds:,.0f} s")
            return None
        last = child_error(self.log.read_text(encoding="utf-8", errors="replace"), code)
        write_err(f"{self.run.name}: failed with exit code {code}: {last} ({self.log})")
        return last


class Series:
    """Trains runs on the devices of this machine; signals go to the runs, which save and stop."""

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs, self.children = runs, list[Child]()
        self.received: int | None = None

    def train(self) -> dict[str, str]:
        """Train all runs; returns a sentence for each that failed, by its name.

        After a signal, exits with `PREEMPTED` as soon as the runs have saved.
        """
        waiting = [run for run in self.runs if not run.finished]
        free, failures = visible_devices() if waiting else [], dict[str, str]()
        before = [signal.signal(number, self.forward) for number in SIGNALS]
        try:
            while self.children or (waiting and self.received is None):
                # one that is in use still saves, as a series that was killed has left it
                idle = (run for run in waiting if free and not RunFolder(run.folder).in_use)
                if self.received is None and (run := next(idle, None)):
                    waiting.remove(run)
                    if not run.finished:
                        self.launch(run, free.pop(0))
                    continue
                time.sleep(POLL_SECONDS)
                for child in [*self.children]:
                    child.print_progress()
                    if child.process.poll() is not None:
                        self.children.remove(child)
                        free.append(child.device)
                        if self.received is None and (failure := child.failure()):
                            failures[child.run.name] = failure
        finally:
            for child in self.children:  # after an error of our own
                child.process.terminate()
                child.process.wait()
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
        if self.received is not None:
            done = sum(run.finished for run in self.runs)
            write_err(
                f"{signal.Signals(self.received).name}: {done} of {plural(len(self.runs), 'run')} "
                "finished, the others saved; launch the same command again to continue"
            )
            sys.exit(PREEMPTED)
        return failures

    def launch(self, run: SeriesRun, device: str | None) -> None:
        """Start a run, or resume it."""
        where = f" on GPU {device}" if device is not None else ""
        number = self.runs.index(run) + 1
        write_err(f"{run.name}: run {number} of {len(self.runs)}, to step {run.steps:,}{where}")
        self.children.append(Child(run, device))
        if self.received is not None:  # meanwhile
            self.children[-1].process.send_signal(self.received)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on: the first lets each run save and stop, a second ends it at once."""
        self.received = self.received or number
        for child in self.children:
            child.process.send_signal(number)


def visible_devices() -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for one run on each GPU that this process sees; [None] without GPUs."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return [*names[:count]] if names[0] else [*map(str, range(count))] or [None]
