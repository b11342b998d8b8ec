"""Read a checkpoint: its files, whether it is intact, its state and the shape of its model.

    step_00001000/
        model.safetensors            the weights
        optimizer.bin, scaler.pt     as Accelerate saves them
        weights_{rank}.safetensors, optimizer_{rank}.safetensors
                                     under FSDP in their place: the shards of each rank
        random_states_{rank}.pkl
        trainer_state.json           `TrainState`
        model.json                   the model's config and vocabulary
        tokenizer.json
        manifest.json                written last: size and SHA-256 of each file above

A folder without a valid manifest is not a checkpoint. Accelerate loads pickles with
`weights_only=True`; nothing else is unpickled. `saving.py` writes it, `tensor_files.py` reads its
weights, `resume.py` the rest. Needs no torch.
"""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_gpt.config.model import ModelConfig
from accel_gpt.config.parse import from_mapping, leaves
from accel_gpt.errors import AccelGPTError, CheckpointError, NewerFormatError, require
from accel_gpt.files import read_json, sha256, strict_json, write_file
from accel_gpt.training.run_folder import (
    CHECKPOINT,
    RunFolder,
    number,
    step_name,
)
from accel_gpt.training.state import TrainState

FORMAT = 1
SAFE_WEIGHTS = "model.safetensors"  # as Accelerate names them
REQUIRED = ("model.json", "tokenizer.json", "trainer_state.json")
WEIGHTS = re.compile(r"model\.safetensors|weights_\d+\.safetensors")
# files that Accelerate or torch might load, and those of them that a checkpoint has
LOADABLE = (".bin", ".pkl", ".pt", ".pth", ".safetensors", ".distcp", ".metadata")
SAVED = re.compile(
    r"model\.safetensors|optimizer\.bin|scaler\.pt|random_states_\d+\.pkl"
    r"|(weights|optimizer)_\d+\.safetensors"
)
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # in the folder itself, not hidden


# --------------------------------------------------------------------------- find


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest."""
    return (path / "manifest.json").is_file()


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """The folder of a checkpoint: `path` itself, or the last, the best or a numbered one of a run.

    Raises `UserError` naming the steps that there are.
    """
    if is_checkpoint(path):
        return path
    found = {s: p for s, p in RunFolder(path).checkpoints.items() if is_checkpoint(p)}
    require(path.is_dir(), f"{path} does not exist; give the folder of a run or of a checkpoint")
    require(bool(found), f"{path} holds no checkpoint; give the folder of a run that saved one")
    wanted = RunFolder(path).best if which == "best" else which
    step = int(wanted) if re.fullmatch("[0-9]{1,18}", wanted) else -1
    if which == "last":
        step = max(found)
    steps = ", ".join(map(str, found))
    require(step in found, f"{path} has no checkpoint {which!r}; choose last or one of {steps}")
    return found[step]


# --------------------------------------------------------------------------- verify


def verify(path: Path, model_only: bool = False) -> None:
    """Raise `CheckpointError` unless all files, or those of the model alone, are as the manifest
    lists them, and the step is that in the folder's name.

    A file that Accelerate or torch might load but no checkpoint has, or that the manifest does not
    list, is refused too. Links are followed, as the Hub's cache consists of them: the file that is
    hashed is the one that is read.
    """
    manifest = path / "manifest.json"
    content = read_checkpoint_json(manifest)
    check_format(path, content)
    try:
        listed = {str(n): (int(e["size"]), str(e["sha256"])) for n, e in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{manifest} is damaged") from None
    weights = [name for name in listed if WEIGHTS.fullmatch(name)]
    if missing := [name for name in REQUIRED if name not in listed]:
        raise CheckpointError(f"{manifest} does not list {missing[0]}")
    if not weights:
        raise CheckpointError(f"{manifest} does not list {SAFE_WEIGHTS}")
    wanted = {n: listed[n] for n in (*REQUIRED, *weights)} if model_only else listed
    for name, (size, _) in wanted.items():
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{manifest} lists {name[:100]!r}, which is not a file name")
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path} lacks its file {name}")
        if (found := (path / name).stat().st_size) != size:
            raise CheckpointError(f"{path / name} has {found:,} bytes, not {size:,}: truncated")
    with ThreadPoolExecutor() as pool:  # one core a file
        digests = pool.map(sha256, [path / name for name in wanted])
        for (name, (_, expected)), digest in zip(wanted.items(), digests, strict=True):
            if digest != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: its SHA-256 is not that in the manifest"
                )
    for file in () if model_only else path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if name.endswith(LOADABLE) and not (name in listed and SAVED.fullmatch(name)):
            raise CheckpointError(f"{file} is not a file of a checkpoint: it is not loaded")
    named = CHECKPOINT.fullmatch(path.name)
    if named and (step := read_state(path).step) != int(named[1]):
        raise CheckpointError(
            f"checkpoint {path} holds step {step:,}, not the step in its name: rename it to "
            f"{step_name(step)} if it belongs to this run"
        )


def intact_hint(path: Path) -> str:
    """What to say of the newest intact checkpoint before `path` in its run; "" without one."""
    named = CHECKPOINT.fullmatch(path.name)
    others = RunFolder(path.parent.parent).checkpoints
    if not named or path.parent.name != "checkpoints":
        return ""
    for step in reversed([step for step in others if step < int(named[1])]):
        with contextlib.suppress(AccelGPTError):
            verify(others[step], model_only=True)
            return f"; step {step:,} of the run is intact; take it with --checkpoint {step}"
    return ""


def check_format(path: Path, content: dict[str, Any]) -> None:
    """Raise unless this version reads the format that a JSON file of a checkpoint names."""
    found = content.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormatError(
            f"checkpoint {path} has format {found}, this version reads {FORMAT}; update accel_gpt"
        )
    if found != FORMAT:
        raise CheckpointError(f"checkpoint {path} has an unknown format: {found!r}")


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither used nor lost."""
    count = 0
    while (aside := path.with_name(f".corrupt_{path.name}_{count}")).exists():
        count += 1
    path.rename(aside)


