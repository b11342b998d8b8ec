"""Writes checkpoints so that a kill at any moment leaves the one before, or the new one, whole.

On the training thread: `accelerator.save_state` into a temporary folder, or with
`checkpoint.async_save` a copy of weights and optimizer into memory. On a thread of each process
while training goes on: the rest of the files, then each process syncs and hashes its own; when all
have, the main process writes the manifest, syncs, renames, and only then prunes.
"""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import SAFE_WEIGHTS_NAME
from safetensors.torch import save_file

from accel_gpt.config.experiment import CheckpointConfig, Config
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import CheckpointError, UserError
from accel_gpt.files import fault_point, sha256, sync, write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import host_group
from accel_gpt.training.checkpoint import (
    FORMAT,
    before_skips,
    quarantine,
    states_of,
    verify,
    write_json,
)
from accel_gpt.training.ranks import lost_peer
from accel_gpt.training.run_folder import step_name
from accel_gpt.training.snapshot import Snapshot
from accel_gpt.training.state import TrainState

RETRY_SECONDS = 60.0  # after a save that failed; assumption
LAST_TRIES, LAST_PAUSE_SECONDS = 3, 2.0  # for the last checkpoint of a launch
CLOSING_SECONDS = 60.0
FULL = ("unexpected pos", "file write failed", "No space left")  # torch's words; the system's
Files = dict[str, dict[str, Any]]  # name -> size and sha256


