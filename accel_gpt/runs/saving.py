"""Save checkpoints. After a kill at any moment, the previous or the new checkpoint is intact.

The training thread calls `accelerator.save_state` with a temporary folder. Under FSDP, each rank
writes its shards there instead. With `checkpoint.async_save`, the training thread copies weights
and optimizer to host memory, and writes only the random states and the scaler of fp16.

A thread on each rank does the rest while training continues. It writes the copies, and on rank 0
also the files that belong to no rank. Each rank syncs and hashes its own files. When all ranks are
done, rank 0 writes the manifest, syncs and renames the folder, and then prunes older checkpoints.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_gpt.config.experiment import CheckpointConfig
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, BusyError, CheckpointError
from accel_gpt.files import fault_point, sha256, sync, write_file
from accel_gpt.launch.ranks import all_gather, all_ranks, lost_rank_error
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.optim.own import OwnOptimizer
from accel_gpt.runs.checkpoint import (
    EVALUATED,
    read_states,
    set_aside,
    verify_checkpoint,
    write_json,
)
from accel_gpt.runs.folder import RunFolder, step_name
from accel_gpt.runs.state import FORMAT, TrainState
from accel_gpt.runs.tensor_files import (
    GROUPS,
    moments_of,
    rank_content,
    weights_of,
    whole_content,
)

RETRY_SECONDS = 60.0  # pause after a failed save; assumption
FIRST_PAUSE_SECONDS = 2.0  # after the first failed save of a launch's last step; then doubled
LAST_RETRY_SECONDS = 600.0  # in which a launch's last save is tried again; assumption
LOOK_SECONDS = 1.0  # between looks at signals in this pause
CLOSING_SECONDS = 60.0  # for the save in progress when a run ends with an error
NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "metrics wait for room")
NO_REASON = ("unexpected pos", "file write failed")  # in torch's errors of a failed write
OF_RANK = re.compile(r"_(\d+)\.(?:pkl|safetensors)$")  # end of the name of a rank's file
Files = dict[str, dict[str, Any]]  # name -> size and sha256


class CheckpointWriter:
    """Saves the checkpoints of a run, one at a time.

    `before_publish` is called on rank 0 before a checkpoint becomes valid, and before a checkpoint
    is named the best. `on_checkpoint` gets each new checkpoint there before older ones are pruned.

    `check_folder` raises `BusyError` on rank 0 if the run has lost its folder, or goes on
    elsewhere. Then nothing is written or removed there.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: CheckpointConfig,
        out_dir: Path,
        group: dist.ProcessGroup | None,
        tokenizer: Tokenizer,
        log: Callable[[str], None],
        before_publish: Callable[[], None] = lambda: None,
        on_checkpoint: Callable[[Path], None] | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.accelerator = accelerator
        self.config = config
        self.out_dir = out_dir
        self.tokenizer = tokenizer
        self.log = log
        self.before_publish = before_publish
        self.on_checkpoint = on_checkpoint
        self.check_folder = check_folder
        self.is_stopping: Callable[[], bool] = lambda: False  # called again and again in a wait
        self.main = accelerator.is_main_process
        self.group = group
        self.fsdp = accelerator.distributed_type == DistributedType.FSDP
        self.snapshot = Snapshot() if config.async_save else None
        self.copies: dict[str, Any] = {}  # file name -> tensors in the snapshot
        self.thread: threading.Thread | None = None
        self.problem: str | None = None  # why the last save failed on any rank
        self.failed_at = 0.0
        self.warned: int | None = None  # the step of the last warning
        self.lost: str | None = None  # torch's error about a lost rank
        self.needed = 0  # bytes of the tensors of a checkpoint

    def save(
        self,
        state: TrainState,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        evaluated: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the completed `state.step`; a collective. Returns when training may continue.

        `evaluated`: what `EvaluatedWeights.tensors` returns.
        A failed save is logged and damages no checkpoint. If the disk is full, old checkpoints are
        removed. Raises `BusyError` if the run has lost its folder, `PeerError` if a rank is lost.
        """
        self.wait()
        if self.lost:
            raise lost_rank_error(self.lost)
        with all_ranks(self.group):
            self.check_folder()
        temporary = self.out_dir / "checkpoints" / f".tmp_{step_name(state.step)}"
        fields = asdict(state)
        saved = tree_leaves([*gpt.parameters(), *optimizer.state.values(), evaluated])
        self.needed = sum(leaf.nbytes for leaf in saved if isinstance(leaf, Tensor))
        failed: Exception | None = None
        try:
            self.save_tensors(temporary, gpt, optimizer, evaluated)
        except Exception as error:  # torch, safetensors and Accelerate raise no common class
            failed = error

        def finish() -> None:
            self.problem = "its thread ended early"  # replaced unless the thread raises an error
            self.problem = self.write_and_publish(temporary, fields, gpt, failed)
            if self.problem:
                self.failed_at = time.monotonic()
            if self.main:
                self.follow_up(fields)

        self.thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self.thread.start()

    def save_last(
        self,
        state: TrainState,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        evaluated: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save, wait until the checkpoint is on disk, retry if the save fails; a collective.

        Retries for `LAST_RETRY_SECONDS`, unless the run is stopped meanwhile. Raises
        `CheckpointError` on all ranks if the checkpoint cannot be written, `PeerError` if a rank is
        lost.
        """
        deadline = time.monotonic() + LAST_RETRY_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            self.save(state, gpt, optimizer, evaluated)
            self.wait()
            if self.problem is None:
                return
            if self.lost:
                raise lost_rank_error(self.lost)
            if self.must_give_up(deadline, time.monotonic() + pause):
                break
            pause = min(2 * pause, RETRY_SECONDS)
        raise CheckpointError(
            f"the checkpoint of step {state.step:,} could not be written: {self.problem} (it needs "
            f"{self.needed:,} bytes); {describe_newest(self.out_dir)} before it"
        )

    def must_give_up(self, deadline: float, next_try: float) -> bool:
        """Wait until the next try; return whether there is none on any rank; a collective."""
        while True:
            made_room = self.failed_at < 0
            over = self.main and next_try >= deadline and not made_room
            ends = over or self.is_stopping()
            due = made_room or time.monotonic() >= next_try
            answers = all_gather((ends, due), self.group)
            if any(ends for ends, _ in answers):
                return True
            if any(due for _, due in answers):
                return False
            time.sleep(LOOK_SECONDS)

    def wait(self) -> None:
        """Wait until the save in progress has succeeded or failed, and the best is named."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def name_best(self, state: TrainState) -> None:
        """Name the checkpoint of `state.step` the best, and prune. Called after its evaluation.

        Waits in a thread for the save in progress. Does nothing if the metrics cannot be written;
        if this save failed, the previous best remains.
        """
        saving = self.thread
        step = state.step
        best_step = state.best_step

        def name() -> None:
            if saving:
                saving.join()
            with contextlib.suppress(OSError):
                if not self.has_lost_folder():  # the training thread ends the run
                    self.before_publish()
                    name_best_and_prune(self.out_dir, self.config, step, best_step)

        if self.main:
            self.thread = threading.Thread(target=name, name="best checkpoint", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Wait for the save in progress, at most `CLOSING_SECONDS`: other ranks may be lost."""
        if self.thread:
            self.thread.join(CLOSING_SECONDS)

    def retry_is_due(self) -> bool:
        """Return whether `RETRY_SECONDS` have passed since a save failed; ranks may differ."""
        failed = self.problem is not None and not (self.thread and self.thread.is_alive())
        return failed and time.monotonic() - self.failed_at > RETRY_SECONDS

    def save_tensors(
        self,
        folder: Path,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        evaluated: Mapping[str, Tensor] | None,
    ) -> None:
        """Save or copy the tensors and random states before the next step changes them."""
        folder.parent.mkdir(exist_ok=True)  # no parents: do not recreate a run's removed folder
        folder.mkdir(exist_ok=True)
        fault_point("save.begun")
        scaler = self.accelerator.scaler
        if not self.main:  # only rank 0 writes the scaler
            self.accelerator.scaler = None
        try:
            if self.snapshot or self.fsdp:
                self.save_own_tensors(folder, gpt, optimizer, evaluated)
            else:
                self.accelerator.save_state(str(folder))
                if self.main and evaluated is not None:
                    write_tensors({EVALUATED: whole_content(evaluated)}, folder)
        finally:
            self.accelerator.scaler = scaler
        fault_point("save.filled")

    def save_own_tensors(
        self,
        folder: Path,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        evaluated: Mapping[str, Tensor] | None,
    ) -> None:
        """Copy or write the tensors of this rank; write its random states and the scaler."""
        tensors = self.tensors_by_file(gpt, optimizer, evaluated)
        if self.snapshot:
            self.copies = {}  # frees the buffer if it must grow
            self.copies = self.snapshot.copy(tensors)
        else:
            write_tensors(tensors, folder)
        save_accelerator_state(
            output_dir=str(folder),
            model_states=[],
            optimizers=[],
            schedulers=[],
            dataloaders=[],
            process_index=self.accelerator.process_index,
            step=self.accelerator.step,
            scaler=self.accelerator.scaler,
        )

    def tensors_by_file(
        self,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        evaluated: Mapping[str, Tensor] | None,
    ) -> dict[str, Any]:
        """Return the weights and optimizer state that this rank writes: file name -> content."""
        weights = weights_of(gpt)
        files: dict[str, Any] = {}
        if self.fsdp:
            rank = self.accelerator.process_index
            moments = moments_of(gpt, optimizer)
            header = {}
            if isinstance(optimizer.optimizer, OwnOptimizer):
                header[GROUPS] = json.dumps(optimizer.optimizer.group_values())
            files[f"weights_{rank}.safetensors"] = rank_content(weights, self.main)
            files[f"optimizer_{rank}.safetensors"] = rank_content(moments, self.main, header)
            if evaluated is not None:
                files[f"evaluated_{rank}.safetensors"] = rank_content(evaluated, self.main)
        elif self.main:
            files[SAFE_WEIGHTS_NAME] = whole_content(weights)
            files[f"{OPTIMIZER_NAME}.bin"] = optimizer.state_dict()
            if evaluated is not None:
                files[EVALUATED] = whole_content(evaluated)
        return files

    def write_and_publish(
        self, folder: Path, fields: dict[str, Any], gpt: LanguageModel, failed: Exception | None
    ) -> str | None:
        """Write the remaining files of a checkpoint and publish it; a collective.

        `fields`: the fields of the `TrainState`. `failed`: the error of `save_tensors`, if any.
        Returns the error message if any rank failed, else None.
        """
        own: Files = {}
        rank = self.accelerator.process_index
        try:
            with self.phase(folder):
                if failed:
                    raise failed
                if self.snapshot:
                    fault_point("save.copied")
                    write_tensors(self.copies, folder)
                if self.main:
                    self.write_common_files(folder, fields, gpt)
                for path in sorted(folder.iterdir()):
                    of_rank = OF_RANK.search(path.name)
                    being_written = path.name.startswith(".")  # a temporary file of another rank
                    if int(of_rank[1] if of_rank else 0) == rank and not being_written:
                        fault_point("file.written", path)
                        sync(path)
                        fault_point("file.synced", path)
                        own[path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}
            files: Files = {}
            for sealed in all_gather(own, self.group):
                files |= sealed
            with self.phase(folder):
                if self.main:
                    publish_checkpoint(
                        temporary=folder,
                        final=folder.with_name(step_name(fields["step"])),
                        files=files,
                        check_folder=self.check_folder,
                    )
        except AccelGPTError as error:
            return str(error)
        except RuntimeError as error:  # of the process group: another rank is lost
            self.lost = str(error)
        return self.lost

    def write_common_files(self, folder: Path, fields: dict[str, Any], gpt: LanguageModel) -> None:
        """Write the files that belong to no rank; on rank 0."""
        write_json(folder / "trainer_state.json", fields)
        shape = asdict(gpt.given or gpt.config)
        model = {"format": FORMAT, "config": shape, "vocab_size": gpt.vocab_size}
        write_json(folder / "model.json", model)
        self.tokenizer.save(folder)
        self.before_publish()

    @contextlib.contextmanager
    def phase(self, folder: Path) -> Iterator[None]:
        """If any rank raises an error, remove `folder` and raise an `AccelGPTError` on all ranks.

        A collective. Removes nothing if the run has lost its folder. Turns every error of a save
        into a `CheckpointError`, so that a `RuntimeError` always means a lost rank.
        """
        try:
            with all_ranks(self.group):
                try:
                    yield
                except Exception as error:
                    raise CheckpointError(
                        describe_save_error(error, folder, self.needed)
                    ) from error
        except AccelGPTError:
            if self.main and not self.has_lost_folder():
                shutil.rmtree(folder, ignore_errors=True)
            all_gather(None, self.group)  # before a rank saves again, the folder must be removed
            raise

    def has_lost_folder(self) -> bool:
        """Return whether the run has lost its locked folder; on rank 0."""
        try:
            self.check_folder()
        except BusyError:
            return True
        return False

    def follow_up(self, fields: dict[str, Any]) -> None:
        """Report the new checkpoint and prune, or warn that the save failed; on rank 0.

        If the disk is full, removes an old checkpoint so that the next step can be saved.
        """
        root = self.out_dir / "checkpoints"
        problem = self.problem
        if self.has_lost_folder():  # the training thread ends the run
            return
        if problem is None:
            if self.on_checkpoint:
                self.on_checkpoint(root / step_name(fields["step"]))
            name_best_and_prune(
                out_dir=self.out_dir,
                config=self.config,
                step=fields["step"],
                best_step=fields["best_step"],
            )
        if problem is None or self.lost:  # the training thread reports a lost rank
            return
        removed = None
        if any(text in problem for text in NO_ROOM):
            removed = make_room(self.out_dir, fields["best_step"])
        if removed is not None:
            outcome = f"removed step {removed:,} to make room"
            self.failed_at = -math.inf  # a retry is due at once
        elif self.warned == fields["step"]:  # a retry of the same step
            return
        else:
            outcome = f"{describe_newest(self.out_dir)} so far"
        self.warned = fields["step"]
        self.log(
            f"WARNING: the checkpoint of step {fields['step']:,} could not be written in {root}: "
            f"{problem} (it needs {self.needed:,} bytes); {outcome}; the save will be retried"
        )


class Snapshot:
    """Copies of tensors in host memory, to write to disk while training continues.

    All copies lie in one buffer, which is allocated once, and pinned if the device is a GPU. With a
    pinned buffer for each tensor, GPT-2 124M would need 444 system calls instead of one. PyTorch
    also rounds each up to a power of two (ATen/core/CachingHostAllocator.h): 2.48 GB, not 1.49.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.used = 0  # bytes of the buffer

    def copy(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested dictionaries and lists, with all tensors copied to the buffer.

        Overwrites the previous copy. Waits until the new one is complete.
        """
        originals = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        cuda = any(original.is_cuda for original in originals)
        needed = sum(aligned(original.nbytes) for original in originals)
        if needed > len(self.buffer):
            self.buffer = torch.empty(0, dtype=torch.uint8)  # frees the smaller buffer first
            larger = torch.empty(needed, dtype=torch.uint8)
            if cuda:
                pin(larger)
            self.buffer = larger
        self.used = 0
        copies: dict[str, Any] = tree_map_only(Tensor, self.copy_tensor, tensors)
        if cuda:
            torch.cuda.synchronize()
        return copies

    def copy_tensor(self, original: Tensor) -> Tensor:
        """Copy a tensor behind the previous one, without waiting for a GPU.

        The copy has a storage of its own size. For a view, `torch.save` would write the whole
        buffer.
        """
        if not original.numel():  # `torch.frombuffer` refuses an empty tensor
            return torch.empty(original.shape, dtype=original.dtype)
        copy = torch.frombuffer(
            self.buffer.numpy(),
            dtype=original.dtype,
            count=original.numel(),
            offset=self.used,
        )
        self.used += aligned(original.nbytes)
        return copy.view(original.shape).copy_(original.detach(), non_blocking=original.is_cuda)


def aligned(size: int) -> int:
    """Round up a number of bytes to whole cache lines of 64 bytes."""
    return -(-size // 64) * 64


def pin(buffer: Tensor) -> None:
    """Pin the memory of a buffer at its exact size, for as long as the tensor exists."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    portable = 1  # cudaHostRegisterPortable, driver_types.h
    try:
        cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable))
    except RuntimeError:
        # CUDA keeps the error and would raise it again in the training step; a kernel takes it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())


def write_tensors(files: dict[str, Any], folder: Path) -> None:
    """Write the files that `CheckpointWriter.tensors_by_file` returns."""
    for name, content in files.items():
        if name.endswith(".safetensors"):
            save_file(filename=folder / name, **content)
        else:
            torch.save(content, folder / name)


def describe_save_error(error: Exception, folder: Path, needed: int) -> str:
    """Return why a save failed.

    torch reports a failed write only as `unexpected pos 64 vs 0`. Then the operating system is
    asked why it does not write the `needed` bytes.
    """
    text = str(error) or type(error).__name__
    if not any(part in text for part in NO_REASON):
        return text
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(needed, 1))
    except OSError as reason:
        return reason.strerror or str(reason)
    return text


# --------------------------------------------------------------------------- files


def publish_checkpoint(
    temporary: Path, final: Path, files: Files, check_folder: Callable[[], None]
) -> None:
    """Write the manifest and rename the folder. The rename makes the checkpoint valid.

    `check_folder` raises `BusyError` if the run has lost its folder.
    """
    fault_point("manifest.due")
    manifest = temporary / "manifest.json"
    write_json(manifest, {"format": FORMAT, "files": dict(sorted(files.items()))})
    fault_point("manifest.written", manifest)
    sync(temporary)
    check_folder()
    if final.exists():
        try:
            verify_checkpoint(final)
            # an earlier save of the step is intact, but its rename may not be on disk yet
            shutil.rmtree(temporary)
            sync(final.parent)
            return
        except CheckpointError:
            set_aside(final)
            fault_point("old.aside")
    temporary.rename(final)
    fault_point("renamed")
    sync(final.parent)
    fault_point("published")


def name_best_and_prune(
    out_dir: Path, config: CheckpointConfig, step: int, best_step: int | None
) -> None:
    """Write the best step to the file `best`, and remove old checkpoints up to `step`.

    Keeps the `keep_last` newest checkpoints, and with `keep_best` the best. If the save of the best
    step failed, keeps the previous best. Ignores checkpoints that `read_states` skips. If a file
    cannot be written or removed, the next save retries.
    """
    states = {saved: state for saved, state in read_states(out_dir).items() if saved <= step}
    keep = set(list(states)[-config.keep_last :])
    if config.keep_best:
        if best_step in states:
            with contextlib.suppress(OSError):
                write_file(out_dir / "best", [f"{best_step}\n".encode()])
                fault_point("best.named")
        with contextlib.suppress(ValueError):
            keep.add(int(RunFolder(out_dir).best))
    for old in states.keys() - keep:
        remove_checkpoint(out_dir / "checkpoints", old)


def make_room(out_dir: Path, best_step: int | None) -> int | None:
    """Remove the oldest checkpoint but the newest intact one and the best; return its step.

    Returns None if there is no other.
    """
    paths = RunFolder(out_dir).checkpoints
    kept = {str(best_step), RunFolder(out_dir).best}
    older = list(read_states(out_dir))
    while older:
        newest = older.pop()
        try:
            verify_checkpoint(paths[newest])
        except (AccelGPTError, OSError):
            continue
        for step in older:
            if str(step) not in kept:
                remove_checkpoint(out_dir / "checkpoints", step)
                return step
        break
    return None


def describe_newest(out_dir: Path) -> str:
    """Return a clause such as `step 8 is the newest checkpoint`."""
    steps = list(RunFolder(out_dir).checkpoints)
    if not steps:
        return "the run has no checkpoint"
    return f"step {steps[-1]:,} is the newest checkpoint"


def remove_checkpoint(root: Path, step: int) -> None:
    """Remove a checkpoint; ignore files that cannot be deleted."""
    trash = root / f".trash_{step_name(step)}"
    with contextlib.suppress(OSError):
        shutil.rmtree(trash, ignore_errors=True)
        (root / step_name(step)).rename(trash)
        fault_point("trash.renamed", trash / "optimizer.bin")
        shutil.rmtree(trash, ignore_errors=True)
        fault_point("trash.gone")
