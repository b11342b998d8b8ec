"""Lay out and read the safetensors files of a checkpoint: full tensors, or the rows of one rank.

The header stores the first row of each part in the format of torch.distributed.checkpoint. So its
`HuggingFaceStorageReader` and its consolidation can read these files.

torch.distributed.checkpoint is not used here. Its writer copies all tensors of a rank and needs a
collective. Its reader unpickles other files, and ignores the missing rows of a missing file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.constants import OPTIMIZER_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_gpt.errors import CheckpointError
from accel_gpt.model.language_model import LanguageModel, is_new
from accel_gpt.model.sharding import first_row, is_sharded, local_shard
from accel_gpt.optim.groups import state_names
from accel_gpt.optim.own import OwnOptimizer
from accel_gpt.own_code import Weights
from accel_gpt.runs.checkpoint import optimizer_parts, weight_parts

T = TypeVar("T")
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


def whole_content(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `safetensors.torch.save_file` for whole tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return {"tensors": contiguous, "metadata": {"format": "pt"}}


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


class SavedTensor:
    """A tensor in a checkpoint: whole in one file, or some of its rows in each of several files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[tuple[int, Any]] = []  # the first row, and a tensor or an open slice
        self.shape: tuple[int, ...] = ()  # of the whole tensor

    def add(self, first: int, shape: Sequence[int], part: Any) -> None:
        """Add the rows from `first` on, of this `shape`."""
        self.parts.append((first, part))
        if shape:
            rows = max([first + shape[0], *self.shape[:1]])
            self.shape = (rows, *shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the elements."""
        _, part = self.parts[0]
        element: Tensor = part[:0] if self.shape else part[...]
        return element.dtype

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, tensor: Tensor) -> None:
        """Read this rank's rows of `tensor`; raise `CheckpointError` if the files lack some."""
        if not self.shape:
            tensor.copy_(self.parts[0][1][...])
            return
        local = local_shard(tensor)
        start = first_row(tensor)
        end = start + len(local)
        rows_read = 0
        for first, part in self.parts:
            rows = part[max(start - first, 0) : max(end - first, 0)]
            if len(rows):
                begin = max(first - start, 0)
                local[begin : begin + len(rows)].copy_(rows)
                rows_read += len(rows)
        if rows_read != len(local):
            raise CheckpointError(f"it lacks {len(local) - rows_read:,} rows of {self.name}")


def saved_tensors(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """Open the tensors of safetensors files by name. Reads nothing but the headers."""
    found: dict[str, SavedTensor] = {}
    for file in files:
        opened: Any = safe_open(file, "pt")
        info = (opened.metadata() or {}).get(OFFSETS)
        offsets = json.loads(info) if info else {}
        names = opened.keys()  # a safetensors file cannot be iterated
        for name in names:
            part = opened.get_slice(name)
            start = offsets[name]["saved_offsets"] if info else []
            first = start[0] if start else 0  # a scalar has no rows
            found.setdefault(name, SavedTensor(name)).add(first, part.get_shape(), part)
    return found


def read_weights(
    path: Path, gpt: LanguageModel, weights: Weights, new: Sequence[str] | None = None
) -> None:
    """Read `weights` of a verified checkpoint into `gpt`; under FSDP only this rank's shards.

    The context of `gpt` may be shorter than the context of the checkpoint. `new`: the patterns of
    `model.new_weights`; the weights that match them are not read. None: it cannot be set here.
    """
    files = weight_parts(path, weights)
    advice = "" if new is None else "; model.new_weights may list it"
    try:
        saved = without_new(saved_tensors(files), new)
        read_tensors(saved, without_new(weights_of(gpt), new), advice)
    except (CheckpointError, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{files[0]} does not fit the model: {error}") from None


def without_new(tensors: Mapping[str, T], patterns: Sequence[str] | None) -> dict[str, T]:
    """Return the tensors whose names match no pattern."""
    return {name: tensor for name, tensor in tensors.items() if not is_new(name, patterns)}


def read_tensors(
    saved: Mapping[str, SavedTensor], into: Mapping[str, Tensor], advice: str = ""
) -> None:
    """Read this rank's rows of each tensor; raise `CheckpointError` if names or shapes differ.

    `advice`: the end of the error for a tensor that the files lack.
    """
    unknown = saved.keys() - into.keys()
    if unknown:
        raise CheckpointError(f"it has {min(unknown)}, unknown to the model")
    for name, tensor in into.items():
        if name not in saved:
            raise CheckpointError(f"it lacks {name}{advice}")
        shape = saved[name].shape
        if name == "wpe.weight":  # the context of the model may be shorter
            shape = (min(shape[0], tensor.shape[0]), *shape[1:])
        check_shape(name, shape, tensor)
        saved[name].read_into(tensor)


def check_shape(name: str, shape: Sequence[int], tensor: Tensor) -> None:
    """Raise `CheckpointError` if a saved tensor has another shape than `tensor`."""
    if tuple(shape) != tuple(tensor.shape):
        needed = tuple(tensor.shape)
        raise CheckpointError(f"it has {name} with shape {shape}, but the model needs {needed}")


# --------------------------------------------------------------------------- the optimizer


def read_optimizer(folder: Path, gpt: LanguageModel, optimizer: AcceleratedOptimizer) -> None:
    """Read the optimizer of a checkpoint; under FSDP only this rank's rows of its tensors.

    The checkpoint and this run may each be sharded or not.
    """
    files = optimizer_parts(folder)
    if files:
        saved = state_by_name(saved_tensors(files), gpt)
        groups = saved_groups(files)
    else:
        content = torch.load(
            folder / f"{OPTIMIZER_NAME}.bin", map_location="cpu", weights_only=True, mmap=True
        )
        saved = state_by_number(content, optimizer)
        groups = content["param_groups"]
    for p, key, value in saved:
        if not isinstance(value, SavedTensor):
            optimizer.state[p][key] = value
        elif value.shape:
            check_shape(value.name, value.shape, p)
            optimizer.state[p][key] = torch.zeros_like(p, dtype=value.dtype)
            value.read_into(optimizer.state[p][key])
        else:
            optimizer.state[p][key] = value.whole().to(p.device)
    if isinstance(optimizer.optimizer, OwnOptimizer):
        optimizer.optimizer.load_group_values(groups)


def state_by_name(
    saved: Mapping[str, SavedTensor], gpt: LanguageModel
) -> Iterator[tuple[Tensor, str, Any]]:
    """Yield parameter, key and value of the state that `moments_of` returned."""
    parameters = dict(gpt.named_parameters())
    for name, tensor in saved.items():
        owners = [owner for owner in parameters if name.startswith(f"{owner}.")]
        if not owners:
            raise CheckpointError(f"it has {name}, unknown to this model")
        owner = max(owners, key=len)
        key = name.removeprefix(f"{owner}.")
        if key.endswith(NUMBER):
            yield parameters[owner], key.removesuffix(NUMBER), tensor.whole().item()
        else:
            yield parameters[owner], key, tensor


def state_by_number(
    saved: Mapping[str, Any], optimizer: AcceleratedOptimizer
) -> Iterator[tuple[Tensor, str, Any]]:
    """Yield parameter, key and value of an optimizer's `state_dict`.

    It numbers the parameters in the order of the groups.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                tensor = SavedTensor(key)
                tensor.add(0, value.shape, value)
                yield p, key, tensor
            else:
                yield p, key, value


def saved_groups(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the values of the groups of an optimizer of --code, from the headers of its files."""
    for file in files:
        opened: Any = safe_open(file, "pt")
        groups = json.loads((opened.metadata() or {}).get(GROUPS, "[]"))
        if groups:
            return list(groups)
    return []
