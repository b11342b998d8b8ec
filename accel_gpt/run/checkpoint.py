"""Checkpoints that exist completely or not at all, and the way back into a run.

A checkpoint is a folder `step_00001000`: what `accelerator.save_state` writes, `trainer_state.json`
(all of our own state), `model.json`, `tokenizer.json` and, written last, `manifest.json` with the
size and SHA-256 of every file. Without a valid manifest the folder is not a checkpoint. Nothing in
it is unpickled but what Accelerate loads with `weights_only=True`, and, to resume under FSDP, the
list of parts that torch keeps as a pickle: see `hub/push.py` for those of others.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_file

from accel_gpt.config import CheckpointConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import CheckpointError, NewerFormatError, UserError, require
from accel_gpt.files import sha256, sync, write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.model_config import ModelConfig
from accel_gpt.parse import build

FORMAT = 1
NAME = re.compile(r"step_(\d{8,})")


@dataclass
class TrainState:
    """Everything that a run must remember besides tensors and random states."""

    step: int = 0  # completed optimizer updates
    sequences: int = 0  # windows consumed: the position in the data
    tokens: int = 0
    seconds: float = 0.0  # since the run's first start
    val_loss: float | None = None  # of the last evaluation, nats per token
    best_val_loss: float | None = None
    best_step: int | None = None
    world_size: int = 1
    data_fingerprint: str = ""
    data_origin: int = 0  # sequence at which this mixture of sources began
    data_given: dict[str, int] = field(default_factory=dict)  # windows before it, by fingerprint
    data_sources: list[dict[str, Any]] = field(default_factory=list)  # name, weight, fingerprint
    text_places: list[Any] = field(default_factory=list)  # of each process: see TextCorpus
    tokenizer_fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys

    def note_best(self) -> bool:
        """Keep the lowest val loss and its step; whether it is the one just measured."""
        assert self.val_loss is not None
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        if not self.val_loss < best:  # also when it is not a number
            return False
        self.best_val_loss, self.best_step = self.val_loss, self.step
        return True


# --------------------------------------------------------------------------- save


def is_due(config: CheckpointConfig, state: TrainState, tokens_per_step: int) -> bool:
    """Whether the completed step asks for a checkpoint, by steps or by tokens."""
    every, before = config.every_tokens, state.tokens - tokens_per_step
    return bool(
        (config.every and state.step % config.every == 0)
        or (every and state.tokens // every > before // every)
    )


def save_checkpoint(
    accelerator: Accelerator, out_dir: Path, state: TrainState, model: GPT, tokenizer: Tokenizer
) -> Path:
    """Write the checkpoint of the completed `state.step`; a collective.

    Order: a temporary folder, every file on disk, the manifest, the rename. Raises `UserError` on
    all processes where one of them could not write; what was there before is untouched.
    """
    root = out_dir / "checkpoints"
    final, temporary = root / step_name(state.step), root / f".tmp_{step_name(state.step)}"

    def clear() -> None:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def fill() -> None:
        accelerator.save_state(str(temporary))
        if accelerator.distributed_type == DistributedType.FSDP:
            save_whole(accelerator, model, temporary)
        if accelerator.is_main_process:
            write_json(temporary / "trainer_state.json", {"format": FORMAT, **asdict(state)})
            shape = {"config": asdict(model.config), "vocab_size": model.vocab_size}
            write_json(temporary / "model.json", {"format": FORMAT, **shape})
            tokenizer.save(temporary)

    def finish() -> None:
        if accelerator.is_main_process:
            publish(temporary, final)

    for phase in (clear, fill, finish):
        if error := failed_anywhere(accelerator, phase):
            if accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"the checkpoint {final} could not be written ({error}); those before it are "
                "intact: make room and launch again"
            )
    return final


def save_whole(accelerator: Accelerator, model: GPT, folder: Path) -> None:
    """The weights as one model.safetensors, beside the parts that FSDP wrote; a collective.

    What samples, exports and starts from a checkpoint needs neither FSDP nor the pickle in which
    it keeps the names of its parts.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if model.config.tie_embeddings:
            del weights["head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def failed_anywhere(accelerator: Accelerator, phase: Callable[[], None]) -> str | None:
    """Do one phase on every process; what went wrong on any of them. A collective."""
    error = None
    try:
        phase()
    except Exception as caught:  # a full disk has many: OSError, RuntimeError, SafetensorError
        error = str(caught) or type(caught).__name__
    failed = torch.tensor(int(error is not None), device=accelerator.device)
    if not accelerator.reduce(failed, "sum").item():
        return None
    return error or "on another process"


def publish(temporary: Path, final: Path) -> None:
    """Sync every file, write the manifest and rename."""
    files = {}
    for path in sorted(temporary.rglob("*")):  # FSDP writes folders
        sync(path)
        if path.is_file():
            name = path.relative_to(temporary).as_posix()
            files[name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    write_json(temporary / "manifest.json", {"format": FORMAT, "files": files})
    sync(temporary)
    if final.exists():  # a damaged folder of that name: kept aside, never reused
        quarantine(final)
    temporary.rename(final)
    sync(final.parent)


def prune(out_dir: Path, config: CheckpointConfig, best_step: int | None) -> None:
    """Name the best checkpoint in `best`; remove ours but the newest and the best."""
    root = out_dir / "checkpoints"
    keep = set(checkpoints(root)[-config.keep_last :])
    if config.keep_best and best_step is not None:
        keep.add(best_step)
        write_file(out_dir / "best", [f"{best_step}\n".encode()])
    for step in checkpoints(root):
        if step not in keep:
            trash = root / f".trash_{step_name(step)}"
            (root / step_name(step)).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what a killed process of ours left half-written or half-deleted."""
    for pattern in (".tmp_step_*", ".trash_step_*"):
        for debris in root.glob(pattern):
            shutil.rmtree(debris, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON, on disk when this returns."""
    write_file(path, [json.dumps(value, indent=1).encode()])


def step_name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step_{step:08d}"


def quarantine(path: Path) -> None:
    """Move a damaged checkpoint aside, under a name that is not a checkpoint's."""
    number = 0
    while (aside := path.with_name(f".corrupt_{path.name}_{number}")).exists():
        number += 1
    path.rename(aside)


# --------------------------------------------------------------------------- find and verify


def checkpoints(root: Path) -> list[int]:
    """Steps of the checkpoint folders in `root`, ascending; `verify` tells the intact ones."""
    found = (NAME.fullmatch(path.name) for path in root.glob("step_*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest."""
    return (path / "manifest.json").is_file()


def verify(path: Path, only: Collection[str] | None = None) -> None:
    """Raise `CheckpointError` unless every file, or those named, are as the manifest has them."""
    manifest = read_json(path / "manifest.json")
    check_format(path, manifest)
    try:
        entries = [(str(n), int(e["size"]), str(e["sha256"])) for n, e in manifest["files"].items()]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged") from None
    for name, expected, digest in entries:
        if only is not None and name not in only:
            continue
        file = path / name
        outside = PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
        if outside or not file.is_file():
            raise CheckpointError(f"checkpoint {path} lacks its file {name}")
        size = file.stat().st_size
        if size != expected:
            raise CheckpointError(f"{file} has {size:,} bytes, not {expected:,}: truncated")
        if sha256(file) != digest:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of the manifest")


def check_format(path: Path, content: dict[str, Any]) -> None:
    """Refuse a format that this version does not know."""
    found = content.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormatError(
            f"checkpoint {path} has format {found}, this version reads {FORMAT}; update accel_gpt"
        )
    if found != FORMAT:
        raise CheckpointError(f"checkpoint {path} has no format that is known: {found!r}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or `CheckpointError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no object")
    return value


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """The folder of a checkpoint: `path` itself, or the last, the best or a numbered one of a run.

    Raises `UserError` naming what there is.
    """
    if is_checkpoint(path):
        return path
    root = path / "checkpoints"
    steps = [step for step in checkpoints(root) if is_checkpoint(root / step_name(step))]
    require(path.is_dir(), f"{path} does not exist; give the folder of a run or of a checkpoint")
    require(bool(steps), f"{path} holds no checkpoint; give the folder of a run that saved one")
    if which == "best":
        best = path / "best"
        which = best.read_text(encoding="utf-8").strip() if best.is_file() else "last"
    wanted = steps[-1] if which == "last" else int(which) if which.isdigit() else -1
    require(
        wanted in steps,
        f"{path} has no checkpoint {which!r}; choose last, best or one of "
        + ", ".join(map(str, steps)),
    )
    return root / step_name(wanted)


# --------------------------------------------------------------------------- load


def read_state(path: Path) -> TrainState:
    """The `TrainState` of a checkpoint."""
    content = read_json(path / "trainer_state.json")
    check_format(path, content)
    content.pop("format")
    try:
        return TrainState(**content)
    except TypeError as error:
        raise CheckpointError(f"{path / 'trainer_state.json'} is not ours: {error}") from None


def restore(accelerator: Accelerator, path: Path, now: TrainState) -> TrainState:
    """Weights, optimizer, scaler and random states of a verified checkpoint, on every process.

    Returns its state, carried over to the config and processes of `now`. On another number of
    processes their random states are derived from (seed, step, rank).
    """
    saved = read_state(path)
    same_world = saved.world_size == now.world_size
    own = path / f"random_states_{accelerator.process_index}.pkl"
    if same_world and not own.is_file():  # load_state would only whisper
        raise CheckpointError(f"checkpoint {path} lacks its file {own.name}")
    try:
        accelerator.load_state(str(path))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this model: {error}") from None
    accelerator.step = 0  # a checkpoint is taken between steps: no micro-step is pending
    if not same_world:
        torch.manual_seed(derive_seed(now.config["seed"], saved.step, accelerator.process_index))
    state = replace(saved, config=now.config, world_size=now.world_size)
    if path.parent.parent.resolve() != Path(now.config["out_dir"]).resolve():
        state.best_step = state.best_val_loss = None  # the best so far is not in this folder
    return state


def read_shape(path: Path) -> tuple[ModelConfig, int]:
    """Shape and vocabulary of the model of a checkpoint."""
    content = read_json(path / "model.json")
    check_format(path, content)
    try:
        return build(ModelConfig, content["config"]), int(content["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'model.json'} is damaged: {error!r}") from None


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Model (in evaluation mode) and tokenizer of one checkpoint folder of ours, once verified."""
    verify(path, ("model.json", "model.safetensors", "tokenizer.json", "trainer_state.json"))
    config, vocab_size = read_shape(path)
    model = GPT.unfilled(config, vocab_size)
    try:
        load_weights(model, str(path / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path / 'model.safetensors'} does not fit: {error}") from None
    return model.to(device).eval(), load_tokenizer(path)