# --------------------------------------------------------------------------- read


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON; on disk when this returns."""
    write_file(path, [strict_json(value, indent=1).encode()])


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """A JSON object; `CheckpointError` for anything else."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def read_state(path: Path) -> TrainState:
    """The `TrainState` of a checkpoint."""
    content = read_checkpoint_json(path / "trainer_state.json")
    check_format(path, content)
    content.pop("format")
    content.pop("text_places", None)  # of an earlier version, which could train on streamed text
    state = TrainState()
    try:
        state.load_state_dict(content)
    except ValueError as error:
        raise CheckpointError(f"{path / 'trainer_state.json'} is damaged: {error}") from None
    return state


def read_evaluated(path: Path) -> TrainState:
    """The `TrainState` of a checkpoint, with the evaluation that followed the save.

    The run's metrics.jsonl holds that evaluation; without its record the evaluation is still due.
    """
    state = read_state(path)
    if state.awaits_evaluation is None:
        return state
    for record in RunFolder(path.parent.parent).records():
        complete = state.awaits_evaluation.keys() <= record.keys()
        if record["step"] == state.step and complete and "eval/val_loss" in record:
            state.note_evaluation(number(record["eval/val_loss"]))
            published = number(record.get("time"))
            if published > state.seconds:  # the evaluation took time after the save
                state.seconds = published
            break
    return state


def read_states(out_dir: Path) -> dict[int, TrainState]:
    """The states of a run's checkpoints by step, ascending; without a checkpoint whose state cannot
    be read or is of another step than its name.
    """
    found = {}
    for step, path in RunFolder(out_dir).checkpoints.items():
        with contextlib.suppress(AccelGPTError):
            state = read_state(path)
            if state.step == step:
                found[step] = state
    return found


def read_shape(path: Path) -> tuple[ModelConfig, int]:
    """The config of a checkpoint's model, and its vocabulary."""
    content = read_checkpoint_json(path / "model.json")
    check_format(path, content)
    try:
        known = {key: v for key, v in content["config"].items() if key in leaves(ModelConfig)}
        config = from_mapping(ModelConfig, known, "in it")
        return config, int(content["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path / 'model.json'} is damaged: {error!r}") from None


def weight_parts(path: Path) -> list[Path]:
    """The files of a checkpoint that hold the weights: one, or one of each rank."""
    return sorted(file for file in path.iterdir() if WEIGHTS.fullmatch(file.name))
