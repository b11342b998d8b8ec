"""Train a series of runs, such as a sweep: each is an `accel-gpt train` in its own folder.

A CPU trains one run after another, and each GPU one run at a time. The output of a run goes to
`output.log` in its folder. Finished runs are skipped and others resume, so a killed series that
starts again ends with the same losses.
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

    name: str  # in messages
    folder: Path
    arguments: Sequence[str]  # for `accel-gpt train`: CONFIG --section.key value ...
    steps: int  # a run is finished if it has a checkpoint of this step or a later one

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last step."""
        return max(RunFolder(self.folder).checkpoints, default=0) >= self.steps


def series_run(name: str, out: Path, config: Config, steps: int, folder: str = "") -> SeriesRun:
    """Write a config next to the folder of its run in `out`, and return the run.

    `folder`: the name of the run's folder; if empty, `name`.
    """
    path = out / (folder or name)
    file = out / f"{path.name}.yaml"
    out.mkdir(parents=True, exist_ok=True)
    write_file(file, [to_yaml(config).encode()])
    return SeriesRun(name=name, folder=path, arguments=[str(file)], steps=steps)


class Child:
    """The process of a run; `device`: its CUDA_VISIBLE_DEVICES; `alone`: no other run at a time."""

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
        environment = {
            "ACCELERATE_MIXED_PRECISION": "no"
        }  # marks a launch: it stops if we are killed
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        arguments = ["train", *run.arguments, "--out_dir", str(run.folder)]
        arguments += [
            "--hub.push",
            "never",
            "--checkpoint.copy_to",
            "null",
        ]  # runs would overwrite each other
        with self.log.open("ab") as log:
            self.process = launch_child(
                arguments,
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
        """Print how the run ended; return its error if it has not finished."""
        run = RunFolder(self.run.folder)
        code = self.process.returncode
        if not code and self.run.finished:
            loss = run.metrics.last("eval/val_loss")
            result = "" if loss is None else f", val loss {loss:.4f}"
            seconds = time.monotonic() - self.started
            write_err(f"{self.run.name}: step {run.step:,}{result} after {seconds:,.0f} s")
            return None
        error = child_error(self.log.read_text(encoding="utf-8", errors="replace"), code)
        write_err(f"{self.run.name}: failed with exit code {code}: {error} ({self.log})")
        return error


class Series:
    """Trains runs on the devices of this machine; forwards signals, so that runs save and stop."""

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs = runs
        self.children: list[Child] = []
        self.waiting: list[SeriesRun] = []
        self.free: list[str | None] = []  # devices
        self.one_device = True
        self.failures: dict[str, str] = {}
        self.received: int | None = None  # signal

    def train(self) -> dict[str, str]:
        """Train all runs; return the error of each run that failed, by name.

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
                "finished, the others saved; run the same command again to resume"
            )
            sys.exit(PREEMPTED)
        return self.failures

    def start_next(self) -> bool:
        """Start or resume the next run if a device is free; return False if none was started."""
        if not self.free or self.received is not None:
            return False
        for run in self.waiting:
            # a run of a killed series may still be saving in its folder
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
        if self.received is not None:  # while the process started
            self.children[-1].process.send_signal(self.received)

    def check_children(self) -> None:
        """Print the progress of the runs, and remove the ended runs from the list."""
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
        """Forward a signal: the first lets each run save and stop, the second ends it at once."""
        self.received = self.received or number
        for child in self.children:
            child.process.send_signal(number)


def visible_devices() -> list[str | None]:
    """Return the CUDA_VISIBLE_DEVICES of each GPU that this process sees; [None] without GPUs."""
    count = torch.cuda.device_count()
    if count == 0:
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given:
        return [*given.split(",")[:count]]
    return [str(number) for number in range(count)]
