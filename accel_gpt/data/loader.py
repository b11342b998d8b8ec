"""This process's micro-batches, read ahead by a thread.

Not passed to `Accelerator.prepare()`, which would let one process read everything and broadcast it:
every process computes its own rows from the position, so the position is the whole state.

Legend: B micro-batch, T block_size.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel_gpt.config.plan import Plan
from accel_gpt.data.mixture import Mixture
from accel_gpt.errors import DataError

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.unsignedinteger[Any]]
AHEAD = 4  # portions read before they are asked for
PORTION = 1 << 18  # bytes handed over at once, or one micro-batch: it costs a switch of threads
CLOSE_SECONDS = 2.0  # a stopping run has 30 s in all; assumption
HASH_BITS = 48  # also exact as a float64, and in the JSON of any language
LOCATE = 8192  # windows whose place is computed at once, 2 us each; one at a time takes 1000 us


class Loader:
    """Endless `(tokens, targets)` pairs, each (B, T) int64 on `device`.

    `rows`: portions (n B, T + 1) of whole micro-batches, each with the place that follows it;
    `place` is that of the portion which was begun last. With `keep_rows` the rows handed out are
    kept on the host, in `kept`, until whoever asked for them empties it. Errors of the reading
    thread (`DataError`, an unreadable disk) are raised by `next`.
    """

    def __init__(
        self, rows: Iterator[tuple[Rows, Any]], batch_size: int, device: torch.device
    ) -> None:
        self.rows, self.batch_size, self.device = rows, batch_size, device
        self.place: Any = None
        self.keep_rows = False
        self.kept: list[Tensor] = []
        self.batches: Iterator[Tensor] = iter(())
        self.ready: queue.Queue[tuple[Tensor, Any] | Exception] = queue.Queue(AHEAD)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.read_ahead, name="loader", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows = next(self.batches, None)
        if rows is None:
            ready = self.ready.get()
            if isinstance(ready, Exception):
                raise ready
            portion, self.place = ready
            self.batches = iter(torch.split(portion, self.batch_size))
            rows = next(self.batches)
        if self.keep_rows:
            self.kept.append(rows)
        rows = rows.to(self.device, non_blocking=True).long()  # (B, T + 1), widened on the device
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """Stop the reading thread; one that waits for the network ends with the process."""
        self.stop.set()
        end = time.monotonic() + CLOSE_SECONDS
        while self.thread.is_alive() and time.monotonic() < end:
            self.drop_one()
            self.thread.join(0.01)

    def drop_one(self) -> None:
        """Make room for a reader that waits to hand over."""
        try:
            self.ready.get_nowait()
        except queue.Empty:
            return

    def read_ahead(self) -> None:
        """Fill the queue until closed, with memory that CUDA can copy from while it computes."""
        try:
            if self.device.index is not None and self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # per thread; each starts with the first GPU
            for rows, place in self.rows:
                if self.stop.is_set():
                    return
                tensor = torch.from_numpy(rows)
                self.ready.put(
                    (tensor.pin_memory() if self.device.type == "cuda" else tensor, place)
                )
        except Exception as error:  # whatever it is, the training thread must hear of it
            self.ready.put(error)


def read_windows(
    mixture: Mixture, plan: Plan, vocab_size: int, rank: int, position: int
) -> Iterator[tuple[Rows, None]]:
    """Portions (n B, T + 1) of one process, in the type they are stored in, from `position` on.

    Row b of micro-step m, counted from the start of the run, is the window number
    `(m * world_size + rank) * B + b`: the same set of windows a step at any world size.
    """
    size, world, length = plan.micro_batch_size, plan.world_size, plan.block_size + 1
    portion = max(1, PORTION // (size * length * mixture.dtype.itemsize)) * size  # windows
    many = -(-LOCATE // portion) * portion // size
    steps = np.arange(many, dtype=np.int64)[:, None] * world * size
    first = position + rank * size
    while True:
        numbers = (first + steps + np.arange(size)).reshape(-1)
        source, shard, start = mixture.locate(numbers)
        for at in range(0, len(numbers), portion):
            here = slice(at, at + portion)
            if mixture.remote:
                mixture.ahead(int(numbers[here][-1]), source[here], shard[here])
            rows = mixture.windows(source[here], shard[here], start[here], length)
            check_tokens(rows, vocab_size, ", ".join(mixture.names))
            yield rows, None
        first += many * world * size


def rows_hash(batches: Iterable[Tensor]) -> int:
    """A fingerprint below 2^48 of rows of tokens, (B, T + 1) each; the order of rows has no part.

    The sum, modulo 2^48, of the BLAKE2b of each row as little-endian uint32: so fingerprints of
    parts, as of the processes of a step, add up to that of the whole.
    """
    total = 0
    for batch in batches:
        for row in batch.numpy().astype("<u4"):
            digest = hashlib.blake2b(row.tobytes(), digest_size=HASH_BITS // 8).digest()
            total += int.from_bytes(digest, "little")
    return total % (1 << HASH_BITS)


def check_tokens(rows: Rows, vocab_size: int, where: str | Path) -> None:
    """`DataError` for a token that the model has no row for: on a GPU it would be an assertion."""
    largest = int(rows.max())
    if largest >= vocab_size:
        raise DataError(
            f"{where} holds token {largest}, beyond the vocabulary of {vocab_size}; "
            "set model.vocab_size above it or prepare the data again"
        )
