"""A model as a folder that `AutoModelForCausalLM.from_pretrained` opens, proven equal to ours.

    accel-gpt export RUN --to DIR

Writes config.json, generation_config.json, model.safetensors (in shards above 5 GB) and the
tokenizer's files; then a fresh process opens the folder with transformers and compares.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_gpt.config.data import DataConfig
from accel_gpt.data.sources import open_data
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.evals.validation import batches, windows
from accel_gpt.files import write_file
from accel_gpt.hub.hf_config import CLASSES, matching_preset, write_shape
from accel_gpt.hub.hf_weights import export_tensors
from accel_gpt.hub.load import load_pretrained
from accel_gpt.hub.pretrained import Pretrained, find_pretrained
from accel_gpt.hub.tokenizer_files import save_for_transformers
from accel_gpt.hub.verify import PARTED
from accel_gpt.model.gpt import GPT
from accel_gpt.redact import redact
from accel_gpt.training.checkpoint import read_state

WRITTEN = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    "chat_template.jinja",
)
TEMPORARY = ".tmp_export"
SHARD_SIZE = "5GB"  # of model.safetensors, as transformers had it for long
COMPARED_WINDOWS, COMPARED_TOKENS = 2, 1024
COMPARED_LOGITS = 128  # of the last tokens: of all of them they could take gigabytes
DTYPES = MappingProxyType(
    {
        "fp32": ("float32", torch.float32),
        "bf16": ("bfloat16", torch.bfloat16),
        "fp16": ("float16", torch.float16),
    }
)


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compared."""

    model_class: str
    parameters: int
    bytes: int  # of the weights
    dtype: str
    difference: float  # the largest between two logits
    compared_on: str
    transformers: str  # version

    def told(self, folder: Path) -> str:
        """One paragraph for a person."""
        return (
            f"{folder}: {self.model_class}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.bytes / 1e6:,.1f} MB\n"
            f"opened by transformers {self.transformers}: its logits equal ours to "
            f"{self.difference:.1e} on {self.compared_on}\n"
        )


