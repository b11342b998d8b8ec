"""Text encoded by several processes, in its order, with few batches on their way at a time."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.text.documents import BATCH_CHARACTERS, Piece, Position

# Assumption: a piece costs about 1 KiB beside its text, on its way through the processes; so a
# batch of one-letter documents is 10,000 of them and not a million.
PIECE_CHARACTERS = 100


class Read(NamedTuple):
    """A piece of text, and the counts when it was read (see `journal.Journal`)."""

    piece: Piece
    counts: tuple[int, int, int]


class Encoded(NamedTuple):
    """Tokens of a piece, end-of-text included where it ends a document, and what follows it."""

    split: str
    tokens: Tokens
    documents: int
    utf8_bytes: int
    after: Position
    counts: tuple[int, int, int] = (0, 0, 0)


def worker_count(asked: int, total: int | None) -> int:
    """Processes that tokenize: as asked, or one a core, but no more than there are batches."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    useful = cores if total is None else 1 + total // BATCH_CHARACTERS
    return asked or max(1, min(cores, useful))


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes have started, and end with this one however it ends."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, context, start_child)
    try:
        pool.submit(os.getpid).result()
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, perhaps for lack of memory; try fewer "
            f"data.prepare.workers than {count}"
        ) from None
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # or it would be waited for until its work is done
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_child() -> None:
    """Leave Ctrl-C to the parent, and end when the parent is killed: no lock outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel
    threading.Thread(target=end_with, args=(sentinel,), daemon=True).start()


def end_with(sentinel: int) -> None:
    """Wait for the parent's end, then end this process at once."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def batches(all_pieces: Iterable[Read]) -> Iterator[list[Read]]:
    """Pieces in lists of about `BATCH_CHARACTERS`."""
    batch: list[Read] = []
    size = 0
    for one in all_pieces:
        batch.append(one)
        size += len(one.piece.text) + PIECE_CHARACTERS
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    pool: ProcessPoolExecutor, ahead: int, folder: Path, all_pieces: Iterable[Read]
) -> Iterator[Encoded]:
    """The pieces encoded, in their order, with at most `ahead` batches on their way."""
    waiting: deque[tuple[list[Read], Future[list[tuple[Tokens, int]]]]] = deque()
    for batch in batches(all_pieces):
        texts = [(one.piece.text, one.piece.last) for one in batch]
        waiting.append((batch, pool.submit(encode_batch, folder, texts)))
        del texts
        if len(waiting) >= ahead:
            yield from results(*waiting.popleft())
    while waiting:
        yield from results(*waiting.popleft())


def results(batch: list[Read], future: Future[list[tuple[Tokens, int]]]) -> Iterator[Encoded]:
    """What came back for a batch, piece by piece."""
    for (piece, counts), (tokens, size) in zip(batch, future.result(), strict=True):
        yield Encoded(piece.split, tokens, int(piece.first), size, piece.after, counts)


def encode_batch(folder: Path, texts: list[tuple[str, bool]]) -> list[tuple[Tokens, int]]:
    """The work of a tokenizing process: (text, ends a document) -> (tokens, UTF-8 bytes)."""
    tokenizer = cached_tokenizer(folder)
    encoded: list[tuple[Tokens, int]] = []
    all_tokens = tokenizer.encode_batch([text for text, _ in texts])
    for (text, last), tokens in zip(texts, all_tokens, strict=True):
        if last and tokenizer.eot_id is not None:
            tokens = np.append(tokens, tokens.dtype.type(tokenizer.eot_id))
        encoded.append((tokens, len(text.encode())))
    return encoded


@functools.cache
def cached_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, loaded once; tokenizing processes that fork inherit it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return load_tokenizer(folder)
