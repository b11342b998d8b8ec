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
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accel_gpt.children import child_error, launch_child
from accel_gpt.config.experiment import CheckpointConfig, HubConfig
from accel_gpt.errors import BusyError
from accel_gpt.files import link_tree
from accel_gpt.launcher import STOP_WITH_PARENT
from accel_gpt.publish.copies import Copies, Owner
from accel_gpt.runs.folder import RunFolder

PREEMPTED_SECONDS = 60.0  # for a copy if the machine is about to be taken away; assumption
STOP_SECONDS = 10.0  # for a child to clean up after SIGTERM


@dataclass(frozen=True)
class Target:
    """A place that gets checkpoints."""

    kind: Literal["copy", "push"]
    label: str  # in messages
    settings: dict[str, Any]  # of `copy_checkpoint` or `push`
    # on two busy cores a copy of 50 MB takes 2 s at normal, 9 s at low, 32 s at idle priority;
    # a push makes steps 12 % slower even at niceness 19
    priority: Literal["low", "idle"]
    by_hand: str = ""  # the command that uploads what is left


def targets_of(
    checkpoint: CheckpointConfig, hub: HubConfig, run: Path, owner: Owner | None
) -> list[Target]:
    """Return the targets of the run in `run`; copies come first, since they save work."""
    targets = []
    if checkpoint.copy_to and owner:
        targets.append(
            Target(
                kind="copy",
                label=checkpoint.copy_to,
                settings={
                    "url": checkpoint.copy_to,
                    "keep_last": checkpoint.keep_last,
                    "owner": asdict(owner),
                },
                priority="low",
            )
        )
    if hub.push != "never":
        targets.append(
            Target(
                kind="push",
                label=f"hf://{hub.repo_id}",
                settings={
                    "repo": hub.repo_id,
                    "private": hub.private,
                    "license": hub.license,
                },
                priority="idle",
                by_hand=f", or run accel-gpt push {shlex.quote(str(run))} --repo {hub.repo_id}",
            )
        )
    return targets


