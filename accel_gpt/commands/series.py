"""Train runs that belong together, such as a sweep: each an `accel-gpt train` in its own folder.

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

import torch

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import plural
from accel_gpt.console import Progress, write_err
from accel_gpt.files import write_file
from accel_gpt.launcher import PREEMPTED, SIGNALS, child_error, launch_child
from accel_gpt.training.run_folder import RunFolder

POLL_SECONDS = 0.2  # between two looks at the runs
READ_SECONDS = 2.0  # between two readings of a run's metrics


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
    """Write a config beside the folder of its run in `out`, and return the run.

    `folder`: the name of the run's folder; empty: `name`.
    """
    path = out / (folder or name)
    file = out / f"{path.name}.yaml"
    out.mkdir(parents=True, exist_ok=True)
    write_file(file, [to_yaml(config).encode()])
    return SeriesRun(name=name, folder=path, arguments=[str(file)], steps=steps)


class Child:
    """The process of a run; `device`: its CUDA_VISIBLE_DEVICES; `alone`: no other trains beside."""

    def __init__(self, run: SeriesRun, device: str | None, alone: bool) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.run = run
        self.device = device
        self.log = run.folder / "output.log"
        self.started = time.monotonic()
        self.read = self.started
        self.progress = Progress(
            run.name,
            "steps",
            total=run.steps,
            done=RunFolder(run.folder).step,
            bar=alone,
        )
        environment = {"ACCELERATE_MIXED_PRECISION": "no"}  # as launched: stops if we are killed
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        words = ["train", *run.arguments, "--out_dir", str(run.folder)]
        words += ["--hub.push", "never", "--checkpoint.copy_to", "null"]  # not all to one place
        with self.log.open("ab") as log:
            self.process = launch_child(
                words,
                environment=environment,
                stdout=log,
                stderr=log,
                own_group=True,
            )

    def show_progress(self) -> None:
        """Show the step that the run has logged."""
        if time.monotonic() - self.read > READ_SECONDS:
            self.read = time.monotonic()
            self.progress.update(RunFolder(self.run.folder).step, self.run.steps)

    def print_end(self) -> str | None:
        """Print how the run ended; returns a sentence if it has not finished."""
        run = RunFolder(self.run.folder)
        code = self.process.returncode
        if not code and self.run.finished:
            loss = run.metrics.last("eval/val_loss")
            words = "" if loss is None else f", val loss {loss:.4f}"
            seconds = time.monotonic() - self.started
            write_err(f"{self.run.name}: step {run.step:,}{words} after {seconds:,.0f} s")
            return None
        error = child_error(self.log.read_text(encoding="utf-8", errors="replace"), code)
        write_err(f"{self.run.name}: failed with exit code {code}: {error} ({self.log})")
        return error


class Series:
    """Trains runs on the devices of this machine; signals go to the runs, which save and stop."""

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs = runs
        self.children: list[Child] = []
        self.waiting: list[SeriesRun] = []
        self.free: list[str | None] = []  # devices
        self.one_device = True
        self.failures: dict[str, str] = {}
        self.received: int | None = None  # signal

    def train(self) -> dict[str, str]:
        """Train all runs; returns a sentence for each that failed, by its name.

        After a signal, exits with `PREEMPTED` as soon as the runs have saved.
        """
        self.waiting = [run for run in self.runs if not run.finished]
        self.free = visible_devices() if self.waiting else []
        self.one_device = len(self.free) == 1
        handlers = [signal.signal(number, self.forward) for number in SIGNALS]
        try:
            while self.children or (self.waiting and self.received is None):
                if not self.start_next():
                    time.sleep(POLL_SECONDS)
                    self.check_children()
        finally:
            for child in self.children:  # after an error of our own
                child.progress.close()
                child.process.terminate()
                child.process.wait()
            for number, handler in zip(SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
        if self.received is not None:
            done = sum(run.finished for run in self.runs)
            write_err(
                f"{signal.Signals(self.received).name}: {done} of {plural(len(self.runs), 'run')} "
                "finished, the others saved; launch the same command again to continue"
            )
            sys.exit(PREEMPTED)
        return self.failures

    def start_next(self) -> bool:
        """Start the next run, or resume it, if a device is free; returns False if none is due."""
        if not self.free or self.received is not None:
            return False
        for run in self.waiting:
            # a folder is in use if a series that was killed has left a run that still saves
            if RunFolder(run.folder).in_use:
                continue
            self.waiting.remove(run)
            if not run.finished:
                self.launch(run, self.free.pop(0))
            return True
        return False

    def launch(self, run: SeriesRun, device: str | None) -> None:
        """Start the process of a run."""
        where = f" on GPU {device}" if device is not None else ""
        number = self.runs.index(run) + 1
        write_err(f"{run.name}: run {number} of {len(self.runs)}, to step {run.steps:,}{where}")
        self.children.append(Child(run, device, alone=self.one_device))
        if self.received is not None:  # meanwhile
            self.children[-1].process.send_signal(self.received)

    def check_children(self) -> None:
        """Print the progress of the runs, and take those that ended from the list."""
        for child in [*self.children]:
            child.show_progress()
            if child.process.poll() is None:
                continue
            child.progress.close()
            self.children.remove(child)
            self.free.append(child.device)
            if self.received is None:
                failure = child.print_end()
                if failure:
                    self.failures[child.run.name] = failure

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on: the first lets each run save and stop, a second ends it at once."""
        self.received = self.received or number
        for child in self.children:
            child.process.send_signal(number)


def visible_devices() -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for a run on each GPU of this process; [None] without GPUs."""
    count = torch.cuda.device_count()
    if count == 0:
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given:
        return [*given.split(",")[:count]]
    return [str(number) for number in range(count)]
