"""Copies of a run's checkpoints on another disk, or in a store that fsspec writes to.

    {checkpoint.copy_to}/step_00001000/     the files of a checkpoint, its manifest last

A thread copies each new checkpoint from hard links in `.copies/` of the run, which the pruning of
the run leaves, and removes copies beyond `checkpoint.keep_last`. A copy without a manifest is none.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.data.remote import Store, reason
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import link_tree, sync
from accel_gpt.training.checkpoint import verify
from accel_gpt.training.run_folder import CHECKPOINT, RunFolder, checkpoint_steps, step_name

MANIFEST = "manifest.json"
PAUSE_SECONDS = 60.0  # after a copy that failed; assumption
TRIES = 3  # of the last copy of a launch
LAST_SECONDS = 60.0


class CheckpointCopies:
    """Copies the newest checkpoint while training continues; one that fails is tried again."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        self.folder, self.log = Path(config.out_dir) / ".copies", log
        self.keep, self.to = config.checkpoint.keep_last, str(config.checkpoint.copy_to)
        self.system, self.root = open_store(self.to)
        self.wake, self.ending = threading.Event(), False
        self.newest = self.current = -1  # the steps saved last, and being copied
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed launch's
        self.folder.mkdir(parents=True, exist_ok=True)
        own = RunFolder(config.out_dir).checkpoints
        self.resumed = max(own, default=-1)  # its copy may have failed
        if own:
            self.on_checkpoint(own[self.resumed])
        self.thread = threading.Thread(target=self.run, name="checkpoint copies", daemon=True)
        self.thread.start()

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Copy a new checkpoint, in place of those that wait."""
        self.newest = int(checkpoint.name.removeprefix("step_"))
        for step in checkpoint_steps(self.folder):
            if step != self.current:
                shutil.rmtree(self.folder / step_name(step), ignore_errors=True)
        partial = self.folder / f".{checkpoint.name}"
        shutil.rmtree(partial, ignore_errors=True)
        link_tree(checkpoint, partial)
        with contextlib.suppress(OSError):  # the same step is being copied
            partial.rename(self.folder / checkpoint.name)
        self.wake.set()

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until the last checkpoint is copied, or could not be, or until `interrupted`; where
        that came before, as when a machine is taken away, for `LAST_SECONDS`.

        Returns whether an interrupt left it.
        """
        before, start = interrupted(), time.monotonic()
        if checkpoint_steps(self.folder):
            self.log(f"copying the last checkpoint to {self.to}; Ctrl-C leaves it")
        self.ending = True
        self.wake.set()
        while self.thread.is_alive() and (before or not interrupted()):
            self.thread.join(0.2)
            if before and time.monotonic() - start > LAST_SECONDS:
                break
        left = bool(checkpoint_steps(self.folder))
        if left:
            self.log(f"WARNING: the last checkpoint was not copied to {self.to}")
        shutil.rmtree(self.folder, ignore_errors=True)
        return left and self.thread.is_alive()

    def run(self) -> None:
        """Copy whenever a checkpoint came, until `finish`."""
        failed = 0
        while not (self.ending and (failed >= TRIES or not checkpoint_steps(self.folder))):
            self.wake.wait(PAUSE_SECONDS if failed else None)
            self.wake.clear()
            if (step := self.newest) in checkpoint_steps(self.folder):
                self.current = step
                try:
                    self.copy(step)
                    failed = 0
                except Exception as error:  # of botocore, huggingface_hub, OSError, ...
                    failed += 1
                    if failed == 1:
                        self.log(
                            f"WARNING: the checkpoint of step {step:,} could not be copied to "
                            f"{self.to}: {reason(error)}; it is tried again"
                        )
                    if self.ending and failed < TRIES:
                        time.sleep(failed)
                        self.wake.set()
                else:
                    for old in checkpoint_steps(self.folder):
                        if old == step or old != self.newest:
                            shutil.rmtree(self.folder / step_name(old), ignore_errors=True)

    def copy(self, step: int) -> None:
        """Copy a checkpoint, and remove the oldest copies and later ones, which a roll back left.

        That of an earlier launch is copied only where the store has none as new.
        """
        copied = copied_steps(self.system, self.root)
        as_new = [one for one in copied if one >= step] if step == self.resumed else []
        if any(self.system.exists(f"{self.root}/{step_name(n)}/{MANIFEST}") for n in as_new):
            return
        self.resumed = -1  # after a roll back the same step is another checkpoint
        checkpoint = self.folder / step_name(step)
        target = f"{self.root}/{checkpoint.name}"
        self.system.makedirs(target, exist_ok=True)
        if self.system.exists(f"{target}/{MANIFEST}"):  # the step was trained once more
            self.system.rm_file(f"{target}/{MANIFEST}")
        names = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
        for name in (*sorted(names), MANIFEST):
            self.system.put_file(str(checkpoint / name), f"{target}/{name}")
        kept = sorted(one for one in {*copied, step} if one <= step)[-self.keep :]
        for former in {*copied} - {*kept}:
            old = f"{self.root}/{step_name(former)}"
            with contextlib.suppress(FileNotFoundError):  # it broke off
                self.system.rm_file(f"{old}/{MANIFEST}")
            self.system.rm(old, recursive=True)


