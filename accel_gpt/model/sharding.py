"""Read and write tensors that FSDP2 shards: each rank holds some of their rows."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether `tensor` is a DTensor.

    This does not import `torch.distributed.tensor`, which takes longer than the first step
    ("Start-up" in benchmarks/RESULTS.md). Until FSDP has imported it, no tensor is a DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's rows of `tensor`: all rows if `tensor` is not sharded."""
    if is_sharded(tensor):
        return tensor.to_local()
    return tensor.detach()


def first_row(tensor: Tensor) -> int:
    """Return the index of this rank's first row in the full tensor."""
    if not is_sharded(tensor):
        return 0
    assert all(p.is_replicate() or p.is_shard(0) for p in tensor.placements)
    chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]  # torch has no types
    return int(chunk.offsets[0])


@torch.no_grad()
def load_full(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of `full` into `tensor`."""
    local = local_shard(tensor)
    start = first_row(tensor)
    local.copy_(full[start : start + len(local)])
