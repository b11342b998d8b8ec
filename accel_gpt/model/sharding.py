"""Tensors that FSDP version 2 shards: each rank holds some of the rows."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor. Does not import `torch.distributed.tensor`, which takes longer
    than the first step ("Start-up" in benchmarks/RESULTS.md): before FSDP did, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; a tensor that is not sharded itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def first_row(tensor: Tensor) -> int:
    """Number of the first of this rank's rows in the full tensor."""
    if not is_sharded(tensor):
        return 0
    assert all(p.is_replicate() or p.is_shard(0) for p in tensor.placements)
    return int(tensor.__create_chunk_list__()[0].offsets[0])  # type: ignore[no-untyped-call]


@torch.no_grad()
def load_full(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of `full` into `tensor`."""
    local, start = local_shard(tensor), first_row(tensor)
    local.copy_(full[start : start + len(local)])
