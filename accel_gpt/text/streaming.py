"""Training straight from text: tokenized and packed on the fly, without shards.

Each process reads its own share of the documents in the order of the source, again and again. Its
place is the document (or part of a long one) and the token in it where the next window begins, so
that a run stops and continues exactly, on the same number of processes.

Legend: B micro-batch, T block_size.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import Rows
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError
from accel_gpt.text.documents import Piece, Position, describe_source, split_pieces

LOOK = 100_000_000  # characters read at most to gather what is evaluated; assumption


@dataclass(frozen=True)
class Place:
    """Where the next window of a process begins."""

    epoch: int = 0
    position: Position = (0, 0, 0)
    token: int = 0  # tokens of the piece at `position` that lie before it


@dataclass(frozen=True)
class Text:
    """A source of text and the tokenizer that it is read with."""

    config: PrepareConfig
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the source, not of its whole content, what is read of it, and the
        tokenizer.
        """
        return self.digest(times=True)

    def digest(self, times: bool) -> str:
        """`fingerprint`, with or without the `times` at which files changed, which copies lose."""
        config = self.config
        told = [describe_source(config, times), config.text_field, config.val_fraction]
        return hashlib.sha256(repr([*told, self.tokenizer.fingerprint]).encode()).hexdigest()

    def pieces(
        self, start: Position = (0, 0, 0), rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Position, Piece]]:
        """Each piece from `start` on, with the position before it."""
        for piece in split_pieces(self.config, self.tokenizer.cuts_at_lines, start, rank, world):
            yield start, piece
            start = piece.after

    def encode(self, piece: Piece) -> Tokens:
        """Tokens of a piece, end-of-text included where it ends a document."""
        tokens = self.tokenizer.encode_batch([piece.text])[0]
        if piece.last and self.tokenizer.eot_id is not None:
            tokens = np.append(tokens, tokens.dtype.type(self.tokenizer.eot_id))
        return tokens

    def first_tokens(self, split: str, count: int) -> Tokens:
        """The first `count` tokens of a split, or as many as the first `LOOK` characters hold.

        Raises `DataError` when these are fewer than two.
        """
        found: list[Tokens] = []
        held = looked = 0
        for _, piece in self.pieces():
            looked += len(piece.text)
            if piece.split == split:
                found.append(self.encode(piece))
                held += len(found[-1])
            if held >= count or looked > LOOK:
                break
        if held < 2:
            raise DataError(
                f"the first {looked:,} characters of the streamed text hold no {split} text; set "
                "data.val to a prepared folder, or give more and smaller documents"
            )
        return np.concatenate(found)[:count]


def text_windows(
    text: Text, place: Place, length: int, rank: int, world: int
) -> Iterator[tuple[Tokens, Place]]:
    """Endless windows of `length` tokens, each beginning with the last token of the one before;
    with each the place where the next one begins.
    """
    held: deque[tuple[Place, Tokens]] = deque()
    count, skip, epoch, start = 0, place.token, place.epoch, place.position
    while True:
        found = False
        for before, piece in text.pieces(start, rank, world):
            if piece.split != "train":
                continue
            found = True
            tokens = text.encode(piece)[skip:]
            held.append((Place(epoch, before, skip), tokens))
            count, skip = count + len(tokens), 0
            while count >= length:
                yield take(held, length)
                count -= length - 1
        if not found and start == (0, 0, 0):
            raise DataError("the streamed text holds no train document for this process")
        epoch, start = epoch + 1, (0, 0, 0)


def take(held: deque[tuple[Place, Tokens]], length: int) -> tuple[Tokens, Place]:
    """The first `length` of the tokens held, all but the last of which are used up."""
    window: list[Tokens] = []
    missing = length
    while missing > len(held[0][1]):
        _, tokens = held.popleft()
        window.append(tokens)
        missing -= len(tokens)
    place, tokens = held[0]
    window.append(tokens[:missing])
    used = missing - 1
    held[0] = (Place(place.epoch, place.position, place.token + used), tokens[used:])
    return np.concatenate(window), held[0][0]


def read_text(text: Text, place: Place, plan: Plan, rank: int) -> Iterator[tuple[Rows, Place]]:
    """Rows (B, T + 1) of one process from `place` on, with the place after them."""
    rows = np.empty((plan.micro_batch_size, plan.block_size + 1), np.uint32)
    filled = 0
    for window, after in text_windows(text, place, rows.shape[1], rank, plan.world_size):
        rows[filled] = window
        filled += 1
        if filled == len(rows):
            yield rows.copy(), after
            filled = 0
