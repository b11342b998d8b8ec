"""Find and verify a checkpoint; read its state and the config of its model.

    step_00001000/
        model.safetensors            the weights
        evaluated.safetensors        the weights that `evaluated()` of --code returned
        optimizer.bin, scaler.pt     as Accelerate saves them
        weights_{rank}.safetensors, evaluated_{rank}.safetensors, optimizer_{rank}.safetensors
                                     the shards of each rank; FSDP runs have these instead
        random_states_{rank}.pkl
        trainer_state.json           `TrainState`
        model.json                   the model's config and vocabulary size
        tokenizer.json
        manifest.json                written last: size and SHA-256 of each file above

A run names its checkpoints `step_N`. A folder is a checkpoint if its files match its manifest. All
pickles are loaded with `weights_only=True`. `saving.py` writes a checkpoint. `tensor_files.py`
reads the weights, and `resume.py` reads everything else. Needs no torch.
"""

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from accel_gpt.config.experiment import EvalConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.values import leaves
from accel_gpt.config.yardstick import parse_yardstick
from accel_gpt.console import write_err
from accel_gpt.damage import Expected, find_damage
from accel_gpt.errors import (
    AccelGPTError,
    CheckpointError,
    NewerFormatError,
    UserError,
    require,
)
from accel_gpt.files import strict_json, write_file
from accel_gpt.json_files import Count, Size, convert_json, read_json_object, unknown_key_message
from accel_gpt.launcher import is_main
from accel_gpt.own_code import OwnCode, Weights
from accel_gpt.runs.folder import CHECKPOINT, RunFolder, number
from accel_gpt.runs.state import FORMAT, TrainState

T = TypeVar("T")
SAFE_WEIGHTS = "model.safetensors"  # as Accelerate names them
EVALUATED = "evaluated.safetensors"
REQUIRED_FILES = ("model.json", "tokenizer.json", "trainer_state.json")
WEIGHTS = MappingProxyType(
    {
        "trained": re.compile(r"model\.safetensors|weights_\d+\.safetensors"),
        "evaluated": re.compile(r"evaluated(_\d+)?\.safetensors"),
    }
)
OPTIMIZER = re.compile(r"optimizer_\d+\.safetensors")
LOADABLE = (".bin", ".pkl", ".pt", ".pth", ".safetensors", ".distcp", ".metadata")  # by torch
SAVED = re.compile(
    r"model\.safetensors|optimizer\.bin|scaler\.pt|random_states_\d+\.pkl"
    r"|(weights|optimizer)_\d+\.safetensors|evaluated(_\d+)?\.safetensors"
)
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # no folder, not hidden


# --------------------------------------------------------------------------- find


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (path / "manifest.json").is_file()


def find_checkpoint(path: Path, which: str | None = None) -> Path:
    """Return the folder of a checkpoint: `path` itself, or a checkpoint of the run at `path`.

    `which`: last, best or a step; None: the best, or the newest if the run names no best one.
    Raises `UserError` if there is no such checkpoint.
    """
    if is_checkpoint(path):
        require_no_choice(path, which)
        return path
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; expected a run or a checkpoint")
    run = RunFolder(path)
    found = {step: folder for step, folder in run.checkpoints.items() if is_checkpoint(folder)}
    if not found:
        raise UserError(f"{path} holds no checkpoint")
    newest = str(max(found))
    if which is None:
        which = run.best or newest
    named = {"last": newest, "best": run.best}.get(which, which)
    for step, folder in found.items():
        if named == str(step):
            return folder
    expected = ", ".join(["last", "best", *map(str, found)])
    raise UserError(f"{path} has no checkpoint {which!r}; expected one of {expected}")


def require_no_choice(path: str | Path, which: str | None) -> None:
    """Raise `UserError` if a checkpoint is chosen in a model that is not a run."""
    single = which in (None, "last")
    require(single, f"--checkpoint is {which}, but {path} is a single model, not a run")


# --------------------------------------------------------------------------- verify


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint, as the manifest lists it."""

    size: Count
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    format: Count
    files: dict[str, SavedFile]


@dataclass(frozen=True)
class SavedModel:
    """The content of model.json."""

    format: Count
    config: dict[str, Any]
    """The fields of `ModelConfig`."""
    vocab_size: Size


def verify_checkpoint(path: Path, model_only: bool = False) -> None:
    """Raise `CheckpointError` unless the files of a checkpoint match its manifest.

    The step in the state must be the step in the folder's name. Raises `NewerFormatError` if
    another version wrote a file of ours with a key that this version does not know, `MachineError`
    if a file cannot be read. `model_only`: check only the files of the model. Follows links, since
    the Hub's cache consists of links. Files that the manifest does not list are not looked at.
    """
    wanted = []
    for name, file in read_manifest(path).items():
        of_model = name in REQUIRED_FILES or any(p.fullmatch(name) for p in WEIGHTS.values())
        if not model_only or of_model:
            wanted.append(Expected(path / name, file.size, file.sha256))
    damage = find_damage(wanted)
    if damage:
        raise CheckpointError(f"checkpoint file {damage}")
    read_model_fields(path)
    named = CHECKPOINT.fullmatch(path.name)
    if named is None:
        return
    step = read_state(path).step
    if step != int(named[1]):
        raise CheckpointError(f"checkpoint {path} holds step {step:,}, not the step in its name")


def read_manifest(path: Path) -> dict[str, SavedFile]:
    """Return the files that the manifest of a checkpoint lists.

    Raises `CheckpointError` if a required file is not listed, if a name is not a plain file name,
    or if torch could load a file of this name, but no checkpoint has it.
    """
    manifest = path / "manifest.json"
    listed = read_saved(Manifest, manifest).files
    for name in REQUIRED_FILES:
        if name not in listed:
            raise CheckpointError(f"{manifest} does not list {name}")
    if not any(WEIGHTS["trained"].fullmatch(name) for name in listed):
        raise CheckpointError(f"{manifest} does not list {SAFE_WEIGHTS}")
    for name in listed:
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{manifest} lists {name[:100]!r} but it is not a file name")
        if name.endswith(LOADABLE) and not SAVED.fullmatch(name):
            raise CheckpointError(f"{manifest} lists {name}, but no checkpoint has such a file")
    return listed


def set_aside(path: Path, why: str = "corrupt") -> Path:
    """Rename a checkpoint to `.WHY_NAME_COUNT`, so that it is kept but never used; return that."""
    count = 0
    while path.with_name(f".{why}_{path.name}_{count}").exists():
        count += 1
    return path.rename(path.with_name(f".{why}_{path.name}_{count}"))


# --------------------------------------------------------------------------- read


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON and sync it to disk."""
    write_file(path, [strict_json(value, indent=1).encode()])