class Writer:
    """The checkpoints of a run. `published` is called on the main process's thread with each new
    one, before old ones are pruned; `before` when its files are written, before it becomes valid.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        tokenizer: Tokenizer,
        say: Callable[[str], None],
        before: Callable[[], None] = lambda: None,
        published: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.accelerator, self.config, self.tokenizer = accelerator, config.checkpoint, tokenizer
        self.out_dir, self.say = Path(config.out_dir), say
        self.before, self.published = before, published
        self.main, self.processes = accelerator.is_main_process, accelerator.num_processes
        self.group = host_group(config, accelerator)
        self.snapshot = Snapshot() if config.checkpoint.async_save else None
        if self.snapshot and accelerator.distributed_type == DistributedType.FSDP:
            raise UserError(
                "checkpoint.async_save is true but the model is sharded by FSDP, whose parts are "
                "gathered while they are saved; set it to false"
            )
        self.thread: threading.Thread | None = None
        self.problem: str | None = None  # of the last save; the same on all processes
        self.failed_at = 0.0
        self.told: str | None = None  # the problem that was last told, until a save succeeds
        self.needed = 0  # bytes
        self.lost: str | None = None  # what torch said of another process that has gone
        self.seconds = 0.0  # that the longest save took, its work beside training included

    def save(self, state: TrainState, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
        """Save the completed `state.step`; a collective. Returns when training may go on.

        A save that fails is told, and leaves those before it untouched.
        """
        self.wait()
        if self.lost:
            raise lost_peer(self.lost)
        began = time.monotonic()
        temporary = self.out_dir / "checkpoints" / f".tmp_{step_name(state.step)}"
        content = {"format": FORMAT, **asdict(state)}
        self.needed = size_of(gpt, optimizer)
        error = attempt(lambda: self.fill(temporary, gpt, optimizer))
        if error and self.accelerator.distributed_type == DistributedType.FSDP:
            raise not_written(state.step, error)  # the others still gather what this one writes

        def finish() -> None:
            self.problem = "its thread ended early"  # should it
            self.problem = named(self.complete(temporary, content, gpt, error))
            self.seconds = max(self.seconds, time.monotonic() - began)
            if self.problem:
                self.failed_at = time.monotonic()
            if self.main:
                self.follow(temporary.with_name(step_name(content["step"])), content, self.problem)

        self.thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self.thread.start()

    def save_last(self, state: TrainState, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
        """Save, wait until the checkpoint is on disk, try again if need be; a collective.

        Raises `CheckpointError` on all processes where it cannot be written, `PeerError` where one
        of them has gone.
        """
        for attempt_number in range(LAST_TRIES):
            self.save(state, gpt, optimizer)
            self.wait()
            if self.problem is None:
                return
            if self.lost:
                raise lost_peer(self.lost)
            if attempt_number + 1 < LAST_TRIES:
                time.sleep(LAST_PAUSE_SECONDS)
        raise not_written(state.step, self.problem)

    def wait(self) -> None:
        """Wait until the save that is under way is on disk, or has failed."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        """The same where the run ends with an error: not for ever, as others may have gone."""
        if self.thread:
            self.thread.join(CLOSING_SECONDS)

    def retry_is_due(self) -> bool:
        """Whether a save failed here some time ago; processes may differ."""
        failed = self.problem is not None and not (self.thread and self.thread.is_alive())
        return failed and time.monotonic() - self.failed_at > RETRY_SECONDS

    def fill(self, folder: Path, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
        """What must happen before training goes on."""
        accelerator = self.accelerator
        folder.mkdir(parents=True, exist_ok=True)
        fault_point("save.begun")
        if self.snapshot:
            if self.main:
                self.snapshot.take(gpt, optimizer)
            scaler = accelerator.scaler if self.main else None
            rank, step = accelerator.process_index, accelerator.step
            save_accelerator_state(str(folder), [], [], [], [], rank, step, scaler)
        else:
            accelerator.save_state(str(folder))
            if accelerator.distributed_type == DistributedType.FSDP:
                save_whole(accelerator, gpt, folder)
        fault_point("save.filled")

    def complete(
        self, folder: Path, content: dict[str, Any], gpt: GPT, error: str | None
    ) -> str | None:
        """The rest, beside training; what went wrong on any process."""
        final = folder.with_name(step_name(content["step"]))
        hashed: Files = {}

        def write() -> None:
            if not self.main:
                return
            if self.snapshot:
                fault_point("save.copied")
                self.snapshot.write(folder)
            write_json(folder / "trainer_state.json", content)
            shape = {"config": asdict(gpt.config), "vocab_size": gpt.vocab_size}
            write_json(folder / "model.json", {"format": FORMAT, **shape})
            self.tokenizer.save(folder)
            self.before()

        def publish_all() -> None:
            if self.main:
                files = {name: entry for part in everyone for name, entry in part.items()}
                check_shared(folder, files, self.processes)
                publish(folder, final, files)

        problem = None
        try:
            problem = self.first_of(error or attempt(write))
            problem = problem or self.first_of(
                attempt(lambda: hashed.update(seal(self.own(folder))))
            )
            everyone = self.gather(hashed)
            problem = problem or self.first_of(attempt(publish_all))
            if problem and self.main:
                shutil.rmtree(folder, ignore_errors=True)
            self.gather(None)  # nobody writes there again before it is gone
        except RuntimeError as lost:  # of the group: another process has gone
            problem = self.lost = str(lost)
        return problem

    def follow(self, final: Path, content: dict[str, Any], problem: str | None) -> None:
        """Tell of a new checkpoint and prune, or tell once why there is none."""
        if problem is None:
            with contextlib.suppress(OSError):  # the next one tries again
                self.published(final)
            prune(self.out_dir, self.config, content["step"], content["best_step"])
        if problem == self.told or self.lost:  # that another one is lost the training thread tells
            return
        self.told = problem
        if problem is None:
            return
        free = shutil.disk_usage(self.out_dir).free
        self.say(
            f"WARNING: the checkpoint of step {content['step']:,} could not be written in "
            f"{final.parent}: {problem} (it needs {self.needed:,} bytes, {free:,} are free); "
            "training goes on and tries again, the checkpoints before it are intact"
        )

    def own(self, folder: Path) -> list[Path]:
        """The files that this process wrote: its random states, the main process all others."""
        random = f"random_states_{self.accelerator.process_index}.pkl"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        others = [path for path in files if not path.name.startswith("random_states_")]
        mine = [path for path in files if path.name == random]
        return others + mine if self.main else mine

    def gather(self, value: Any) -> list[Any]:
        """What every process gives; on the group of these threads alone."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.processes
        dist.all_gather_object(found, value, group=self.group)
        return found

    def first_of(self, problem: str | None) -> str | None:
        """The first problem of any process; every one gets the same."""
        return next((found for found in self.gather(problem) if found), None)


def not_written(step: int, problem: str | None) -> CheckpointError:
    """What ends a launch whose checkpoint must be on disk, and is not."""
    return CheckpointError(
        f"the checkpoint of step {step:,} could not be written: {problem}; those before it are "
        "intact: make room and launch again"
    )


