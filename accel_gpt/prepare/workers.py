"""Tokenize text in several processes, in order, with few batches in flight."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel_gpt.data.shards import Tokens, token_dtype
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.launcher import available_cores
from accel_gpt.prepare.documents import BATCH_CHARACTERS, Piece
from accel_gpt.prepare.lost_text import LostText, find_lost_text
from accel_gpt.prepare.pieces import lead_of

# Overhead of a piece between processes, in characters. Assumption: with it, a batch of one-letter
# documents holds 10,000 pieces instead of a million.
PIECE_OVERHEAD = 100


class Batch(NamedTuple):
    """Pieces of text, their tokens, and what the tokens do not hold."""

    pieces: list[Piece]
    tokens: list[Tokens]
    """Of each piece, with end-of-text if the piece ends a document."""
    lost: LostText


def worker_count(requested: int, total: int | None) -> int:
    """Return the number of processes: `requested`, or if it is 0, one per core or batch.

    `total`: bytes of text, None if unknown.
    """
    if requested:
        return requested
    cores = available_cores()
    if total is None:
        return cores
    return min(cores, 1 + total // BATCH_CHARACTERS)


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that also end if this process is killed."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, context, start_child)
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, possibly because memory ran out; free memory, or "
            f"lower data.prepare.workers (now {count})"
        ) from None
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # otherwise the pool waits for its work
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_child() -> None:
    """Ignore Ctrl-C, and end when the parent ends, so that no inherited lock stays held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, args=(parent.sentinel,), daemon=True).start()


def encode_all(pieces: Iterable[Piece], folder: Path, workers: int) -> Generator[Batch, None, None]:
    """Encode pieces in order with the tokenizer in `folder`, two batches per process in flight."""
    cached_tokenizer.cache_clear()
    cached_tokenizer(folder)  # forked processes inherit the loaded tokenizer
    waiting: deque[tuple[list[Piece], Future[tuple[list[Tokens], LostText]]]] = deque()
    with child_processes(workers) as pool:
        # fork all processes now, before reading `pieces` starts threads or uses memory
        pool.submit(encode_batch, folder, []).result()
        for batch in batches(pieces):
            # a `Piece` takes 10 % longer
            texts = [(piece.text, piece.first, piece.last) for piece in batch]
            waiting.append((batch, pool.submit(encode_batch, folder, texts)))
            if len(waiting) >= 2 * workers:
                done, encoded = waiting.popleft()
                yield Batch(done, *encoded.result())
        for done, encoded in waiting:
            yield Batch(done, *encoded.result())


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches of about `BATCH_CHARACTERS`."""
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


def encode_batch(
    folder: Path, texts: list[tuple[str, bool, bool]]
) -> tuple[list[Tokens], LostText]:
    """Encode each (text, begins a document, ends a document); runs in a worker process.

    Returns the tokens of each text, and what they do not hold.
    """
    tokenizer = cached_tokenizer(folder)
    encoded = encode_pieces(tokenizer, texts)
    lost = LostText()
    for (text, _, last), tokens in zip(texts, encoded, strict=True):
        ended = last and tokenizer.eot_id is not None
        lost.add(find_lost_text(tokenizer, text, tokens[:-1] if ended else tokens))
    return encoded, lost


def encode_pieces(tokenizer: Tokenizer, texts: list[tuple[str, bool, bool]]) -> list[Tokens]:
    """Encode each (text, begins a document, ends a document), with end-of-text at its end."""
    lead = lead_of(tokenizer)
    skipped = len(tokenizer.encode(lead))
    encoded = tokenizer.encode_batch([text if first else lead + text for text, first, _ in texts])
    for number, (_, first, _) in enumerate(texts):
        if not first:
            encoded[number] = encoded[number][skipped:]
    if tokenizer.eot_id is None:
        return encoded
    end = np.array([tokenizer.eot_id], token_dtype(tokenizer.vocab_size))
    each = zip(encoded, texts, strict=True)
    return [np.append(ids, end) if last else ids for ids, (_, _, last) in each]


@functools.cache
def cached_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in `folder`, once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    return load_tokenizer(folder)
