"""Push checkpoints to the Hub while a run trains, by processes beside it.

Each push is an `accel-gpt push` of its own on idle cores; in the training process a thread waits
for it. Checkpoints to push are in `.upload/` of the run as hard links: pruning the run's
checkpoints does not remove them, and a later launch finds what is left.
"""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from accel_gpt.config.experiment import Config
from accel_gpt.files import link_tree, lock
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.training.run_folder import checkpoint_steps, step_name

LOG = "hub.log"
MOST_WAITING = 3  # checkpoints; assumption: when the Hub is away for long, the disk must not fill
LOWEST_PRIORITY = 19
STOP_SECONDS, POLL_SECONDS = 10.0, 0.5


class BackgroundPush:
    """Pushes checkpoints one after the other; a failed push is tried again with the next one."""

    def __init__(self, config: Config, max_steps: int, log: Callable[[str], None]) -> None:
        self.config, self.max_steps, self.log = config.hub, max_steps, log
        self.out_dir = Path(config.out_dir)
        self.folder = self.out_dir / ".upload"
        self.process: subprocess.Popen[bytes] | None = None
        self.last: Path | None = None  # the checkpoint of the last step
        self.current: int | None = None  # the step that is being pushed
        self.lock_fd = -1  # a push inherits the lock and holds it while it lives
        self.wake, self.ending, self.stopped = threading.Event(), False, False
        for partial in self.folder.glob(".step_*"):
            shutil.rmtree(partial, ignore_errors=True)
        if self.waiting():  # of an earlier launch
            self.wake.set()
        self.thread = threading.Thread(target=self.run, name="background push", daemon=True)
        self.thread.start()
        atexit.register(self.stop)  # also when the run ends with an error

    def waiting(self) -> list[int]:
        """Return the steps that are not on the Hub yet."""
        return checkpoint_steps(self.folder)

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Push a new checkpoint; that of the last step waits for `finish`, when its metrics and
        samples are written.
        """
        if checkpoint.name == step_name(self.max_steps):
            self.last = checkpoint
            self.keep(checkpoint)  # if the run is killed before, the next launch pushes it
        elif self.config.push == "every_checkpoint":
            self.enqueue(checkpoint)

    def enqueue(self, checkpoint: Path) -> None:
        """Let the thread push a checkpoint; drop the oldest ones if too many wait."""
        self.keep(checkpoint)
        for step in [step for step in self.waiting() if step != self.current][:-MOST_WAITING]:
            self.log(f"WARNING: step {step:,} will not be pushed: more than {MOST_WAITING} wait")
            shutil.rmtree(self.folder / step_name(step), ignore_errors=True)
        self.wake.set()

    def keep(self, checkpoint: Path) -> None:
        """Link a checkpoint into the folder of those that wait."""
        partial, kept = (self.folder / f"{dot}{checkpoint.name}" for dot in (".", ""))
        try:
            self.folder.mkdir(exist_ok=True)
            link_tree(checkpoint, partial)
            shutil.rmtree(kept, ignore_errors=True)  # the same step, trained once more
            partial.rename(kept)
        except OSError as error:  # shutil.Error is one
            shutil.rmtree(partial, ignore_errors=True)
            self.log(f"WARNING: {checkpoint.name} cannot be kept for the Hub: {error}")

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until every push was tried once more, or until `interrupted`.

        Returns whether an interrupt left something, which the next launch pushes.
        """
        if self.last:
            self.enqueue(self.last)
        if self.waiting():
            self.log(f"waiting for pushes to {self.config.repo_id}; Ctrl-C postpones them")
        self.ending = True
        self.wake.set()
        while self.thread.is_alive() and not interrupted():
            self.thread.join(0.2)
        cut_short = self.thread.is_alive()
        self.stop()
        atexit.unregister(self.stop)
        left = self.waiting()
        if left:
            steps = ", ".join(f"{step:,}" for step in left)
            self.log(
                f"WARNING: not on the Hub: step {steps}; the same command launched again pushes "
                f"it, or: accel-gpt push {self.out_dir} --repo {self.config.repo_id}"
            )
        return cut_short and bool(left)

    def stop(self) -> None:
        """End the push that is under way; the next launch starts it again."""
        self.stopped = self.ending = True
        self.wake.set()
        if process := self.process:
            process.terminate()
        self.thread.join(STOP_SECONDS)

    # ----------------------------------------------------------------------- the thread

    def run(self) -> None:
        """Push whenever something was enqueued, until `finish` or `stop`."""
        self.folder.mkdir(exist_ok=True)
        while not self.stopped:
            try:
                held = lock(self.folder / ".lock", wait=False)
                break
            except BlockingIOError:  # a push of a killed launch is still at work
                time.sleep(POLL_SECONDS)
        else:
            return
        with held:
            self.lock_fd = held.fileno()
            for partial in self.folder.glob(".push_*"):
                shutil.rmtree(partial, ignore_errors=True)
            ending = False
            while not ending:
                self.wake.wait()
                self.wake.clear()
                ending = self.ending
                self.push_waiting()

    def push_waiting(self) -> None:
        """Try every waiting checkpoint once, the oldest first."""
        for step in self.waiting():
            folder = self.folder / step_name(step)
            if self.stopped:
                return
            if not folder.is_dir():  # dropped meanwhile
                continue
            self.current = step
            error = self.push(folder)
            self.current = None
            if error is None:
                shutil.rmtree(folder, ignore_errors=True)
                self.log(f"step {step:,} is on the Hub: {self.config.repo_id}@step-{step}")
            elif not self.stopped:
                self.log(f"WARNING: the push of step {step:,} failed, it waits: {error}")

    def push(self, checkpoint: Path) -> str | None:
        """Push one checkpoint; return the error, if any."""
        config = self.config
        options = {
            "repo": config.repo_id,
            "dtype": config.dtype,
            "private": str(config.private).lower(),
            "include_state": str(config.include_state).lower(),
            "license": config.license,
            "data_license": config.data_license,
        }
        words = [f"--{key}={value}" for key, value in options.items() if value is not None]
        try:
            with (self.out_dir / LOG).open("a+b") as log:
                start = log.seek(0, os.SEEK_END)
                self.process = start_process(["push", str(checkpoint), *words], log, self.lock_fd)
                if self.stopped:  # meanwhile
                    self.process.terminate()
                code = self.process.wait()
                self.process = None
                log.seek(start)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError as error:
            return str(error)
        return None if code == 0 else (lines or [f"exit code {code}"])[-1]


def start_process(words: list[str], log: BinaryIO, lock_fd: int) -> "subprocess.Popen[bytes]":
    """Start `accel-gpt WORDS ...` on idle cores; its output goes to `log`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_gpt.cli", *words],
        env={**environment_without_launcher(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,  # Ctrl-C is for the training; a session of its own would get more CPU
        pass_fds=(lock_fd,),
    )
    with contextlib.suppress(OSError):  # it may have ended already
        if hasattr(os, "SCHED_IDLE"):  # the lowest niceness cost a step 12 % on two busy cores
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
    return process