def open_store(url: str) -> tuple[Any, str]:
    """File system and folder of `checkpoint.copy_to`; `UserError` where its package is missing."""
    return Store(url if "://" in url else str(Path(url).resolve())).system


def copied_steps(system: Any, root: str) -> list[int]:
    """Steps of the copies in a store, ascending, also of those without a manifest."""
    system.invalidate_cache()
    if not system.exists(root):
        return []
    names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in system.ls(root, detail=True)]
    return sorted(int(found[1]) for found in map(CHECKPOINT.fullmatch, names) if found)


def fetch_copy(config: Config, log: Callable[[str], None]) -> None:
    """Download the newest intact copy for a run that has no checkpoint of its own.

    Raises `UserError` if the store cannot be opened or read, and for one where checkpoints would be
    lost; `CheckpointError` where all copies are damaged.
    """
    url, resume = str(config.checkpoint.copy_to), config.checkpoint.resume
    run, (system, root) = RunFolder(config.out_dir), open_store(url)
    if "://" not in url:
        require(not Path(url).is_file(), f"checkpoint.copy_to {url} is a file; give a folder")
        require(
            not Path(url).resolve().is_relative_to(Path(config.out_dir).resolve()),
            f"checkpoint.copy_to {url} lies in out_dir {config.out_dir}; give a folder elsewhere",
        )
    if run.checkpoints:
        return
    folder, damaged = Path(config.out_dir) / "checkpoints", False
    try:
        steps = copied_steps(system, root)
        require(
            not (steps and resume == "never"),
            f"checkpoint.resume is never but checkpoint.copy_to {url} holds copies of "
            "a run; set another, or remove them",
        )
        for step in reversed(steps):
            source, name = f"{root}/{step_name(step)}", step_name(step)
            if not system.exists(f"{source}/{MANIFEST}"):
                continue
            temporary = folder / f".tmp_{name}"
            temporary.mkdir(parents=True, exist_ok=True)
            for entry in system.ls(source, detail=False):
                file = temporary / entry.rpartition("/")[2]
                system.get_file(entry, str(file))
                sync(file)
            try:
                verify(temporary)
            except CheckpointError as error:
                log(f"WARNING: {error}; a copy before it is taken")
                shutil.rmtree(temporary)
                damaged = True
                continue
            temporary.rename(folder / name)
            sync(folder)
            log(f"step {step:,} was downloaded from {url}")
            return
        if damaged:
            raise CheckpointError(
                f"all copies in checkpoint.copy_to {url} are damaged; set another one "
                "to start from scratch"
            )
    except (UserError, CheckpointError):
        raise
    except Exception as error:
        raise UserError(f"checkpoint.copy_to {url} cannot be read: {reason(error)}") from None
