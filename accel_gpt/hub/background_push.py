"""Checkpoints of a run in training on their way to the Hub, by processes beside it.

Each upload is an `accel-gpt push` of its own, on cores that are idle: in the training process
there is only a thread that waits for it. What is to be uploaded stands in `.upload/` of the run,
as hard links: pruning does not take it away, and a later launch finds what is left.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from accel_gpt.config.experiment import Config, HubConfig
from accel_gpt.files import link_tree
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.training.run_folder import checkpoint_steps, step_name

LOG = "hub.log"
MOST_WAITING = 3  # checkpoints; assumption: when the Hub is away for long, the disk must not fill
LOWEST_PRIORITY = 19
CLOSING_SECONDS, LOOK_SECONDS = 10.0, 0.5


def start_uploads(config: Config, max_steps: int, say: Callable[[str], None]) -> "Uploads | None":
    """The uploads of a run of `max_steps`, where `hub.push` asks for them."""
    if config.hub.push == "never":
        return None
    return Uploads(config.hub, Path(config.out_dir), max_steps, say)


class Uploads:
    """Uploads checkpoints one after the other; what failed is tried again with the next one."""

    def __init__(
        self, config: HubConfig, out_dir: Path, max_steps: int, say: Callable[[str], None]
    ) -> None:
        self.config, self.out_dir, self.max_steps, self.say = config, out_dir, max_steps, say
        self.room = out_dir / ".upload"
        self.process: subprocess.Popen[bytes] | None = None
        self.last: Path | None = None
        self.current: int | None = None  # the step that is under way
        self.inherited = -1  # file descriptor of the lock, which an upload keeps while it lives
        self.wake, self.ending, self.killed = threading.Event(), False, False
        for debris in self.room.glob(".step_*"):
            shutil.rmtree(debris, ignore_errors=True)
        if checkpoint_steps(self.room):  # of an earlier launch
            self.wake.set()
        self.thread = threading.Thread(target=self.work, name="uploads", daemon=True)
        self.thread.start()
        atexit.register(self.abandon)  # also when the run ends with an error

    def note(self, checkpoint: Path) -> None:
        """Tell of a new checkpoint; the last of the run is uploaded when all its figures are."""
        if checkpoint.name == step_name(self.max_steps):
            self.last = checkpoint
            self.keep(checkpoint)  # if the end does not come, the next launch uploads it
        elif self.config.push == "every_checkpoint":
            self.add(checkpoint)

    def add(self, checkpoint: Path) -> None:
        """Upload a checkpoint, without waiting for it."""
        self.keep(checkpoint)
        self.drop_oldest()
        self.wake.set()

    def keep(self, checkpoint: Path) -> None:
        """Put a checkpoint into the room of those that wait."""
        linking, kept = (self.room / f"{dot}{checkpoint.name}" for dot in (".", ""))
        try:
            self.room.mkdir(exist_ok=True)
            link_tree(checkpoint, linking)
            shutil.rmtree(kept, ignore_errors=True)  # of a step that was trained once more
            linking.rename(kept)
        except OSError as error:  # shutil.Error is one
            shutil.rmtree(linking, ignore_errors=True)
            self.say(f"WARNING: {checkpoint.name} cannot be kept for the Hub: {error}")

    def drop_oldest(self) -> None:
        """Give up the oldest checkpoints that wait, where there are more than `MOST_WAITING`."""
        waiting = [step for step in checkpoint_steps(self.room) if step != self.current]
        for step in waiting[:-MOST_WAITING]:
            self.say(f"WARNING: step {step:,} is given up: more than {MOST_WAITING} wait")
            shutil.rmtree(self.room / step_name(step), ignore_errors=True)

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until everything was tried once more, or until `interrupted`; whether that left
        something, which the next launch uploads.
        """
        if self.last:
            self.add(self.last)
        if checkpoint_steps(self.room):
            self.say(f"waiting for the uploads to {self.config.repo_id}; Ctrl-C leaves them")
        self.ending = True
        self.wake.set()
        while self.thread.is_alive() and not interrupted():
            self.thread.join(0.2)
        cut_short = self.thread.is_alive()
        self.abandon()
        atexit.unregister(self.abandon)
        if left := checkpoint_steps(self.room):
            steps = ", ".join(f"{step:,}" for step in left)
            self.say(
                f"WARNING: not on the Hub: step {steps}; the same command launched again uploads "
                f"it, or: accel-gpt push {self.out_dir} --repo {self.config.repo_id}"
            )
        return cut_short and bool(left)

    def abandon(self) -> None:
        """End the upload that is under way; the next launch begins it anew."""
        self.killed = self.ending = True
        self.wake.set()
        if process := self.process:
            process.terminate()
        self.thread.join(CLOSING_SECONDS)

    def work(self) -> None:
        """The thread: upload all that waits, whenever something was added."""
        self.room.mkdir(exist_ok=True)
        with (self.room / ".lock").open("w") as lock:
            while not taken(lock):  # an upload of a launch that was killed is still at work
                if self.killed:
                    return
                time.sleep(LOOK_SECONDS)
            self.inherited = lock.fileno()
            for debris in self.room.glob(".push_*"):
                shutil.rmtree(debris, ignore_errors=True)
            self.work_alone()

    def work_alone(self) -> None:
        """The same, once no other process uploads from the room."""
        while not self.ending:
            self.wake.wait()
            self.wake.clear()
            last = self.ending
            self.upload_all()
            if last:
                return
        self.upload_all()

    def upload_all(self) -> None:
        """Try every waiting checkpoint once, the oldest first."""
        for step in checkpoint_steps(self.room):
            if self.killed:
                return
            if not (self.room / step_name(step)).is_dir():  # given up meanwhile
                continue
            self.current = step
            problem = self.upload(step)
            self.current = None
            if problem is None:
                shutil.rmtree(self.room / step_name(step), ignore_errors=True)
                self.say(f"step {step:,} is on the Hub: {self.config.repo_id}@step-{step}")
            elif not self.killed:
                self.say(f"WARNING: the upload of step {step:,} failed, it waits: {problem}")

    def upload(self, step: int) -> str | None:
        """Upload one checkpoint; what went wrong."""
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
        place = str(self.room / step_name(step))
        try:
            with (self.out_dir / LOG).open("a+b") as log:
                start = log.seek(0, os.SEEK_END)
                self.process = start_beside(["push", place, *words], log, self.inherited)
                if self.killed:  # meanwhile
                    self.process.terminate()
                code = self.process.wait()
                self.process = None
                log.seek(start)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError as error:
            return str(error)
        return None if code == 0 else (lines or [f"exit code {code}"])[-1]


def taken(lock: TextIO) -> bool:
    """Whether the lock is now ours."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def start_beside(words: list[str], log: BinaryIO, inherited: int) -> "subprocess.Popen[bytes]":
    """Start `accel-gpt WORDS ...` for cores that are idle; what it says goes to `log`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_gpt.cli", *words],
        env={**environment_without_launcher(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,  # Ctrl-C is for the training; in a session of its own it would count more
        pass_fds=(inherited,),
    )
    with contextlib.suppress(OSError):  # it may have ended already
        if hasattr(os, "SCHED_IDLE"):  # the lowest niceness cost a step 12 % on two busy cores
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
    return process
