"""This process's micro-batches: memory-mapped windows, read ahead by a thread.

Not passed to `Accelerator.prepare()`, which would let one process read everything and broadcast it:
every process computes its own rows from the position, so the position is the whole state.

Legend: B micro-batch, T block_size.
"""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel_gpt.data.order import Order
from accel_gpt.data.shards import Split
from accel_gpt.errors import DataError
from accel_gpt.plan import Plan

AHEAD = 4  # micro-batches read before they are asked for
LOCATE = 1024  # windows whose place is computed at once


class Loader:
    """Endless `(tokens, targets)` pairs, each (B, T) int64 on `device`.

    Row b of micro-step m, counted from the start of the run, is the window number
    `(m * world_size + rank) * B + b`: the same set of windows a step at any world size. Errors of
    the reading thread (`DataError`, an unreadable disk) are raised by `next`.
    """

    def __init__(
        self,
        split: Split,
        order: Order,
        plan: Plan,
        vocab_size: int,
        rank: int,
        device: torch.device,
        position: int,
    ) -> None:
        self.split, self.order, self.plan, self.vocab_size = split, order, plan, vocab_size
        self.rank, self.device, self.position = rank, device, position
        self.ready: queue.Queue[Tensor | Exception] = queue.Queue(AHEAD)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.read_ahead, name="loader", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows = self.ready.get()
        if isinstance(rows, Exception):
            raise rows
        rows = rows.to(self.device, non_blocking=True).long()  # (B, T + 1), widened on the device
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """Stop the reading thread."""
        self.stop.set()
        while self.thread.is_alive():
            self.drop_one()
            self.thread.join(0.01)

    def drop_one(self) -> None:
        """Make room for a reader that waits to hand over."""
        try:
            self.ready.get_nowait()
        except queue.Empty:
            return

    def read_ahead(self) -> None:
        """Fill the queue until closed."""
        try:
            for rows in self.micro_batches():
                if self.stop.is_set():
                    return
                self.ready.put(rows)
        except Exception as error:  # whatever it is, the training thread must hear of it
            self.ready.put(error)

    def micro_batches(self) -> Iterator[Tensor]:
        """Rows (B, T + 1) of this process, in the type they are stored in, pinned for CUDA."""
        size, world = self.plan.micro_batch_size, self.plan.world_size
        many = max(1, LOCATE // size)
        steps = np.arange(many, dtype=np.int64)[:, None] * world * size
        first = self.position + self.rank * size
        while True:
            shards, starts = self.order.locate((first + steps + np.arange(size)).reshape(-1))
            for at in range(0, many * size, size):
                rows = self.read(shards[at : at + size], starts[at : at + size])
                yield rows.pin_memory() if self.device.type == "cuda" else rows
            first += many * world * size

    def read(self, shards: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Tensor:
        """The windows that begin at `starts` of `shards`, as one tensor (B, T + 1)."""
        rows = np.empty((len(shards), self.plan.block_size + 1), dtype=self.split.dtype)
        for row, shard, start in zip(rows, shards.tolist(), starts.tolist(), strict=True):
            row[:] = self.split.read(shard, start, len(row))
        check_tokens(rows, self.vocab_size, self.split)
        return torch.from_numpy(rows)


def check_tokens(rows: npt.NDArray[np.unsignedinteger], vocab_size: int, split: Split) -> None:
    """`DataError` for a token that the model has no row for: on a GPU it would be an assertion."""
    largest = int(rows.max())
    if largest >= vocab_size:
        raise DataError(
            f"{split.folder} holds token {largest}, beyond the vocabulary of {vocab_size}; "
            "set model.vocab_size above it or prepare the data again"
        )
