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
from accel_gpt.prepare.pieces import lead_of
from accel_gpt.prepare.text_files import is_page

# Overhead of a piece, in characters. Assumption: with it, a batch of one-letter documents holds
# 10,000 pieces instead of a million.
PIECE_OVERHEAD = 100


class Group(NamedTuple):
    """The tokens of the pieces of one split, in order, with end-of-text after each document."""

    tokens: Tokens
    sizes: list[int]
    """Tokens of each piece."""
    documents: list[int]
    """Documents that count for each piece."""
    utf8_bytes: list[int]
    """Bytes of the text of each piece."""


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.lead = lead_of(self.tokenizer)
        self.lock = threading.Lock()  # reading special tokens changes a tokenizer's state
        dtype = token_dtype(self.tokenizer.vocab_size)
        ends = [] if self.tokenizer.eot_id is None else [self.tokenizer.eot_id]
        self.end = np.array(ends, dtype)

    @cached_property
    def prompt_tokenizer(self) -> Tokenizer:
        """Another tokenizer, for text that spells special tokens."""
        return load_tokenizer(self.folder)

    def encode(self, pieces: Sequence[Piece]) -> Batch:
        """Tokenize the pieces of a batch and count what they hold."""
        counts = Counts()
        hashes = bytearray()
        by_split: dict[str, list[Piece]] = {split: [] for split in SPLITS}
        for piece in pieces:
            count_piece(piece, counts)
            if piece.first:
                hashes += piece.document.key if piece.text else b""
            if piece.text:
                by_split[piece.document.split].append(piece)
        groups = {split: self.encode_group(found, counts) for split, found in by_split.items()}
        return Batch(groups, counts, bytes(hashes), pieces[-1].after)

    def encode_group(self, pieces: Sequence[Piece], counts: Counts) -> Group:
        """Tokenize the pieces of one split."""
        plain = [(one.text, one.first) for one in pieces if not one.document.is_chat]
        encoded = iter(encode_parts(self.tokenizer, self.lead, plain))
        parts: list[Tokens] = []
        sizes: list[int] = []
        documents: list[int] = []
        for piece in pieces:
            inner = 0
            if piece.document.is_chat:
                ids = self.encode_chat(piece.text)
                inner = int((ids == self.tokenizer.eot_id).sum())
            else:
                ids = next(encoded)
                counts.ends += piece.text.count(self.tokenizer.eot)
            counts.add_tokens(self.tokenizer, piece.text, ids)
            parts.append(ids)
            if piece.last:
                parts.append(self.end)
            sizes.append(len(ids) + piece.last * len(self.end))
            documents.append(piece.first + inner)
        utf8_bytes = [
            len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            for piece in pieces
        ]
        tokens = np.concatenate(parts) if parts else self.end[:0]
        return Group(tokens, sizes, documents, utf8_bytes)

    def encode_chat(self, text: str) -> Tokens:
        """Tokenize a chat, whose text spells special tokens."""
        with self.lock:
            ids = self.prompt_tokenizer.encode_prompt(text)
        return np.array(ids, token_dtype(self.tokenizer.vocab_size))


def encode_parts(
    tokenizer: Tokenizer, lead: str, parts: Sequence[tuple[str, bool]]
) -> list[Tokens]:
    """Encode each (text, begins a document); `lead` is before one that does not, see `lead_of`."""
    skipped = len(tokenizer.encode(lead))
    encoded = tokenizer.encode_batch([text if first else lead + text for text, first in parts])
    each = zip(encoded, parts, strict=True)
    return [ids if first else ids[skipped:] for ids, (_, first) in each]


def count_piece(piece: Piece, counts: Counts) -> None:
    """Count a piece as a document, a page or a row without text."""
    document = piece.document
    if not piece.first:
        return
    if document.detected is not None:
        counts.encodings.setdefault(document.detected.encoding, []).append(
            document.detected.path.name
        )
    if piece.text:
        counts.documents += 1
        counts.pages += is_page(piece.text)
    elif document.key:
        counts.empty += 1


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
