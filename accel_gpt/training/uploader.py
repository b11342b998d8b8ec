"""Upload checkpoints while a run trains, each in a child process with low priority.

    {out_dir}/.copies/step_00001000/    to be copied to checkpoint.copy_to
    {out_dir}/.upload/step_00001000/    to be pushed to hub.repo_id

A queue is a folder of hard links, so pruning the run's checkpoints does not remove its files. The
next launch uploads the checkpoints that a launch leaves in a queue. A thread of the training
process starts one child after another. A failed upload never ends a run. It is logged once and
retried after a pause, with the next checkpoint and at the end of the run.
"""

import atexit
import contextlib
import math
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_gpt.config.experiment import Config
from accel_gpt.files import link_tree, lock
from accel_gpt.launcher import child_error, launch_child
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, step_name

PAUSE_SECONDS = 60.0  # before a failed upload is retried; assumption
TRIES = 3  # attempts for each queued checkpoint at the end of a run
END_PAUSE_SECONDS = 1.0  # between these attempts, doubled each time; assumption
PREEMPTED_SECONDS = 60.0  # time for copies if the machine is about to be taken away; assumption
# Most checkpoints that wait for the Hub: if it is offline, the disk must not fill; assumption
MOST_WAITING = 3
STOP_SECONDS = 10.0  # time for a child to clean up after SIGTERM


@dataclass(frozen=True)
class Target:
    """A destination for checkpoints: which ones are uploaded, and by which command."""

    queue: str
    """Name of the queue's folder in the folder of the run."""
    label: str
    """Name of the destination in messages."""
    module: str
    """Module that the child process runs."""
    argv: Callable[[Path, bool], list[str]]
    """Return the child's arguments for a checkpoint. True: an earlier launch saved it."""
    priority: Literal["low", "idle"]
    most_waiting: int
    """Most checkpoints in the queue; older ones are dropped."""
    preempted_seconds: float
    """Time for uploads after a signal, in seconds."""
    final_step: int | None = None
    """Step that is uploaded only when the run ends, with its last metrics and samples."""
    only_final: bool = False
    """Whether to upload only `final_step`."""
    by_hand: str = ""
    """How to upload the remaining checkpoints with a command: the end of a message."""


def copy_target(config: Config) -> Target:
    """Return the target of `checkpoint.copy_to`: the newest checkpoint, with all its files."""
    url = str(config.checkpoint.copy_to)

    def argv(checkpoint: Path, resumed: bool) -> list[str]:
        arguments = [str(checkpoint), url, str(config.checkpoint.keep_last)]
        if resumed:
            arguments.append("--unless_newer")
        return arguments

    return Target(
        queue=".copies",
        label=url,
        module="accel_gpt.training.copies",
        argv=argv,
        # on two busy cores a copy of 50 MB takes 2 s at normal, 9 s at low, 32 s at idle priority;
        # idle is too slow for a machine that may be taken away
        priority="low",
        most_waiting=1,
        preempted_seconds=PREEMPTED_SECONDS,
    )


def hub_target(config: Config, final_step: int) -> Target:
    """Return the target of `hub.push`: the exported model, card, metrics and curves."""
    hub = config.hub
    options = {
        "repo": hub.repo_id,
        "dtype": hub.dtype,
        "private": str(hub.private).lower(),
        "license": hub.license,
        "data_license": hub.data_license,
        "language": hub.language,
    }
    arguments = [f"--{key}={value}" for key, value in options.items() if value is not None]
    return Target(
        queue=".upload",
        label=f"hf://{hub.repo_id}",
        module="accel_gpt.cli",
        argv=lambda checkpoint, _: ["push", str(checkpoint), *arguments],
        priority="idle",  # even at niceness 19, a push made steps 12 % slower on two busy cores
        most_waiting=MOST_WAITING,
        preempted_seconds=0.0,
        final_step=final_step,
        only_final=hub.push == "end",
        by_hand=f", or run accel-gpt push {shlex.quote(config.out_dir)} --repo {hub.repo_id}",
    )


