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
    """Return the weights by name, tied ones once. FSDP shards again those it left gathered."""
    weights = gpt.state_dict()
    if gpt.config.tie_embeddings:
        del weights["head.weight"]
    return weights


def moments_of(gpt: GPT, optimizer: AcceleratedOptimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer, for example `wte.weight.exp_avg`.

    Creates what a parameter lacks of it, as zeros. Call `weights_of` first: it shards again what
    FSDP left gathered.
    """
    names = {id(p): name for name, p in gpt.named_parameters()}
    moments = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            for key in sorted(state_names(group)):
                if key not in state and key == "step":
                    state[key] = torch.zeros((), device=p.device)
                elif key not in state:
                    state[key] = torch.zeros_like(p)
                moments[f"{names[id(p)]}.{key}"] = state[key]
    return moments


def rank_content(tensors: Mapping[str, Tensor], main: bool) -> dict[str, Any]:
    """Return the arguments of `safetensors.torch.save_file` for this rank's rows of `tensors`.

    If several ranks hold the same rows, the first of them writes; what is not sharded, `main`
    writes.
    """
    rows = {}
    offsets = {}
    for name, tensor in tensors.items():
        local = local_shard(tensor)
        writes = holds_first_copy(tensor) if is_sharded(tensor) else main
        if not writes or not local.numel():
            continue
        start = [0] * local.dim()
        if start:
            start[0] = first_row(tensor)
        rows[name] = local
        offsets[name] = {"saved_offsets": start}
    header = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
    return {"tensors": rows, "metadata": header}


def holds_first_copy(tensor: Any) -> bool:
    """Return whether this rank is the first of those that hold its shard of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and index != 0:
            return False
    return True


@torch.no_grad()
def read_tensors(files: Iterable[Path], into: Mapping[str, Tensor]) -> set[str]:
    """Read into each tensor the rows that this rank holds; return the names in the files.

    Raises `CheckpointError` if a tensor, or some of its rows, is in none of the files, or is of
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
            first = start[0] if start else 0  # a scalar has no rows
            parts.setdefault(name, []).append((first, opened.get_slice(name)))
    for name, tensor in into.items():
        if name not in parts:
            raise CheckpointError(f"it lacks {name}")
        read_local_rows(name, tensor, parts[name])
    return set(parts)


def read_local_rows(name: str, tensor: Tensor, parts: list[tuple[int, Any]]) -> None:
    """Read this rank's rows of `tensor` from slices of files, each with its first row."""
    _, any_part = parts[0]
    part_shape = any_part.get_shape()
    if not tensor.dim() and not part_shape:
        tensor.copy_(any_part[...])
        return
    rows = 0  # of the whole tensor in the files
    for start, part in parts:
        if part.get_shape():
            rows = max(rows, start + part.get_shape()[0])
    if name == "wpe.weight":  # a context may be shorter than the file's
        rows = min(rows, tensor.shape[0])
    shape = (rows, *part_shape[1:])
    if shape != tuple(tensor.shape):
        raise CheckpointError(
            f"it has {name} in the shape {shape}; here it is {tuple(tensor.shape)}"
        )
    local = local_shard(tensor)
    local_start = first_row(tensor)
    local_end = local_start + len(local)
    rows_read = 0
    for start, part in parts:
        low = max(local_start, start)
        high = min(local_end, start + part.get_shape()[0])
        if low < high:
            read = part[low - start : high - start]
            local[low - local_start : high - local_start].copy_(read)
            rows_read += high - low
    if rows_read != len(local):
        raise CheckpointError(f"it lacks {len(local) - rows_read:,} of the rows of {name}")


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