def read_saved(kind: type[T], path: Path) -> T:
    """Read a JSON file of a checkpoint into its dataclass.

    Raises `CheckpointError` if it is damaged, `NewerFormatError` if a later version wrote it.
    """
    content = read_json_object(path, CheckpointError)
    written = content.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise NewerFormatError(f"{path} has format {written}, but this version reads only {FORMAT}")
    if written != FORMAT:
        raise CheckpointError(f"{path} has an unknown format: {written!r}")
    return convert_json(kind, content, path, CheckpointError, newer=NewerFormatError)


def read_state(path: Path) -> TrainState:
    """Read the `TrainState` of a checkpoint."""
    return read_saved(TrainState, path / "trainer_state.json")


def read_evaluated(path: Path) -> TrainState:
    """Read the `TrainState` of a checkpoint; add the evaluation that followed the save.

    Reads the evaluation from the run's metrics.jsonl. If it has no record, the evaluation is due.
    """
    state = read_state(path)
    if state.pending_record is None:
        return state
    yardstick = parse_yardstick("eval.best", str(state.config.get("eval.best", EvalConfig.best)))
    for record in RunFolder(path.parent.parent).records():
        complete = state.pending_record.keys() <= record.keys()
        if record["step"] == state.step and complete and yardstick.metric in record:
            metrics = {key: number(value) for key, value in record.items()}
            state.note_evaluation(metrics, yardstick)
            published = number(record.get("time"))
            if published > state.seconds:  # the evaluation took time after the save
                state.seconds = published
            break
    return state


def check_code(path: Path, own: OwnCode, needed: Collection[str]) -> None:
    """Raise `UserError` if a checkpoint was made with a `needed` function that `own` lacks."""
    used = read_state(path).code
    for name in sorted(needed):
        if used and name in used.functions and getattr(own, name) is None:
            raise UserError(f"{path} was made with {name}() of {used.file}; add --code {used.file}")


def warn_of_other_code(path: Path, own: OwnCode) -> None:
    """Print a line if the file of --code is not the one that made a checkpoint."""
    used = read_state(path).code
    if used is not None and own.file and own.sha256 != used.sha256 and is_main():
        write_err(f"WARNING: {path} was made with {used}, but --code is {own.name} as it is now")


def read_states(out_dir: Path) -> dict[int, TrainState]:
    """Read the states of a run's checkpoints by step, ascending.

    Skips a checkpoint if its state cannot be read or has another step than the folder's name.
    """
    found = {}
    for step, path in RunFolder(out_dir).checkpoints.items():
        with contextlib.suppress(AccelGPTError):
            state = read_state(path)
            if state.step == step:
                found[step] = state
    return found


def read_shape(path: Path) -> tuple[ModelConfig, int]:
    """Read the config of a checkpoint's model, and its vocabulary size; see `read_model_fields`."""
    fields, vocab_size = read_model_fields(path)
    return convert_json(ModelConfig, fields, path / "model.json", CheckpointError), vocab_size


def read_model_fields(path: Path) -> tuple[dict[str, Any], int]:
    """Read the fields of a checkpoint's `ModelConfig`, and its vocabulary size.

    Raises `NewerFormatError` if there is a field that this version does not know, because the model
    would compute something else without it.
    """
    file = path / "model.json"
    saved = read_saved(SavedModel, file)
    unknown = saved.config.keys() - leaves(ModelConfig).keys()
    if unknown:
        raise NewerFormatError(unknown_key_message(file, f"config.{min(unknown)}"))
    return saved.config, saved.vocab_size


def weight_parts(path: Path, weights: Weights) -> list[Path]:
    """Return the files of a checkpoint that hold these weights: one, or one per rank.

    Without a function `evaluated()`, the trained weights are the evaluated ones.
    """
    listed = read_manifest(path)
    parts = sorted(path / name for name in listed if WEIGHTS[weights].fullmatch(name))
    return parts or weight_parts(path, "trained")


def optimizer_parts(path: Path) -> list[Path]:
    """Return the files of a checkpoint with the optimizer of each rank of an FSDP run, else []."""
    return sorted(path / name for name in read_manifest(path) if OPTIMIZER.fullmatch(name))