def open_uploaders(config: Config, final_step: int, log: Callable[[str], None]) -> list["Uploader"]:
    """Start the uploaders of a config, on rank 0. Call `finish` of each at the end of the run."""
    uploaders = []
    if config.checkpoint.copy_to:
        own = RunFolder(config.out_dir).checkpoints
        resumed = own[max(own)] if own else None  # the last launch may have failed to copy it
        uploaders.append(Uploader(copy_target(config), config.out_dir, log, resumed))
    if config.hub.push != "never":
        uploaders.append(Uploader(hub_target(config, final_step), config.out_dir, log))
    return uploaders


class Uploader:
    """Uploads the checkpoints of a run to a target, one after another.

    `resumed`: the newest checkpoint of an earlier launch. It is uploaded unless the target has this
    step or a later one.
    """

    def __init__(
        self,
        target: Target,
        out_dir: str,
        log: Callable[[str], None],
        resumed: Path | None = None,
    ) -> None:
        self.target = target
        self.log = log
        self.folder = Path(out_dir) / target.queue
        self.changing = threading.Lock()  # held while the queue and `newest` change together
        self.wake = threading.Event()
        self.ending = False
        self.stopped = False
        self.failing = False  # the last upload failed
        self.process: subprocess.Popen[str] | None = None
        self.current: int | None = None  # step of the upload in progress
        self.resumed: int | None = None  # step of `resumed`
        self.folder.mkdir(parents=True, exist_ok=True)
        for pattern in (".step_*", ".trash_*"):  # incomplete folders of a killed launch
            for partial in self.folder.glob(pattern):
                shutil.rmtree(partial, ignore_errors=True)
        self.newest = max(self.waiting(), default=0)  # step of the last save
        if resumed:
            self.on_checkpoint(resumed)
            self.resumed = self.newest
        self.wake.set()  # upload the checkpoints that an earlier launch left
        self.thread = threading.Thread(target=self.run, name=f"uploads {target.queue}", daemon=True)
        self.thread.start()
        atexit.register(self.stop)  # also if the run ends with an error

    def waiting(self) -> list[int]:
        """Return the steps in the queue, ascending."""
        return checkpoint_steps(self.folder)

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Queue a new checkpoint.

        Drops later steps, left from before a roll back, and the oldest steps if too many wait.
        """
        step = int(checkpoint.name.removeprefix("step_"))
        if self.target.only_final and step != self.target.final_step:
            return
        partial = self.folder / f".{checkpoint.name}"
        queued = self.folder / checkpoint.name
        try:
            link_tree(checkpoint, partial)
            with self.changing:
                if queued.exists():  # the same step from before a roll back
                    remove_queued(queued)
                partial.rename(queued)
                self.newest = step
                self.resumed = None
        except OSError as error:  # or shutil.Error, its subclass
            shutil.rmtree(partial, ignore_errors=True)
            self.log(
                f"WARNING: {checkpoint.name} cannot be queued for {self.target.label}: {error}"
            )
            return
        self.trim()
        self.wake.set()

    def trim(self) -> None:
        """Drop checkpoints that need no upload any more, except the one being uploaded."""
        with self.changing:
            waiting = self.waiting()
            valid = [step for step in waiting if step <= self.newest]
            for step in waiting:
                if step == self.current or step in valid[-self.target.most_waiting :]:
                    continue
                if step in valid and self.target.most_waiting > 1:
                    self.log(
                        f"WARNING: step {step:,} will not be uploaded to {self.target.label}: more "
                        f"than {self.target.most_waiting} checkpoints wait"
                    )
                remove_queued(self.folder / step_name(step))

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until the queue is empty, uploads have failed `TRIES` times, or `interrupted()`.

        If `interrupted()` is true at the call, waits for the target's `preempted_seconds` instead.
        Returns whether an interrupt left checkpoints for the next launch.
        """
        preempted = interrupted()
        seconds = self.target.preempted_seconds if preempted else math.inf
        end = time.monotonic() + seconds
        if self.waiting() and seconds:
            self.log(f"waiting for uploads to {self.target.label}; Ctrl-C postpones them")
        self.ending = True
        self.wake.set()
        while self.thread.is_alive() and time.monotonic() < end:
            if interrupted() and not preempted:
                break
            self.thread.join(0.2)
        cut_short = self.thread.is_alive()
        self.stop()
        atexit.unregister(self.stop)
        left = self.waiting()
        if left:
            steps = ", ".join(f"{step:,}" for step in left)
            self.log(
                f"WARNING: not uploaded to {self.target.label}: step {steps}; launch the same "
                f"command again{self.target.by_hand}"
            )
        elif not self.thread.is_alive():
            shutil.rmtree(self.folder, ignore_errors=True)
        return cut_short and bool(left)

    def stop(self) -> None:
        """Stop the upload in progress; the next launch restarts it."""
        self.stopped = True
        self.ending = True
        self.wake.set()
        process = self.process  # the thread may set it to None
        if process:
            process.terminate()
            self.thread.join(STOP_SECONDS)

    # ----------------------------------------------------------------------- the thread

    def run(self) -> None:
        """Upload queued checkpoints until `finish` or `stop`; run by the thread.

        A child inherits the lock and holds it until it ends. So if a launch is killed, the next
        launch waits for the child.
        """
        with lock(self.folder / ".lock") as held:
            for partial in self.folder.glob(".push_*"):
                shutil.rmtree(partial, ignore_errors=True)
            tries = 0
            while not self.stopped:
                self.wake.wait(PAUSE_SECONDS if self.failing else None)
                self.wake.clear()
                ending = self.ending
                for step in self.waiting():
                    early = step == self.target.final_step and not ending
                    if not early and not self.stopped:
                        self.upload(step, held.fileno())
                self.trim()
                if ending:
                    tries += 1
                    if tries == TRIES or not self.waiting():
                        return
                    time.sleep(END_PAUSE_SECONDS * 2 ** (tries - 1))
                    self.wake.set()

    def upload(self, step: int, lock_file: int) -> None:
        """Upload one checkpoint; if this succeeds, remove it from the queue."""
        folder = self.folder / step_name(step)
        label = self.target.label
        self.current = step
        queued = folder_id(folder)
        try:
            error = self.run_upload(folder, lock_file, resumed=step == self.resumed)
        except OSError as problem:
            error = str(problem)
        self.process = None
        self.current = None
        if queued is None or folder_id(folder) != queued:  # dropped or replaced during the upload
            return
        if error is None:
            remove_queued(folder)
            self.failing = False
            self.log(f"uploaded step {step:,} to {label}")
        elif not self.stopped and not self.failing:
            self.failing = True
            self.log(
                f"WARNING: upload of step {step:,} to {label} failed: {error}; it will be retried"
            )

    def run_upload(self, folder: Path, lock_file: int, resumed: bool) -> str | None:
        """Upload a queued checkpoint in a child process; return its error, or None."""
        with (self.folder / "output.log").open("w+b") as output:
            self.process = launch_child(
                self.target.argv(folder, resumed),
                module=self.target.module,
                environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                own_group=True,  # Ctrl-C must reach only the training
                priority=self.target.priority,
                pass_fds=(lock_file,),
            )
            if self.stopped:  # while the child started
                self.process.terminate()
            code = self.process.wait()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return child_error(text, code) if code else None


def remove_queued(folder: Path) -> None:
    """Remove a checkpoint from a queue. A rename makes it vanish at once for readers."""
    trash = folder.with_name(f".trash_{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def folder_id(folder: Path) -> int | None:
    """Return the inode of a folder; None if it does not exist."""
    try:
        return os.stat(folder).st_ino
    except FileNotFoundError:
        return None
