"""Lay out and read the safetensors files of a checkpoint: full tensors, or the rows of one rank.

The header stores the first row of each part in the format of torch.distributed.checkpoint. So its
`HuggingFaceStorageReader` and its consolidation can read these files.

torch.distributed.checkpoint is not used here. Its writer copies all tensors of a rank and needs a
collective. Its reader unpickles other files, and ignores the missing rows of a missing file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_gpt.errors import CheckpointError
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.sharding import first_row, is_sharded, local_shard
from accel_gpt.optim.groups import state_names
from accel_gpt.runs.checkpoint import weight_parts

OFFSETS = "DCP_SHARDING_INFO"  # key in the header
GROUPS = "groups"  # key in the header: the values of an own optimizer's groups, as JSON
NUMBER = ":number"  # end of a name: the value is a number of Python


def weights_of(gpt: LanguageModel) -> dict[str, Tensor]:
    """Return the weights by name, tied weights once. FSDP reshards weights left gathered.

    Raises `UserError` if the config ties the head, but the model does not.
    """
    gpt.check_tied()
    weights = gpt.state_dict()
    once = {name for name, _ in gpt.named_parameters()}  # tied weights under one of their names
    every = {name for name, _ in gpt.named_parameters(remove_duplicate=False)}
    for name in every - once:
        del weights[name]
    return weights


def moments_of(gpt: LanguageModel, optimizer: AcceleratedOptimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer by name, for example `wte.weight.exp_avg`.

    Creates missing tensors as zeros. A number in the state becomes a tensor; its name ends with
    `NUMBER`. Call `weights_of` first: it reshards weights that FSDP left gathered.
    """
    names = {id(p): name for name, p in gpt.named_parameters()}
    moments = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            for key in sorted(state_names(group) or state):
                name = f"{names[id(p)]}.{key}"
                if key not in state and key == "step":
                    state[key] = torch.zeros((), device=p.device)
                elif key not in state:
                    state[key] = torch.zeros_like(p)
                if isinstance(state[key], Tensor):
                    moments[name] = state[key]
                elif isinstance(state[key], int | float):
                    kind = torch.float64 if isinstance(state[key], float) else torch.int64
                    moments[f"{name}{NUMBER}"] = torch.tensor(state[key], dtype=kind)
    return moments


def rank_content(
    tensors: Mapping[str, Tensor], main: bool, more: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the arguments of `safetensors.torch.save_file` for this rank's rows of `tensors`.

    `more`: further entries of the header.

    If several ranks hold the same rows, the first of these ranks writes them. If a tensor is not
    sharded, the `main` rank writes it.
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
    header = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets), **(more or {})}
    return {"tensors": rows, "metadata": header}


def holds_first_copy(tensor: Any) -> bool:
    """Return whether this rank is the first of the ranks that hold its shard of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and index != 0:
            return False
    return True


@torch.no_grad()
def read_tensors(files: Iterable[Path], into: Mapping[str, Tensor]) -> set[str]:
    """Read this rank's rows of each tensor in `into`; return the names in the files.

    Raises `CheckpointError` if a tensor or some of its rows are missing, or if its shape differs.
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
    """Read this rank's rows of `tensor` from `parts`: the first row and slice of each file."""
    _, any_part = parts[0]
    part_shape = any_part.get_shape()
    if not tensor.dim() and not part_shape:
        tensor.copy_(any_part[...])
        return
    rows = 0  # of the whole tensor in the files
    for start, part in parts:
        if part.get_shape():
            rows = max(rows, start + part.get_shape()[0])
    if name == "wpe.weight":  # the model's context may be shorter than in the file
        rows = min(rows, tensor.shape[0])
    shape = (rows, *part_shape[1:])
    if shape != tuple(tensor.shape):
        raise CheckpointError(
            f"it has {name} with shape {shape}, but the model needs {tuple(tensor.shape)}"
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
        raise CheckpointError(f"it lacks {len(local) - rows_read:,} rows of {name}")


def read_weights(path: Path, gpt: LanguageModel) -> None:
    """Read the weights of a verified checkpoint into `gpt`; under FSDP only this rank's shards.

    The context of `gpt` may be shorter than the context of the checkpoint.
    """
    weights = weights_of(gpt)
    files = weight_parts(path)
    try:
        unknown = read_tensors(files, weights) - weights.keys()
        if unknown:
            raise CheckpointError(f"it has {min(unknown)}, unknown to the model")
    except (CheckpointError, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{files[0]} does not fit the model: {error}") from None


def read_own_state(
    gpt: LanguageModel, optimizer: AcceleratedOptimizer, files: Sequence[Path]
) -> None:
    """Read the state of an optimizer of --code, whose names only the files know.

    Under FSDP, reads this rank's rows of the tensors that have the shape of their parameter.
    """
    own: Any = optimizer.optimizer
    parameters = dict(gpt.named_parameters())
    shaped: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    for file in files:
        opened: Any = safe_open(file, "pt")
        groups = json.loads((opened.metadata() or {}).get(GROUPS, "[]")) or groups
        names = opened.keys()  # a safetensors file cannot be iterated
        for name in names:
            owners = [one for one in parameters if name.startswith(f"{one}.")]
            if not owners:
                raise CheckpointError(f"it has {name}, unknown to this model")
            owner = max(owners, key=len)
            p = parameters[owner]
            key = name.removeprefix(f"{owner}.")
            part = opened.get_slice(name)
            if part.get_shape():
                if name not in shaped:
                    shaped[name] = torch.zeros_like(p, dtype=part[:0].dtype)
                    own.state[p][key] = shaped[name]
            elif key.endswith(NUMBER):
                own.state[p][key.removesuffix(NUMBER)] = part[...].item()
            else:
                own.state[p][key] = part[...].to(p.device)
    read_tensors(files, shaped)
    own.load_group_values(groups)
