"""Simulate several processes as threads: each has a rank, and reductions cover all."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from accelerate.utils import DistributedType

T = TypeVar("T")


class Member:
    """The methods of `Accelerator` that an evaluation uses, for one process."""

    def __init__(self, rank: int, world: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.process_index, self.num_processes, self.device = rank, world, torch.device("cpu")
        self.distributed_type = DistributedType.NO
        self.given, self.barrier = given, barrier

    def reduce(self, value: torch.Tensor, how: str) -> torch.Tensor:
        """Return the sum over all members, in the order of ranks."""
        assert how == "sum"
        self.given[self.process_index] = value
        self.barrier.wait()
        total = torch.stack(self.given).sum(0)
        self.barrier.wait()  # nobody sends the next value before all have read this one
        return total

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of all members, in the order of ranks."""
        own = torch.zeros(len(self.given), *value.shape)
        own[self.process_index] = value
        return self.reduce(own, "sum").flatten(0, 1)


def together(world: int, work: Callable[[Any], T]) -> list[T]:
    """Return the result of `work` for the accelerator of each of `world` processes."""
    given: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=60)
    members = [Member(rank, world, given, barrier) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, members))