class Uploader:
    """Uploads the newest checkpoint of a run to its targets, one after the other; on rank 0."""

    def __init__(
        self,
        checkpoint: CheckpointConfig,
        hub: HubConfig,
        run: Path,
        copies: Copies | None,
        final_step: Callable[[], int | None],
        log: Callable[[str], None],
    ) -> None:
        """Make the uploader of the run in `run`.

        `copies`: of `checkpoint.copy_to`. `final_step` returns the step that `hub.push: end`
        uploads.
        """
        self.checkpoint = checkpoint
        self.hub = hub
        self.out_dir = run
        self.copies = copies
        self.targets: list[Target] = []
        self.push_all = hub.push == "every_checkpoint"
        self.final_step = final_step
        self.log = log
        self.folder = run / ".uploading"
        self.changing = threading.Lock()  # held while `newest` and `missing` change together
        self.wake = threading.Event()
        self.newest: Path | None = None
        self.missing: list[Target] = []  # the targets that lack `newest`
        self.resumed = False  # `newest` is from an earlier launch: the targets may have it
        self.failing: set[str] = set()  # labels of the targets whose last upload failed
        self.ending = False
        self.preempted = False
        self.stopped = False
        self.child: subprocess.Popen[str] | None = None
        self.current: Target | None = None
        self.thread = threading.Thread(target=self.run, name="uploads", daemon=True)

    def start(self) -> None:
        """Claim the copies; upload the newest checkpoint if a target lacks it.

        Raises the errors of `Copies.claim`.
        """
        owner = self.copies.claim() if self.copies else None
        self.targets = targets_of(self.checkpoint, self.hub, self.out_dir, owner)
        shutil.rmtree(self.folder, ignore_errors=True)  # of a launch that was killed
        own = RunFolder(self.out_dir).checkpoints
        if own:
            self.on_checkpoint(own[max(own)])
            self.resumed = True
        self.thread.start()

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Upload a new checkpoint as soon as no other upload runs."""
        with self.changing:
            self.newest = checkpoint
            self.missing = list(self.targets)
            self.resumed = False
        self.wake.set()

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait for the uploads of the newest checkpoint, until they fail or `interrupted()`.

        If `interrupted()` is true at the call, only its copy is made, within `PREEMPTED_SECONDS`.
        Returns whether an interrupt left an upload for the next launch.
        """
        self.preempted = interrupted()
        end = time.monotonic() + (PREEMPTED_SECONDS if self.preempted else math.inf)
        self.ending = True
        if self.preempted and self.current and self.current.kind == "push":
            self.terminate()
        due = self.due()
        if due:
            labels = " and ".join(target.label for target in due)
            self.log(f"waiting for the upload to {labels}; Ctrl-C postpones it")
        self.wake.set()
        while self.thread.is_alive() and time.monotonic() < end:
            if interrupted() and not self.preempted:
                break
            self.thread.join(0.2)
        cut_short = self.thread.is_alive()
        self.close()
        self.preempted = False
        left = self.due()
        for target in left:
            self.log(
                f"WARNING: {self.newest_name()} was not uploaded to {target.label}; launch the "
                f"same command again{target.by_hand}"
            )
        return cut_short and bool(left)

    def close(self) -> None:
        """Stop the upload in progress; the next launch starts it again."""
        if self.stopped:
            return
        self.stopped = True
        self.wake.set()
        self.terminate()
        if self.thread.is_alive():
            self.thread.join(STOP_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def terminate(self) -> None:
        """Ask the child to end, if there is one."""
        child = self.child  # the thread may set it to None
        if child:
            child.terminate()

    def newest_name(self) -> str:
        """Return `step 1,000` for the newest checkpoint."""
        assert self.newest is not None
        return f"step {step_of(self.newest):,}"

    def due(self) -> list[Target]:
        """Return the targets that lack the newest checkpoint and should get it now.

        The final step is pushed when the run ends, with its last metrics and samples.
        """
        if self.newest is None:
            return []
        final = step_of(self.newest) == self.final_step()
        push_is_due = self.ending if final else self.push_all
        return [
            target
            for target in self.missing
            if target.kind == "copy" or (push_is_due and not self.preempted)
        ]

    def is_cancelled(self, target: Target) -> bool:
        """Return whether the next launch makes the uploads to a target."""
        return self.stopped or (self.preempted and target.kind == "push")

    # ----------------------------------------------------------------------- the thread

    def run(self) -> None:
        """Upload until `finish` or `close`; run by the thread."""
        while not self.stopped:
            self.wake.wait()
            self.wake.clear()
            ending = self.ending  # the last round starts after this
            self.upload_newest()
            if ending:
                return

    def upload_newest(self) -> None:
        """Upload the newest checkpoint to each target that lacks it."""
        with self.changing:
            checkpoint, resumed, due = self.newest, self.resumed, self.due()
        if checkpoint is None or not due:
            return
        linked = self.folder / checkpoint.name  # pruning does not remove these files
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            link_tree(checkpoint, linked)
        except OSError as problem:
            if checkpoint is self.newest:  # otherwise it was pruned, and a newer one is next
                for target in due:
                    self.report(target, checkpoint, str(problem), resumed)
            return
        for target in due:
            if self.is_cancelled(target):
                break
            self.current = target
            try:
                error = self.upload(target, linked, resumed)
            except OSError as problem:  # there is no room for a process
                error = str(problem)
            self.child = None
            self.current = None
            self.report(target, checkpoint, error, resumed)
        shutil.rmtree(self.folder, ignore_errors=True)

    def upload(self, target: Target, linked: Path, resumed: bool) -> str | None:
        """Upload a checkpoint in a child process; return its error, or None."""
        arguments = [target.kind, str(linked), json.dumps(target.settings)]
        if resumed:
            arguments.append("--if_missing")
        with tempfile.TemporaryFile() as output:
            self.child = launch_child(
                arguments,
                module="accel_gpt.publish.upload",
                environment={
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    STOP_WITH_PARENT: str(os.getpid()),
                },
                stdout=output,
                stderr=output,
                own_group=True,  # Ctrl-C must reach only the training
                priority=target.priority,
            )
            if self.is_cancelled(target):  # while the child started
                self.terminate()
            code = self.child.wait()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        if code == BusyError.exit_code:  # another launch owns the copies: make no more
            self.targets.remove(target)
        return child_error(text, code) if code else None

    def report(self, target: Target, checkpoint: Path, error: str | None, resumed: bool) -> None:
        """Note and log the result of an upload; a target that goes on failing is logged once."""
        name = f"step {step_of(checkpoint):,}"
        if error is None:
            with self.changing:
                if checkpoint is self.newest:
                    self.missing.remove(target)
            self.failing.discard(target.label)
            if not resumed:
                self.log(f"uploaded {name} to {target.label}")
        elif target not in self.targets:
            with self.changing:
                self.missing = [other for other in self.missing if other is not target]
            self.log(f"WARNING: upload of {name} to {target.label} failed, no more follow: {error}")
        elif not self.is_cancelled(target) and target.label not in self.failing:
            self.failing.add(target.label)
            self.log(
                f"WARNING: upload of {name} to {target.label} failed: {error}; it will be retried"
            )


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step_"))
