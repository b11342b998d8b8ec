"""Train a series of runs, such as a sweep: each is an `accel-gpt train` in its own folder.

A CPU trains one run after another, and each GPU one run at a time. The output of a run goes to
`output.log` in its folder. Finished runs are skipped and others resume, so a killed series that
starts again ends with the same losses.
"""

import contextlib
import hashlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from accel_gpt.children import child_error, launch_child
from accel_gpt.config.budget import with_budget
from accel_gpt.config.compare import Differences, differences, option_of
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan, plural
from accel_gpt.config.values import to_flat, to_yaml
from accel_gpt.console import write_err
from accel_gpt.errors import DivergedError, UserError, require
from accel_gpt.files import write_file
from accel_gpt.launch.resolve import earlier_budget, read_done
from accel_gpt.launcher import PREEMPTED, STOP_WITH_PARENT, stop_signals
from accel_gpt.report.curves import read_metrics
from accel_gpt.runs.folder import RunFolder
from accel_gpt.training.display import Progress

MOST_LETTERS = 200  # in the name of a folder; file systems allow 255 bytes
POLL_SECONDS = 0.2  # between two looks at the lock of a run
READ_SECONDS = 2.0  # between two readings of a run's metrics


class SeriesRun:
    """One run of a series; its config is written next to its folder, which is in `out`.

    If a folder cannot have the name, its characters are replaced or cut, and a hash is added. A
    run with --code has the hash of the file in its name, so an edited file is another run.
    Raises `UserError` if the run was trained with another config.
    """

    def __init__(self, name: str, out: Path, config: Config) -> None:
        safe = re.sub(r"[^\w.,=+-]", "_", name)[:MOST_LETTERS]
        if safe != name:
            safe += f"_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        if config.own.file:
            safe += f"_{config.own.sha256[:8]}"
        self.name = name
        self.folder = out / safe
        self.log = self.folder / "output.log"
        self.config = out / f"{safe}.yaml"
        self.own = config.own
        folder = RunFolder(self.folder)
        before = folder.config
        asked = config
        if config.train.budget:  # its length is the one that an earlier launch set
            done = read_done(str(self.folder), config.checkpoint.resume)
            budget = earlier_budget(config, done)
            asked = with_budget(config, budget) if budget else config
        changed = recipe_differences(asked, before)
        train = to_flat(config)["data.train"]
        prepared_for_series = train == str(out / "data")
        if before and before.get("data.train", train) != train and not prepared_for_series:
            changed["data.train"] = (before["data.train"], train)
        if changed:
            key, (then, now) = next(iter(changed.items()))
            raise UserError(
                f"{self.folder} was trained with {key} {then}, but now has {now}; set another "
                "out_dir"
            )
        self.budget = config.train.budget
        self.stop_at = config.train.stop_at
        self.planned = make_plan(config, 1).last_step
        require(
            folder.step <= self.steps,
            f"{self.folder} was trained to step {folder.step}, but now ends at step {self.steps}; "
            "set another out_dir",
        )
        self.divergence = self.folder / "diverged.txt"  # the error of a run that diverged
        out.mkdir(parents=True, exist_ok=True)
        write_file(self.config, [to_yaml(config).encode()])

    @property
    def steps(self) -> int:
        """Steps of the run. A `train.budget` or a function of --code may have set them."""
        run = RunFolder(self.folder)
        steps = run.end if self.budget or run.finish else None
        if not steps:
            return self.planned
        return min(steps, self.stop_at or steps)

    @property
    def finished(self) -> bool:
        """Whether the run has diverged, or saved and recorded its last step with its evaluation."""
        run = RunFolder(self.folder)
        saved = max(run.checkpoints, default=0) >= self.steps
        return self.diverged or (saved and run.step >= self.steps)

    @property
    def diverged(self) -> bool:
        """Whether this launch or an earlier one diverged; it would diverge again."""
        return self.divergence.exists()


