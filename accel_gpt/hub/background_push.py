"""Push checkpoints to the Hub while a run trains, by processes beside it.

Each push is an `accel-gpt push` of its own on idle cores; in the training process a thread waits
for it. Checkpoints to push are in `.upload/` of the run as hard links: pruning the run's
checkpoints does not remove them, and a later launch finds what is left.
"""

import atexit
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
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
STOP_SECONDS = 10.0


class BackgroundPush:
    """Pushes checkpoints one after the other; a failed push is tried again with the next one."""

    def __init__(self, config: Config, max_steps: int, log: Callable[[str], None]) -> None:
        self.config, self.max_steps, self.log = config.hub, max_steps, log
        self.out_dir = Path(config.out_dir)
        self.folder = self.out_dir / ".upload"
        self.folder.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.current: int | None = None  # the step that is being pushed
        self.wake, self.ending, self.stopped = threading.Event(), False, False
        for partial in self.folder.glob(".step_*"):  # of a killed launch
            shutil.rmtree(partial, ignore_errors=True)
        self.wake.set()  # for what an earlier launch left
        self.thread = threading.Thread(target=self.run, name="background push", daemon=True)
        self.thread.start()
        atexit.register(self.stop)  # also when the run ends with an error

    def waiting(self) -> list[int]:
        """Return the steps that are not on the Hub yet."""
        return checkpoint_steps(self.folder)

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Push a new checkpoint; that of the last step waits for `finish`, when its metrics and
        samples are written. Drops the oldest ones if too many wait.
        """
        last = checkpoint.name == step_name(self.max_steps)
        if not last and self.config.push != "every_checkpoint":
            return
        partial, kept = (self.folder / f"{dot}{checkpoint.name}" for dot in (".", ""))
        try:
            link_tree(checkpoint, partial)
            shutil.rmtree(kept, ignore_errors=True)  # the same step, trained once more
            partial.rename(kept)
        except OSError as error:  # shutil.Error is one
            shutil.rmtree(partial, ignore_errors=True)
            self.log(f"WARNING: {checkpoint.name} cannot be kept for the Hub: {error}")
        for step in [step for step in self.waiting() if step != self.current][:-MOST_WAITING]:
            self.log(f"WARNING: step {step:,} will not be pushed: more than {MOST_WAITING} wait")
            shutil.rmtree(self.folder / step_name(step), ignore_errors=True)
        self.wake.set()

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until every push was tried once more, or until `interrupted`.

        Returns whether an interrupt left something, which the next launch pushes.
        """
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
            steps, run = ", ".join(f"{step:,}" for step in left), shlex.quote(str(self.out_dir))
            self.log(
                f"WARNING: not on the Hub: step {steps}; the same command launched again pushes "
                f"it, or: accel-gpt push {run} --repo {self.config.repo_id}"
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
        """Push whenever a checkpoint came, until `finish` or `stop`.

        A push inherits the lock and holds it while it lives: that of a killed launch is waited for.
        """
        with lock(self.folder / ".lock") as held:
            for partial in self.folder.glob(".push_*"):
                shutil.rmtree(partial, ignore_errors=True)
            ending = False
            while not ending:
                self.wake.wait()
                self.wake.clear()
                ending = self.ending
                for step in self.waiting():
                    dropped = not (self.folder / step_name(step)).is_dir()
                    early = step == self.max_steps and not ending
                    if not (self.stopped or dropped or early):
                        self.push(step, held.fileno())

    def push(self, step: int, lock_fd: int) -> None:
        """Push one checkpoint, and remove it from those that wait."""
        folder, config = self.folder / step_name(step), self.config
        options = {
            "repo": config.repo_id,
            "dtype": config.dtype,
            "private": str(config.private).lower(),
            "include_state": str(config.include_state).lower(),
            "license": config.license,
            "data_license": config.data_license,
        }
        words = [f"--{key}={value}" for key, value in options.items() if value is not None]
        self.current = step
        try:
            with (self.out_dir / LOG).open("a+b") as log:
                start = log.seek(0, os.SEEK_END)
                self.process = start_process(["push", str(folder), *words], log, lock_fd)
                if self.stopped:  # meanwhile
                    self.process.terminate()
                code = self.process.wait()
                log.seek(start)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
            error = (lines or [f"exit code {code}"])[-1] if code else None
        except OSError as problem:
            error = str(problem)
        self.current = self.process = None
        if error is None:
            shutil.rmtree(folder, ignore_errors=True)
            self.log(f"step {step:,} is on the Hub: {config.repo_id}@step-{step}")
        elif not self.stopped:
            self.log(f"WARNING: the push of step {step:,} failed, it waits: {error}")


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