def attempt(phase: Callable[[], object]) -> str | None:
    """Do `phase`; what went wrong: a full disk is an OSError, RuntimeError or SafetensorError."""
    try:
        phase()
    except Exception as caught:
        return str(caught) or type(caught).__name__
    return None


def named(problem: str | None) -> str | None:
    """A full disk by its name: torch says `unexpected pos 64 vs 0` of it."""
    full = problem and any(words in problem for words in FULL)
    return os.strerror(errno.ENOSPC) if full else problem


def size_of(gpt: GPT, optimizer: AcceleratedOptimizer) -> int:
    """Bytes of the tensors of a checkpoint."""
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in [*gpt.parameters(), *states])


def save_whole(accelerator: Accelerator, model: GPT, folder: Path) -> None:
    """The weights as model.safetensors, beside what FSDP wrote; a collective.

    What samples, exports and starts from a checkpoint needs neither FSDP nor its file.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if model.config.tie_embeddings:
            del weights["head.weight"]
        save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def seal(files: list[Path]) -> Files:
    """Force files to disk; their sizes and hashes."""
    sealed = {}
    for path in files:
        fault_point("file.written", path)
        sync(path)
        fault_point("file.synced", path)
        sealed[path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    return sealed


def check_shared(folder: Path, files: Files, processes: int) -> None:
    """Raise `CheckpointError` unless this process sees what each of them wrote."""
    wanted = {f"random_states_{rank}.pkl" for rank in range(processes)}
    for name in sorted(files.keys() | wanted):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if name not in files or size != files[name]["size"]:
            raise CheckpointError(
                f"{name} of another process is not in {folder}: out_dir must be on a disk that all "
                "nodes share"
            )


def publish(temporary: Path, final: Path, files: Files) -> None:
    """Write the manifest and rename: from here on the checkpoint is valid."""
    fault_point("manifest.due")
    manifest = temporary / "manifest.json"
    write_json(manifest, {"format": FORMAT, "files": dict(sorted(files.items()))})
    fault_point("manifest.written", manifest)
    sync(temporary)
    if final.exists():
        if attempt(lambda: verify(final)) is None:  # renamed before, and not known to be on disk
            shutil.rmtree(temporary)
            sync(final.parent)
            return
        quarantine(final)  # damaged: kept aside, never reused
        fault_point("old.aside")
    temporary.rename(final)
    fault_point("renamed")
    sync(final.parent)
    fault_point("published")


def prune(out_dir: Path, config: CheckpointConfig, step: int, best_step: int | None) -> None:
    """Name the best checkpoint in `best`; of those up to the new one, `step`, remove all but the
    newest, the best and the last that no row of skipped updates had reached: see `step_back`.

    One that does not hold the step of its name is neither counted nor removed. A best one whose
    save failed is not there: the one before it is kept on. What the disk refuses is tried again
    after the next save.
    """
    root, best = out_dir / "checkpoints", out_dir / "best"
    states = {known: state for known, state in states_of(root).items() if known <= step}
    keep = {*list(states)[-config.keep_last :], *before_skips(states)[-1:]}
    if config.keep_best:
        with contextlib.suppress(OSError):
            if best_step in states:
                write_file(best, [f"{best_step}\n".encode()])
                fault_point("best.named")
        with contextlib.suppress(OSError, ValueError):
            keep.add(int(best.read_text(encoding="utf-8")))
    for old in states.keys() - keep:
        discard(root, old)


def discard(root: Path, step: int) -> None:
    """Remove a checkpoint; what the disk refuses stays."""
    trash = root / f".trash_{step_name(step)}"
    with contextlib.suppress(OSError):
        shutil.rmtree(trash, ignore_errors=True)
        (root / step_name(step)).rename(trash)
        fault_point("trash.renamed", trash / "optimizer.bin")
        shutil.rmtree(trash, ignore_errors=True)
        fault_point("trash.gone")


def clean(root: Path) -> None:
    """Remove what a killed process of ours left half-written or half-deleted."""
    for pattern in (".tmp_step_*", ".trash_step_*"):
        for debris in root.glob(pattern):
            shutil.rmtree(debris, ignore_errors=True)