class Series:
    """Trains runs on the devices of this machine; forwards signals, so that runs save and stop."""

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs = runs
        self.failures: dict[str, str] = {}  # name of a run -> error
        self.devices = visible_devices()
        self.free: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # devices without a run
        self.processes: list[subprocess.Popen[str]] = []
        self.received: int | None = None  # signal
        self.private = ""  # a folder that only this user can write to

    def train(self) -> dict[str, str]:
        """Train all runs; return the error of each run that failed, by name.

        After a signal, exits with `PREEMPTED` as soon as the runs have saved.
        """
        for device in self.devices:
            self.free.put(device)
        handlers = {number: signal.signal(number, self.forward) for number in stop_signals()}
        try:
            with (
                tempfile.TemporaryDirectory(prefix="accel_gpt_code_") as self.private,
                ThreadPoolExecutor(len(self.devices)) as pool,
            ):
                for _ in pool.map(self.train_run, self.runs):
                    pass  # raises the first error of a thread
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.received is not None:
            done = sum(run.finished for run in self.runs)
            write_err(
                f"{signal.Signals(self.received).name}: {done} of {plural(len(self.runs), 'run')} "
                "finished, the others saved; run the same command again to resume"
            )
            sys.exit(PREEMPTED)
        return self.failures

    def train_run(self, run: SeriesRun) -> None:
        """Train a run on a free device, unless it is finished; in a thread."""
        device = self.free.get()
        try:
            # a run of a killed series may still be saving in its folder
            while RunFolder(run.folder).in_use and self.received is None:
                time.sleep(POLL_SECONDS)
            if self.received is None and not run.finished:
                self.launch(run, device)
            if run.diverged:
                self.failures[run.name] = run.divergence.read_text(encoding="utf-8")
        except BaseException:  # an error of our own ends the other runs
            self.forward(signal.SIGTERM)
            raise
        finally:
            self.free.put(device)

    def launch(self, run: SeriesRun, device: str | None) -> None:
        """Start the process of a run, show its progress, and note how it ends."""
        where = f" on GPU {device}" if device is not None else ""
        number = self.runs.index(run) + 1
        length = f"for {run.budget}" if run.budget else f"to step {run.steps:,}"
        write_err(f"{run.name}: run {number} of {len(self.runs)}, {length}{where}")
        started = time.monotonic()
        environment = {STOP_WITH_PARENT: str(os.getpid())}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        arguments = ["train", str(run.config), f"--out_dir={run.folder}"]
        # the copies of several runs would overwrite each other
        arguments += ["--hub.push=never", "--checkpoint.copy_to=null"]
        if run.own.file:  # a copy, so that you may change the file, but others cannot change it
            code = Path(self.private, str(number), run.own.name)
            code.parent.mkdir()
            write_file(code, [run.own.source])
            arguments.append(f"--code={code}")
        run.folder.mkdir(exist_ok=True)
        with run.log.open("ab") as log:
            process = launch_child(
                arguments, environment=environment, stdout=log, stderr=log, own_group=True
            )
        self.processes.append(process)
        if self.received is not None:  # while the process started
            process.send_signal(self.received)
        step = RunFolder(run.folder).step
        one_bar = len(self.devices) == 1
        with Progress(run.name, "steps", total=run.steps, done=step, bar=one_bar) as progress:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(READ_SECONDS)
                progress.update(RunFolder(run.folder).step, run.steps)
        if self.received is None:
            self.note_end(run, process.returncode, time.monotonic() - started)

    def note_end(self, run: SeriesRun, code: int, seconds: float) -> None:
        """Print how a run ended; keep its error if it has not finished."""
        if code == 0 and run.finished:
            loss = read_metrics(RunFolder(run.folder).records()).last("eval/val_loss")
            result = "" if loss is None else f", val loss {loss:.4f}"
            write_err(f"{run.name}: step {run.steps:,}{result} after {seconds:,.0f} s")
            return
        error = child_error(run.log.read_text(encoding="utf-8", errors="replace"), code)
        write_err(f"{run.name}: failed with exit code {code}: {error} ({run.log})")
        self.failures[run.name] = error
        if code == DivergedError.exit_code:
            write_file(run.divergence, [error.encode()])

    def forward(self, number: int, _frame: FrameType | None = None) -> None:
        """Forward a signal: the first lets each run save and stop, the second ends it at once."""
        self.received = self.received or number
        for process in self.processes:
            process.send_signal(number)


def recipe_differences(config: Config, before: Mapping[str, Any]) -> Differences:
    """Return the keys that affect the loss and differ, with the values before and now.

    `before` maps dotted keys to values; keys that it lacks are not compared.
    """
    found = {}
    for key, (then, now) in differences(before, to_flat(config)).items():
        if key in before and now != "auto" and option_of(key).resume != "free":
            found[key] = (then, now)
    return found


def visible_devices() -> list[str | None]:
    """Return the CUDA_VISIBLE_DEVICES of each GPU that this process sees; [None] without GPUs."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [*given.split(",")[:count]] or [None]
