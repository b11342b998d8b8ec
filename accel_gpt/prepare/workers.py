"""Text tokenized by several processes, in its order, with few batches in flight at a time."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.prepare.documents import BATCH_CHARACTERS, Piece

# Assumption: a piece takes about 1 KiB beside its text on its way through the processes; so a batch
# holds 10,000 documents of one letter and not a million.
PIECE_OVERHEAD = 100  # characters


class Encoded(NamedTuple):
    """Tokens of a piece, end-of-text included if the piece ends a document."""

    split: str
    tokens: Tokens
    documents: int
    """Documents that begin in it."""
    utf8_bytes: int


class Tokenized(NamedTuple):
    """Encoded pieces, and what the journal says once they are written."""

    encoded: list[Encoded]
    journal: Mapping[str, Any]


class Waiting(NamedTuple):
    """A batch that a process is encoding."""

    pieces: list[Piece]
    journal: Mapping[str, Any]
    tokens: Future[list[Tokens]]


def worker_count(requested: int, total: int | None) -> int:
    """Return the number of processes: as requested, or one a core, at most one a batch."""
    if requested:
        return requested
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if total is None:
        return cores
    return min(cores, 1 + total // BATCH_CHARACTERS)


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that end with this one however it ends."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, context, start_child)
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, perhaps for lack of memory; try fewer "
            f"data.prepare.workers than {count}"
        ) from None
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # else the pool waits until its work is done
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_child() -> None:
    """Leave Ctrl-C to the parent, and end when the parent is killed: no lock outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, args=(parent.sentinel,), daemon=True).start()


def encode_all(
    pieces: Iterable[Piece],
    counts: Callable[[], dict[str, int]],
    folder: Path,
    workers: int,
) -> Generator[Tokenized, None, None]:
    """Encode pieces in their order with the tokenizer in `folder`.

    At most two batches are in flight for each of the `workers` processes. The journal of a batch
    holds the `counts` at the time when the batch had been read.
    """
    cached_tokenizer.cache_clear()
    cached_tokenizer(folder)  # here, so that processes that fork inherit it
    waiting: deque[Waiting] = deque()
    with child_processes(workers) as pool:
        # all processes fork now, before reading `pieces` starts threads or takes memory
        pool.submit(encode_batch, folder, []).result()
        for batch in batches(pieces):
            journal = {"position": batch[-1].after, **counts()}
            texts = [(piece.text, piece.last) for piece in batch]  # a `Piece` takes 10 % longer
            tokens = pool.submit(encode_batch, folder, texts)
            waiting.append(Waiting(batch, journal, tokens))
            if len(waiting) >= 2 * workers:
                yield result_of(waiting.popleft())
        while waiting:
            yield result_of(waiting.popleft())


def result_of(batch: Waiting) -> Tokenized:
    """Wait until a batch is encoded."""
    encoded = []
    for piece, tokens in zip(batch.pieces, batch.tokens.result(), strict=True):
        encoded.append(
            Encoded(
                split=piece.split,
                tokens=tokens,
                documents=int(piece.first),
                utf8_bytes=len(piece.text.encode()),
            )
        )
    return Tokenized(encoded, batch.journal)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Collect pieces in lists of about `BATCH_CHARACTERS`."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + PIECE_OVERHEAD
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode_batch(folder: Path, texts: list[tuple[str, bool]]) -> list[Tokens]:
    """Encode each (text, whether it ends a document), in a tokenizing process."""
    return cached_tokenizer(folder).encode_pieces(texts)


@functools.cache
def cached_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in `folder` once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return load_tokenizer(folder)
