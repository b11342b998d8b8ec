"""Tokenize pieces of text on all cores, in order, with few batches in flight.

The libraries release the interpreter while they tokenize, so threads suffice.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel_gpt.data.shards import Tokens, token_dtype
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.prepare.counts import Counts
from accel_gpt.prepare.documents import BATCH_CHARACTERS, SPLITS, Piece, Position
from accel_gpt.prepare.shards import Group

# Overhead of a piece, in characters. Assumption: with it, a batch of one-letter documents holds
# 10,000 pieces instead of a million.
PIECE_OVERHEAD = 100


class Batch(NamedTuple):
    """Pieces of text after their tokenization."""

    groups: dict[str, Group]
    """By split."""
    counts: Counts
    hashes: bytes
    """Of the documents that begin in this batch."""
    after: Position


class Encoder:
    """Tokenizes batches of pieces with the tokenizer in `folder`; several threads may call it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        self.lock = threading.Lock()  # reading special tokens changes a tokenizer's state
        self.dtype = token_dtype(tokenizer.vocab_size)
        ends = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
        self.end = np.array(ends, self.dtype)

    @cached_property
    def prompt_tokenizer(self) -> Tokenizer:
        """Another tokenizer, for text that spells special tokens."""
        return load_tokenizer(self.folder)

    def encode(self, pieces: Sequence[Piece]) -> Batch:
        """Tokenize the pieces of a batch and count what they hold."""
        counts = Counts()
        hashes = b"".join(counts.begin(piece) for piece in pieces if piece.first)
        groups = {}
        for split in SPLITS:
            kept = [piece for piece in pieces if piece.text and piece.split == split]
            groups[split] = self.encode_group(kept, counts)
        return Batch(groups, counts, hashes, pieces[-1].after)

    def encode_group(self, pieces: Sequence[Piece], counts: Counts) -> Group:
        """Tokenize the pieces of one split."""
        plain = [piece.text for piece in pieces if not piece.is_chat]
        encoded = iter(self.tokenizer.encode_batch(plain))
        parts: list[Tokens] = [self.end[:0]]
        sizes: list[int] = []
        documents: list[int] = []
        for piece in pieces:
            inner = 0  # ends of a document inside a chat
            if piece.is_chat:
                with self.lock:
                    ids = np.array(self.prompt_tokenizer.encode_prompt(piece.text), self.dtype)
                inner = int((ids == self.tokenizer.eot_id).sum())
            else:
                ids = next(encoded)
                counts.ends += piece.text.count(self.tokenizer.eot)
            counts.add_tokens(self.tokenizer, piece.text, ids)
            parts.append(ids)
            size = len(ids)
            if piece.last:
                parts.append(self.end)
                size += len(self.end)
            sizes.append(size)
            documents.append(piece.first + inner)
        utf8_bytes = [
            len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            for piece in pieces
        ]
        return Group(np.concatenate(parts), sizes, documents, utf8_bytes)


def encode_all(
    pieces: Iterable[Piece], encoder: Encoder, threads: int
) -> Generator[Batch, None, None]:
    """Tokenize pieces in order, with two batches per thread in flight."""
    waiting: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for batch in batches(pieces):
            waiting.append(pool.submit(encoder.encode, batch))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


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
