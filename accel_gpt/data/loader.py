"""Read the micro-batches of one rank, prefetched by a thread.

The loader is not passed to `Accelerator.prepare()`, whose loaders may read on one rank and
broadcast. Each rank computes its own sequences from the position, which is the whole state.

Legend: B micro-batch, T block_size.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel_gpt.config.plan import Plan
from accel_gpt.data.mixture import Mixture
from accel_gpt.data.shards import token_beyond

Sequences = npt.NDArray[np.unsignedinteger[Any]]
PREFETCH_CHUNKS = 4
CHUNK_BYTES = 1 << 18  # bytes of a chunk, at least one micro-batch; each chunk costs 1 ms to locate
CLOSE_SECONDS = 2.0  # assumption: a stopping run has 30 s in total


class Loader:
    """Iterate over `(tokens, targets)` pairs without end, each (B, T) int64 on `device`.

    `chunks`: arrays (n, B, T + 1) of n micro-batches. `next` raises the errors of the prefetching
    thread, such as `DataError`.
    """

    def __init__(self, chunks: Iterator[Sequences], device: torch.device) -> None:
        self.chunks = chunks
        self.device = device
        # on other devices the copy must finish before the chunk is freed
        self.overlaps = device.type == "cuda"
        self.batches: deque[Tensor] = deque()  # that `fetch` has taken from the queue
        self.ready: queue.Queue[Tensor | Exception] = queue.Queue(PREFETCH_CHUNKS)
        self.waited = 0.0  # seconds that training has waited since `take_wait`
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.prefetch, name="loader", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.batches:
            start = time.monotonic()
            self.take(self.ready.get())
            self.waited += time.monotonic() - start
        batch = self.batches.popleft()
        batch = batch.to(self.device, non_blocking=self.overlaps)
        batch = batch.long()  # (B, T + 1), widened on the device
        return batch[:, :-1], batch[:, 1:]

    def fetch(self, count: int) -> bool:
        """Return whether the next `count` batches are here; does not wait for them."""
        while len(self.batches) < count:
            try:
                self.take(self.ready.get_nowait())
            except queue.Empty:
                return False
        return True

    def take_wait(self) -> float:
        """Return the seconds that training has waited for batches since the last call."""
        waited = self.waited
        self.waited = 0.0
        return waited

    def take(self, ready: Tensor | Exception) -> None:
        """Split a chunk from the queue into batches, or raise the error of the thread."""
        if isinstance(ready, Exception):
            raise ready
        self.batches.extend(ready)

    def close(self) -> None:
        """Stop the thread. If it waits for the network, it ends with the process."""
        self.stop.set()
        end = time.monotonic() + CLOSE_SECONDS
        while self.thread.is_alive() and time.monotonic() < end:
            try:
                self.ready.get_nowait()  # a full queue blocks the thread
            except queue.Empty:
                self.thread.join(0.01)

    def prefetch(self) -> None:
        """Fill the queue with chunks until closed; for CUDA, in pinned memory."""
        cuda = self.device.type == "cuda"
        try:
            if cuda and self.device.index is not None:
                # each thread starts with the first GPU as its current device
                torch.cuda.set_device(self.device)
            for chunk in self.chunks:
                if self.stop.is_set():
                    return
                tensor = torch.from_numpy(chunk)
                self.ready.put(tensor.pin_memory() if cuda else tensor)
        except Exception as error:  # the training thread raises it
            self.ready.put(error)


def read_sequences(
    mixture: Mixture,
    plan: Plan,
    vocab_size: int,
    rank: int,
    position: int,
    end: int | None = None,
) -> Iterator[Sequences]:
    """Yield micro-batches (n, B, T + 1) of one rank, in the type of the shards.

    They begin at `position`, and end at the position `end`; None: never. A position counts whole
    sequences of the mixture, and each of them holds `plan.pieces` sequences of T tokens.

    Sequence b of micro-step m has the number `first + (m * world_size + rank) * B + b`. A step
    therefore reads the same sequences at any world size.
    """
    B = plan.micro_batch_size
    T = plan.block_size
    per_micro_step = plan.world_size * B  # sequences of all ranks
    most = max(1, CHUNK_BYTES // (B * (T + 1) * mixture.dtype.itemsize))  # micro-steps
    first = position * plan.pieces
    while end is None or first < end * plan.pieces:
        n = most
        if end is not None:
            n = min(most, (end * plan.pieces - first) // per_micro_step)
        micro_steps = np.arange(n)[:, None] * per_micro_step
        numbers = (first + rank * B + micro_steps + np.arange(B)).reshape(-1)
        located = mixture.locate(numbers // plan.pieces)
        located.first[:] += numbers % plan.pieces * T
        mixture.prefetch(located, int(numbers[-1]) // plan.pieces)
        tokens = mixture.read(located, T + 1)
        check_tokens(tokens, vocab_size, partial(mixture.file_of, located))
        yield tokens.reshape(n, B, T + 1)
        first += n * per_micro_step


def check_tokens(
    tokens: Sequences, vocab_size: int, file_of: Callable[[int], tuple[str | Path, int]]
) -> None:
    """Raise `DataError` for a token beyond the vocabulary, which on a GPU fails an assertion.

    `tokens`: (N, L). `file_of`: returns the file of a row, and the index of its first token there.
    """
    if int(tokens.max()) >= vocab_size:
        row, column = np.argwhere(tokens >= vocab_size)[0].tolist()
        file, first = file_of(row)
        raise token_beyond(file, int(tokens[row, column]), first + column, vocab_size)
