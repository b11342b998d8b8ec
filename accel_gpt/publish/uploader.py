"""Upload checkpoints while a run trains, in child processes with low priority.

    {out_dir}/.uploading/step_00001000/    hard links to the checkpoint being uploaded

The trainer calls `on_checkpoint` after each save. A thread then starts one child after another
(`upload.py`): the copy to `checkpoint.copy_to`, then the push to `hub.repo_id`. The newest
checkpoint wins: if several are saved during an upload, only the last one is uploaded next.

A failed upload never ends a run. It is logged once, and retried with the next checkpoint and at the
end. The next launch uploads the newest checkpoint if a target lacks it.
"""

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accel_gpt.children import child_error, launch_child
from accel_gpt.config.experiment import CheckpointConfig, HubConfig
from accel_gpt.errors import BusyError
from accel_gpt.files import link_tree
from accel_gpt.launcher import STOP_WITH_PARENT
from accel_gpt.publish.copies import Copies
from accel_gpt.runs.folder import RunFolder

PREEMPTED_SECONDS = 60.0  # for a copy if the machine is about to be taken away; assumption


@dataclass(eq=False)  # a run that goes back trains a step again
class Saved:
    """A checkpoint that was saved."""

    folder: Path
    is_earlier: bool = False  # an earlier launch saved it: the targets may have it

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""
        return int(self.folder.name.removeprefix("step_"))


@dataclass(eq=False)
class Target:
    """A place that gets checkpoints."""

    kind: Literal["copy", "push"]
    label: str  # in messages
    settings: dict[str, Any]  # of `copy_checkpoint` or `push`
    has: Saved | None = None  # what this launch uploaded last
    failing: bool = False  # its last upload failed

    @property
    def module(self) -> str:
        """Return the module of the child. The module that copies does not import torch."""
        return f"accel_gpt.publish.{'copies' if self.kind == 'copy' else 'push'}"


