"""Checkpoints on disk: what is in one, whether it is intact, what it says; `saving.py` writes them.

A checkpoint is a folder `step_00001000`: what `accelerator.save_state` writes, `trainer_state.json`
(all of our own state), `model.json`, `tokenizer.json` and, written last, `manifest.json` with the
size and SHA-256 of every file. Without a valid manifest the folder is not a checkpoint. Nothing in
it is unpickled but what Accelerate loads with `weights_only=True`.
"""

import contextlib
import json
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights

from accel_gpt.config.model import ModelConfig
from accel_gpt.config.parse import build, flatten, leaves
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import CheckpointError, NewerFormatError, UserError, require
from accel_gpt.files import load_json, read_text, sha256, write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.training.run_folder import CHECKPOINT, checkpoint_steps, step_name
from accel_gpt.training.state import TrainState

FORMAT = 1
LARGEST_JSON = 16 << 20  # bytes; ours have some thousand
NEEDED = ("model.json", "model.safetensors", "tokenizer.json", "trainer_state.json")
READABLE = (".bin", ".pkl", ".pt", ".pth", ".safetensors", ".distcp", ".metadata")
# of these, what we write; Accelerate and torch run what some others hold
TENSORS = re.compile(
    r"model\.safetensors|optimizer\.bin|pytorch_model_fsdp\.bin|scaler\.pt|random_states_\d+\.pkl"
)
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names: in the folder itself, seen by `ls`


# --------------------------------------------------------------------------- names


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON, on disk when this returns."""
    write_file(path, [json.dumps(value, indent=1).encode()])


def quarantine(path: Path) -> None:
    """Move a damaged checkpoint aside, under a name that is not a checkpoint's."""
    number = 0
    while (aside := path.with_name(f".corrupt_{path.name}_{number}")).exists():
        number += 1
    path.rename(aside)


# --------------------------------------------------------------------------- find and verify


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest."""
    return (path / "manifest.json").is_file()


def verify(path: Path, only: Collection[str] | None = None) -> None:
    """Raise `CheckpointError` unless every file, or those named, are as the manifest has them, and
    the step is that of the folder's name.

    A file that Accelerate or torch might read but no manifest names, or that we never write, is
    not ours, either. Links are followed, as the cache of the Hub consists of them: what is read
    is what was hashed.
    """
    manifest = read_json(path / "manifest.json")
    check_format(path, manifest)
    try:
        entries = {str(n): (int(e["size"]), str(e["sha256"])) for n, e in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged") from None
    if missing := [name for name in only or NEEDED if name not in entries]:
        raise CheckpointError(f"{path / 'manifest.json'} does not name {missing[0]}")
    wanted = {n: e for n, e in entries.items() if only is None or n in only}
    for name, (expected, _) in wanted.items():
        if not PLAIN.fullmatch(name):
            raise CheckpointError(
                f"{path / 'manifest.json'} names {name[:100]!r}, which is no plain file name"
            )
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} lacks its file {name}")
        size = file.stat().st_size
        if size != expected:
            raise CheckpointError(f"{file} has {size:,} bytes, not {expected:,}: truncated")
    with ThreadPoolExecutor() as pool:  # a core for each file
        found = pool.map(sha256, [path / name for name in wanted])
        for (name, (_, digest)), hashed in zip(wanted.items(), found, strict=True):
            if hashed != digest:
                raise CheckpointError(
                    f"{path / name} is damaged: its SHA-256 is not that of the manifest"
                )
    for file in () if only is not None else path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if name.endswith(READABLE) and not (name in entries and TENSORS.fullmatch(name)):
            raise CheckpointError(f"{file} is none of the files that we write: it is not read")
    named = CHECKPOINT.fullmatch(path.name)
    if named and (step := read_state(path).step) != int(named[1]):
        raise CheckpointError(
            f"checkpoint {path} holds step {step:,}, which its name denies: rename it to "
            f"{step_name(step)} if it belongs to this run"
        )


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
        value = load_json(read_text(path, LARGEST_JSON))
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
    steps = [step for step in checkpoint_steps(root) if is_checkpoint(root / step_name(step))]
    require(path.is_dir(), f"{path} does not exist; give the folder of a run or of a checkpoint")
    require(bool(steps), f"{path} holds no checkpoint; give the folder of a run that saved one")
    if which == "best":
        best = path / "best"
        text = best.read_text(encoding="utf-8", errors="replace") if best.is_file() else "last"
        which = text.strip()[:100]
    number = int(which) if re.fullmatch("[0-9]{1,18}", which) else -1
    wanted = steps[-1] if which == "last" else number
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
    state = TrainState()
    try:
        state.load_state_dict(content)
    except ValueError as error:
        raise CheckpointError(f"{path / 'trainer_state.json'} is not ours: {error}") from None
    return state


def states_of(root: Path) -> dict[int, TrainState]:
    """The state of each checkpoint folder in `root` by its step, ascending; without those that
    cannot be read, or hold another step than that of their name.
    """
    found = {}
    for step in checkpoint_steps(root):
        with contextlib.suppress(UserError):
            state = read_state(root / step_name(step))
            if state.step == step:
                found[step] = state
    return found


def before_skips(states: dict[int, TrainState]) -> list[int]:
    """Steps of those that lie in no row of skipped updates, in the order of `states`."""
    return [step for step, state in states.items() if not state.skipped_in_row]


def read_shape(path: Path) -> tuple[ModelConfig, int]:
    """Shape and vocabulary of the model of a checkpoint."""
    content = read_json(path / "model.json")
    check_format(path, content)
    try:
        known = {key: v for key, v in content["config"].items() if key in leaves(ModelConfig)}
        config = build(ModelConfig, dict(flatten(ModelConfig, known, "it")))
        return config, int(content["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path / 'model.json'} is damaged: {error!r}") from None


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Model (in evaluation mode) and tokenizer of one checkpoint folder of ours, once verified."""
    verify(path, NEEDED)
    config, vocab_size = read_shape(path)
    least = parameter_counts(replace(config, block_size=1), vocab_size)["total_unpadded"]
    if least > (path / "model.safetensors").stat().st_size:  # asked before memory is
        raise CheckpointError(
            f"{path / 'model.json'} asks for {least:,} parameters, more than "
            "model.safetensors holds"
        )
    model = GPT.unfilled(config, vocab_size)
    try:
        load_weights(model, str(path / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path / 'model.safetensors'} does not fit: {error}") from None
    return model.to(device).eval(), load_tokenizer(path)