def export(
    place: str,
    to: Path,
    checkpoint: str = "last",
    dtype: str = "fp32",
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Exported:
    """Write the model at `place` as the folder `to`, which appears complete and compared or not.

    Raises `UserError` where `to` holds something and not `overwrite`, or where no class of
    transformers computes the model, `CheckpointError` where transformers computes something else.
    """
    to = to.resolve()
    check_target(to, overwrite)
    source = find_pretrained(place, checkpoint)
    model, tokenizer = load_pretrained(place, checkpoint, allow_pickle)
    matching_preset(model.config)  # refused before anything is written
    # a folder that exists may be a mount point, or where somebody stands: it is filled, not moved
    temporary = to / TEMPORARY if to.is_dir() else to.with_name(f".tmp_{to.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        exported = write_model(model, tokenizer, source, temporary, dtype)
        replace_folder(temporary, to)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{to} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported


def check_target(to: Path, overwrite: bool) -> None:
    """Raise `UserError` for a target that holds something which may not be replaced."""
    require(not to.exists() or to.is_dir(), f"{to} is a file; give a folder to make")
    there = sorted(path.name for path in to.iterdir()) if to.is_dir() else []
    there = [name for name in there if name != TEMPORARY]
    require(
        overwrite or not there,
        f"{to} already holds {there[0] if there else ''}; give another folder, or replace an "
        "exported model with --overwrite",
    )
    others = [name for name in there if not any(fnmatch(name, kind) for kind in WRITTEN)]
    require(
        not others,
        f"{to} holds {others[0] if others else ''}, which no export wrote, so it is not replaced; "
        "give another folder",
    )


def replace_folder(new: Path, to: Path) -> None:
    """Give a finished folder its name, or its files to the folder of that name.

    There config.json goes first and comes last: without it the folder is no model, not half one.
    """
    if not to.is_dir():
        new.rename(to)
        return
    (to / "config.json").unlink(missing_ok=True)
    for name in {path.name for path in to.iterdir()} - {path.name for path in new.iterdir()}:
        if name != TEMPORARY:
            (to / name).unlink()
    for path in sorted(new.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(to / path.name)


def write_model(
    model: GPT, tokenizer: Tokenizer, source: Pretrained, folder: Path, dtype: str
) -> Exported:
    """Write all files of a model into `folder`, and compare what transformers makes of them.

    The model is used up: its weights are given back to the system on the way.
    """
    from huggingface_hub import save_torch_state_dict

    name, kind = DTYPES[dtype]
    preset = matching_preset(model.config)
    shape = write_shape(model.config, model.vocab_size, tokenizer.eot_id, name)
    ends = {key: shape[key] for key in ("bos_token_id", "eos_token_id")}
    settings = ends | {"pad_token_id": tokenizer.eot_id}
    write_file(folder / "config.json", [as_json(shape)])
    write_file(folder / "generation_config.json", [as_json(settings)])
    tokens, compared_on = compared_tokens(model, tokenizer, source)
    round_weights(model, kind)
    reference = computed(model.cpu().eval(), tokens)
    require(
        bool(reference["logits"].isfinite().all()),
        f"the weights in {dtype} give logits that are no finite numbers; nothing was kept",
    )
    tensors = export_tensors(model, preset, kind)
    model.to("meta")  # gives its memory back, before another process needs as much
    parameters = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_SIZE, metadata={"format": "pt"})
    del tensors
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # it was made for its owner alone
    save_for_transformers(tokenizer, folder, model.config.block_size)
    report = compare(reference, tokenizer, folder)
    told = CLASSES[preset], parameters, size, dtype, report["difference"]
    return Exported(*told, compared_on, report["transformers"])


@torch.no_grad()
def round_weights(model: GPT, kind: torch.dtype) -> None:
    """Give the weights the values that they will have in the file; not the rotary table."""
    for weight in model.parameters():
        weight.copy_(weight.to(kind))


def as_json(content: object) -> bytes:
    """Indented JSON with a line end."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# --------------------------------------------------------------------------- proof


def compared_tokens(model: GPT, tokenizer: Tokenizer, source: Pretrained) -> tuple[Tensor, str]:
    """(2, T) tokens of the val split that the run evaluated, and what they are.

    Tokens at random where the data is not at hand.
    """
    length = min(COMPARED_TOKENS, model.config.block_size)
    place = val_place(source)
    why = "the val data is not known"
    if place:
        try:
            split, _ = open_data(place, "val", DataConfig(tokenizer=None))
            chosen = windows(split, length, COMPARED_WINDOWS * length)
            read = batches(split, chosen, COMPARED_WINDOWS, length, model.vocab_size)
            told = f"{COMPARED_WINDOWS} windows of {length} val tokens of {place}"
            return next(read)[0], redact(told)
        except UserError as error:
            why = redact(str(error).partition(";")[0])
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        min(tokenizer.vocab_size, model.vocab_size),
        (COMPARED_WINDOWS, length),
        generator=drawn,
        dtype=torch.int64,
    )
    return tokens, f"{COMPARED_WINDOWS} x {length} random tokens ({why})"


def val_place(source: Pretrained) -> str | None:
    """The data folder or URL whose val split the run of a checkpoint evaluated; None: not known."""
    if not source.is_checkpoint:
        return None
    config = read_state(source.folder).config
    named = [place for key, place in config.items() if key.startswith("data.val.")]
    first = config.get("data.val") or (named or [config.get("data.train")])[0]
    if isinstance(first, list):
        first = first[0]["path"]
    return first if isinstance(first, str) and first else None


@torch.no_grad()
def computed(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """`tokens` (B, T), `logits` of the last of them (B, L, V), and the hidden states (B, T, C)
    before each block and after the last norm: 0000, 0001, ...
    """
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        for block in model.blocks
    ]
    hooks.append(model.norm_f.register_forward_hook(lambda _, _inputs, out: seen.append(out)))
    logits = model(tokens)[:, -COMPARED_LOGITS:].contiguous()
    for hook in hooks:
        hook.remove()
    states = {f"{i:04d}": state for i, state in enumerate(seen)}
    return {"tokens": tokens, "logits": logits, **states}


def compare(reference: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Let a fresh process open `folder` with transformers and compare it with what we `computed`.

    Raises `CheckpointError` saying where the two part, `UserError` where it came to no end.
    """
    text = tokenizer.decode(reference["tokens"][0].tolist())
    content = {**reference, "ids": torch.tensor(tokenizer.encode(text))}
    with tempfile.TemporaryDirectory(dir=folder.parent) as room:
        file = Path(room) / "reference.safetensors"
        save_file(content, file, metadata={"text": text})
        command = [sys.executable, "-m", "accel_gpt.hub.verify", str(folder), str(file)]
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            capture_output=True,
            text=True,
            check=False,
        )
    said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    if done.returncode == PARTED:
        raise CheckpointError(f"the exported model is not ours, nothing was kept: {said}")
    require(
        done.returncode == 0,
        f"transformers could not be asked about {folder}, nothing was kept: exit code "
        f"{done.returncode} ({said})",
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