class Uploader:
    """Uploads the newest checkpoint of a run to its targets, one after the other; on rank 0."""

    def __init__(
        self,
        checkpoint: CheckpointConfig,
        hub: HubConfig,
        run: Path,
        log: Callable[[str], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the uploader of the run in `run`.

        `on_lost` is called in a thread when another launch owns the copies.
        """
        self.checkpoint = checkpoint
        self.hub = hub
        self.run = run
        self.copies: Copies | None = None
        if checkpoint.copy_to:
            self.copies = Copies(checkpoint.copy_to, run, checkpoint.resume, log, on_lost)
        self.log = log
        self.folder = run / ".uploading"
        self.targets: list[Target] = []
        self.newest: Saved | None = None
        self.ending = False
        self.preempted = False
        self.stopped = False
        self.running: tuple[Target, subprocess.Popen[str]] | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")

    def open(self) -> None:
        """Own the copies, and restore the newest one if it is ahead, see `Copies.open`."""
        if self.copies:
            self.copies.open()

    def check(self) -> None:
        """Raise `BusyError` if another launch owns the copies."""
        if self.copies:
            self.copies.lease.check()

    def start(self) -> None:
        """Upload the newest checkpoint if a target lacks it."""
        checkpoints = RunFolder(self.run).checkpoints
        if checkpoints:
            self.newest = Saved(checkpoints[max(checkpoints)], is_earlier=True)
        if self.copies:  # first, since copies save work
            url = self.copies.url
            copy = {
                "url": url,
                "keep_last": self.checkpoint.keep_last,
                "launch": self.copies.lease.launch,
            }
            has = self.newest if self.copies.restored == max(checkpoints, default=0) else None
            self.targets.append(Target("copy", url, copy, has))
        if self.hub.push != "never":
            repo = self.hub.repo_id
            push = {"repo": repo, "private": self.hub.private}
            self.targets.append(Target("push", f"hf://{repo}", push))
        if self.newest:
            self.thread.submit(self.upload_newest)

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Upload a new checkpoint as soon as no other upload runs."""
        self.newest = Saved(checkpoint)
        self.thread.submit(self.upload_newest)

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait for the uploads of the newest checkpoint, until they fail or `interrupted()`.

        If `interrupted()` is true at the call, only its copy is made, within `PREEMPTED_SECONDS`.
        Returns whether an interrupt left an upload for the next launch. Raises `BusyError` if
        another launch owns the copies.
        """
        self.preempted = interrupted()
        end = time.monotonic() + (PREEMPTED_SECONDS if self.preempted else math.inf)
        self.ending = True
        running = self.running  # the thread may set it to None
        if self.preempted and running and running[0].kind == "push":
            running[1].kill()
        due = self.due()
        if due:
            labels = " and ".join(target.label for target in due)
            self.log(f"waiting for the upload to {labels}; Ctrl-C postpones it")
        last = self.thread.submit(self.upload_newest)
        while not last.done() and time.monotonic() < end:
            if interrupted() and not self.preempted:
                break
            wait([last], timeout=0.2)
        cut_short = not last.done()
        self.close()
        if not cut_short:
            last.result()  # raises an error that is a bug
        self.check()
        self.preempted = False
        left = self.due()
        for target in left:
            assert self.newest is not None
            self.log(
                f"WARNING: step {self.newest.step:,} was not uploaded to {target.label}; launch "
                "the same command again"
            )
        return cut_short and bool(left)

    def close(self) -> None:
        """Kill the upload in progress, which leaves no half copy, and let go of the copies.

        The next launch makes the upload.
        """
        self.stopped = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        running = self.running  # the thread may set it to None
        if running:
            running[1].kill()
        self.thread.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let go of the copies, so that the next launch need not wait."""
        if self.copies:
            self.copies.lease.release()

    def due(self) -> list[Target]:
        """Return the targets that lack the newest checkpoint and should get it now.

        The final step is pushed when the run ends, with its last metrics.
        """
        if self.newest is None:
            return []
        is_final = self.newest.step == RunFolder(self.run).end
        push_is_due = self.ending if is_final else self.hub.push == "every_checkpoint"
        return [
            target
            for target in self.targets
            if target.has is not self.newest
            and (target.kind == "copy" or (push_is_due and not self.preempted))
        ]

    # ----------------------------------------------------------------------- the thread

    def upload_newest(self) -> None:
        """Upload the newest checkpoint to each target that lacks it; run by the thread."""
        for target in self.due():
            newest = self.newest
            if newest is None or not self.is_wanted(target):
                continue
            linked = self.folder / newest.folder.name  # pruning does not remove these files
            shutil.rmtree(self.folder, ignore_errors=True)  # also of a launch that was killed
            try:
                link_tree(newest.folder, linked)
                error = self.upload(target, linked, newest.is_earlier)
            except OSError as problem:  # there is no room for a link, a process or a file
                error = str(problem)
            self.report(target, newest, error)
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_wanted(self, target: Target) -> bool:
        """Return whether an upload is due in this launch."""
        lost = self.copies is not None and bool(self.copies.lease.lost)
        return not self.stopped and not lost and target in self.due()

    def upload(self, target: Target, linked: Path, if_missing: bool) -> str | None:
        """Upload a checkpoint in a child process; return its error, or None."""
        arguments = [str(linked), json.dumps(target.settings)]
        if if_missing:
            arguments.append("--if_missing")
        with tempfile.TemporaryFile() as output:
            child = launch_child(
                arguments,
                module=target.module,
                environment={
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    STOP_WITH_PARENT: str(os.getpid()),
                },
                stdout=output,
                stderr=output,
                own_group=True,  # Ctrl-C must reach only the training
                # on two busy cores a copy of 50 MB takes 2 s at normal, 9 s at low, 32 s at idle
                # priority; a push makes steps 12 % slower even at niceness 19
                priority="low" if target.kind == "copy" else "idle",
            )
            self.running = target, child
            if not self.is_wanted(target):  # while the child started
                child.kill()
            code = child.wait()
            self.running = None
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        if code == BusyError.exit_code:  # another launch owns the copies: make no more
            self.targets.remove(target)
        return child_error(text, code) if code else None

    def report(self, target: Target, uploaded: Saved, error: str | None) -> None:
        """Note and log the result of an upload; a target that goes on failing is logged once."""
        failed = f"WARNING: upload of step {uploaded.step:,} to {target.label} failed"
        if error is None:
            target.has = uploaded
            target.failing = False
            if not uploaded.is_earlier:
                self.log(f"uploaded step {uploaded.step:,} to {target.label}")
        elif target not in self.targets:
            self.log(f"{failed}, no more follow: {error}")
        elif self.is_wanted(target) and not target.failing:
            target.failing = True
            self.log(f"{failed}: {error}; it will be retried")
