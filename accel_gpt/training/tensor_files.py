"""Safetensors files of a checkpoint: full tensors, or the rows that one rank holds.

Where a rank's rows begin stands in the header as torch.distributed.checkpoint has it: its
`HuggingFaceStorageReader` and its consolidation open these files too. It does not write them: its
writer copies all that a rank holds and needs a collective, and its reader, which also unpickles
other files, leaves the rows of a missing file as they were.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_gpt.errors import CheckpointError
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sharding import first_row, is_sharded, local_shard
from accel_gpt.optim.groups import state_names
from accel_gpt.training.checkpoint import weight_parts

OFFSETS = "DCP_SHARDING_INFO"  # key of the header


def weights_of(gpt: GPT) -> dict[str, Tensor]:
    """The weights by name, tied ones once; FSDP shards again those that it left gathered."""
    weights = gpt.state_dict()
    if gpt.config.tie_embeddings:
        del weights["head.weight"]
    return weights


def moments_of(gpt: GPT, optimizer: AcceleratedOptimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer, for example `wte.weight.exp_avg`.

    Creates what a parameter lacks of it, as zeros. Call `weights_of` first: it shards again what
    FSDP left gathered.
    """
    names, found = {id(p): name for name, p in gpt.named_parameters()}, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            for key in sorted(state_names(group)):
                if key not in state:
                    state[key] = (
                        torch.zeros((), device=p.device) if key == "step" else torch.zeros_like(p)
                    )
                found[f"{names[id(p)]}.{key}"] = state[key]
    return found


def rank_content(tensors: Mapping[str, Tensor], main: bool) -> dict[str, Any]:
    """Arguments of `safetensors.torch.save_file` for this rank's rows of `tensors`.

    What several ranks hold, the first of them writes; of what is not sharded that is the `main`.
    """
    rows, offsets = {}, {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            placed = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
            first = all(index == 0 for index, placement in placed if placement.is_replicate())
        else:
            first = main
        local = local_shard(tensor)
        if first and local.numel():
            rows[name] = local
            start = [first_row(tensor)] if local.dim() else []
            offsets[name] = {"saved_offsets": start + [0] * (local.dim() - 1)}
    header = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
    return {"tensors": rows, "metadata": header}


@torch.no_grad()
def read_tensors(files: Iterable[Path], into: Mapping[str, Tensor]) -> set[str]:
    """Read into each tensor the rows that this rank holds; returns the names in the files.

    Raises `CheckpointError` where a tensor, or some of its rows, is in none of the files, or is of
    another shape.
    """
    parts: dict[str, list[tuple[int, Any]]] = {}
    for file in files:
        opened: Any = safe_open(file, "pt")
        info = (opened.metadata() or {}).get(OFFSETS)
        offsets = json.loads(info) if info else {}
        names = opened.keys()  # a safetensors file cannot be iterated
        for name in names:
            start = offsets[name]["saved_offsets"] if info else []
            parts.setdefault(name, []).append((start[0] if start else 0, opened.get_slice(name)))
    for name, tensor in into.items():
        if name not in parts:
            raise CheckpointError(f"it lacks {name}")
        read_local_rows(name, tensor, parts[name])
    return set(parts)


def read_local_rows(name: str, tensor: Tensor, parts: list[tuple[int, Any]]) -> None:
    """Read this rank's rows of `tensor` from slices of files, each with its first row."""
    shapes = [part.get_shape() for _, part in parts]
    if not tensor.dim() and shapes[0] == []:
        tensor.copy_(parts[0][1][...])
        return
    ends = [start + shape[0] for (start, _), shape in zip(parts, shapes, strict=True) if shape]
    rows = max(ends, default=0)
    if name == "wpe.weight":  # a context may be shorter than the file's
        rows = min(rows, tensor.shape[0])
    if [rows, *shapes[0][1:]] != list(tensor.shape):
        raise CheckpointError(
            f"it has {name} in the shape {(rows, *shapes[0][1:])}; here it is {tuple(tensor.shape)}"
        )
    local, first, found = local_shard(tensor), first_row(tensor), 0
    for (start, part), end in zip(parts, ends, strict=True):
        low, high = max(first, start), min(first + len(local), end)
        if low < high:
            local[low - first : high - first].copy_(part[low - start : high - start])
            found += high - low
    if found != len(local):
        raise CheckpointError(f"it lacks {len(local) - found:,} of the rows of {name}")


def read_weights(path: Path, gpt: GPT) -> None:
    """Read the weights of a verified checkpoint into `gpt`, whose context may be shorter.

    Under FSDP it reads this rank's shards.
    """
    weights = weights_of(gpt)
    files = weight_parts(path)
    try:
        unknown = read_tensors(files, weights) - weights.keys()
        if unknown:
            raise CheckpointError(f"it has {min(unknown)}, which is not in the model")
    except (CheckpointError, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{files[0]} does not fit: {error}") from None
