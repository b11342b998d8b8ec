"""Training straight from text: tokenized and packed on the fly, without shards.

The documents are divided into as many shares as the first launch has ranks, each read in the order
of the source, again and again. The position of a share is the document (or part of a long one) and
the token in it where its next sequence begins. Sequence g of the run comes from share g modulo the
number of shares and is trained on by rank g modulo the number of ranks, so that a run stops and
resumes exactly on any number of ranks; where that differs from the shares, several ranks read one.

Legend: B micro-batch, T block_size.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object

from accel_gpt.config.data import PrepareConfig, TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.console import write_err
from accel_gpt.data.corpus import (
    Corpus,
    EvalSplit,
    StateDict,
    document_end,
    eval_splits,
    model_vocabulary,
)
from accel_gpt.data.loader import Loader, Sequences
from accel_gpt.data.shards import Shard, Split, Tokens
from accel_gpt.data.sources import open_sources, val_names, val_paths
from accel_gpt.data.tokenizer import Tokenizer, named_tokenizer
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.launcher import is_main
from accel_gpt.text.documents import Piece, Position, split_pieces
from accel_gpt.text.files import describe_source, guess_source, select
from accel_gpt.text.hub import Bookmarks

MOST_CHARACTERS = 100_000_000  # read at most to gather what is evaluated; assumption


class TextPosition(NamedTuple):
    """Where the next sequence of a share begins."""

    epoch: int = 0
    piece: Position = (0, 0, 0)
    token: int = 0  # tokens of the piece that lie before it


@dataclass(frozen=True)
class Text:
    """A source of text and the tokenizer that it is read with."""

    config: PrepareConfig
    tokenizer: Tokenizer

    def digest(self, times: bool = True) -> str:
        """SHA-256 (hex) of where the text lies, not its whole content, and of the tokenizer.

        `times`: include when the files changed, which differs between copies.
        """
        config = self.config
        parts = [describe_source(config, times), config.text_field, config.val_fraction]
        return hashlib.sha256(repr([*parts, self.tokenizer.fingerprint]).encode()).hexdigest()

    def read(
        self,
        start: Position = (0, 0, 0),
        share: int = 0,
        shares: int = 1,
        bookmarks: Bookmarks | None = None,
    ) -> Iterator[Piece]:
        """The pieces of the documents of a share from `start` on."""
        cut = self.tokenizer.cuts_at_lines
        return split_pieces(self.config, cut, start, share, shares, bookmarks=bookmarks)

    def encode(self, piece: Piece) -> Tokens:
        """Tokens of a piece, end-of-text included where it ends a document."""
        return self.tokenizer.encode_pieces([(piece.text, piece.last)])[0]

    def first_tokens(self, name: str, count: int) -> Split:
        """The first `count` tokens of a split, in memory; fewer where `MOST_CHARACTERS` hold fewer.

        Raises `DataError` when these are fewer than two.
        """
        found: list[Tokens] = []
        held = read = 0
        for piece in self.read():
            read += len(piece.text)
            if piece.split == name:
                found.append(self.encode(piece))
                held += len(found[-1])
            if held >= count or read > MOST_CHARACTERS:
                break
        if held < 2:
            raise DataError(
                f"the first {read:,} characters of the streamed text hold no {name} text; set "
                "data.val to a prepared folder, or give more and smaller documents"
            )
        tokens, by = np.concatenate(found)[:count], self.tokenizer
        return Split(
            *(Path("streamed text"), name, (Shard("memory", len(tokens)),), tokens.dtype),
            *(by.vocab_size, by.eot_id, by.kind, by.fingerprint),
            fingerprint=self.digest(),
            memory=tokens,
        )

    def train_tokens(
        self, start: TextPosition, share: int, shares: int, bookmarks: Bookmarks
    ) -> Iterator[tuple[TextPosition, Tokens]]:
        """Tokens of each train piece of a share, epoch after epoch, with the position of the first.

        Raises `DataError` when there are none.
        """
        at, skip = start.piece, start.token
        for epoch in itertools.count(start.epoch):
            found = at != (0, 0, 0)
            for piece in self.read(at, share, shares, bookmarks):
                if piece.split == "train":
                    yield TextPosition(epoch, at, skip), self.encode(piece)[skip:]
                    found, skip = True, 0
                at = piece.after
            if not found:
                raise DataError("the streamed text holds no train document for this process")
            at = (0, 0, 0)


@dataclass(kw_only=True)
class TextCorpus(Corpus):
    """A corpus whose training sequences come from `text`."""

    text: Text
    positions: tuple[TextPosition, ...] = ()  # of each share; empty: the beginning
    bookmarks: dict[int, Bookmarks] = field(default_factory=dict)  # of shares, added to as it reads

    @property
    def fingerprint(self) -> str:
        """That of the text."""
        return self.text.digest()

    def identity(self) -> dict[str, str]:
        """As of other corpora; copies of the text on several machines are the same."""
        same = self.text.digest(times=False)
        return super().identity() | {"the fingerprint of the training data": same[:12]}

    def state_dict(self, loader: Loader | None = None) -> dict[str, Any]:
        """What a checkpoint keeps: with a `loader` the position of every rank; a collective."""
        state = super().state_dict()
        if loader is not None:
            places = gather_object([{s: self.place(s, at) for s, at in loader.position.items()}])
            merged = {share: place for rank in places for share, place in rank.items()}
            state["text_places"] = [merged[share] for share in sorted(merged)]
        return state

    def place(self, share: int, at: TextPosition) -> list[Any]:
        """What a checkpoint keeps of a share: its position, and the last bookmark before it."""
        known = dict(self.bookmarks[share])  # the loader's thread adds to them
        mark = max((row for row in known if row <= at.piece[1]), default=None)
        marks = [] if mark is None else [[mark, known[mark]]]
        return [at.epoch, list(at.piece), at.token, marks, self.text.digest(times=False)]

    def load_state_dict(self, state: StateDict) -> None:
        """Resume each share at its position; other text than before begins at its beginning.

        Raises `UserError` where only the times of change of the files differ.
        """
        super().load_state_dict(state)
        same = state["data_fingerprint"] == self.fingerprint
        untimed = [place[4] for place in state["text_places"] if len(place) > 4]
        require(
            same or self.text.digest(times=False) not in untimed,
            "data.train streams the text of the checkpoint, but only its modification time differs,"
            " and the run would start over; restore the time (touch -d), or set another out_dir",
        )
        saved = state["text_places"] if same else []
        self.positions = tuple(TextPosition(place[0], tuple(place[1]), place[2]) for place in saved)
        marks = [dict(place[3]) if len(place) > 3 else {} for place in saved]
        self.bookmarks = dict(enumerate(marks))

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """Micro-batches of one rank from `position` on."""
        starts = self.positions or (TextPosition(),) * plan.world_size
        sequences = rank_sequences(self.text, starts, self.bookmarks, plan, rank, position)
        return Loader(text_batches(sequences, plan.micro_batch_size), plan.micro_batch_size, device)

    def lines(self, plan: Plan) -> list[str]:
        """Where the text comes from."""
        path = self.text.config.dataset or self.text.config.path
        return [
            f"data     {path} in its own order, tokenized while training by "
            f"{self.tokenizer.kind} of {self.tokenizer.vocab_size:,}"
        ]


def open_text(config: Config) -> TextCorpus:
    """Open the text of `data.train` and gather what is evaluated.

    Raises `UserError` where the tokenizer or the number of tokens to evaluate is missing.
    """
    data, stream, tokens = config.data, config.data.train, config.eval.tokens
    assert isinstance(stream, TextStream)
    if data.tokenizer is None:
        raise UserError(
            "data.train streams text but data.tokenizer is not set; give gpt2, bytes or the path "
            "of a tokenizer.json"
        )
    if tokens is None:
        raise UserError(
            "eval.tokens is null, the whole split, but streamed text has no end; give a number"
        )
    tokenizer = named_tokenizer(data.tokenizer)
    settings = {k: v for k, v in asdict(stream).items() if k != "streaming"}
    source = "dataset" if stream.dataset else guess_source(str(stream.path))
    prepare = PrepareConfig(source=source, tokenizer=data.tokenizer, **settings)
    text = Text(prepare, tokenizer)
    if is_main() and not stream.dataset:
        for line in select(prepare).lines():
            write_err(line)
    val = open_sources(val_paths(data), "val", data, val_names(data))
    for one in val:
        names = f"data.val {one.path}", f"data.tokenizer {data.tokenizer}"
        one.tokenizer.require_same(tokenizer, *names)
    train = EvalSplit(None, 1.0, text.first_tokens("train", tokens + 1), tokens)
    held_out = eval_splits(val, tokens, named=bool(val_names(data)))
    if not val:
        held_out = (EvalSplit(None, 1.0, text.first_tokens("val", tokens + 1), tokens),)
    return TextCorpus(
        tokenizer=tokenizer,
        evaluated={"train": (train,), "val": held_out},
        vocab_size=model_vocabulary(config, tokenizer, "data.tokenizer"),
        document_end=document_end(data, tokenizer),
        text=text,
    )


def rank_sequences(
    text: Text,
    starts: tuple[TextPosition, ...],
    bookmarks: dict[int, Bookmarks],
    plan: Plan,
    rank: int,
    position: int,
) -> Iterator[tuple[Tokens, dict[int, TextPosition]]]:
    """Sequences (T + 1,) of one rank from number `position` of the run on, each with the positions
    of the shares that the rank reads: those from which some sequence of its own comes.

    `starts`: where each share begins.
    """
    world, shares = plan.world_size, len(starts)
    common = math.gcd(world, shares)
    at = {share: starts[share] for share in range(rank % common, shares, common)}
    readers = {}
    for share, start in at.items():
        pieces = text.train_tokens(start, share, shares, bookmarks.setdefault(share, {}))
        readers[share] = pack(pieces, plan.block_size + 1)
    for first in itertools.count(position, world):
        for number in range(first, first + world):  # one for each rank
            if (share := number % shares) in readers:
                tokens, at[share] = next(readers[share])
                if number % world == rank:
                    own = tokens
        yield own, dict(at)


def text_batches(
    sequences: Iterator[tuple[Tokens, dict[int, TextPosition]]], size: int
) -> Iterator[tuple[Sequences, dict[int, TextPosition]]]:
    """Micro-batches (B, T + 1), each with the positions after it."""
    while batch := list(itertools.islice(sequences, size)):
        yield np.stack([tokens for tokens, _ in batch]).astype(np.uint32), batch[-1][1]


def pack(
    pieces: Iterator[tuple[TextPosition, Tokens]], length: int
) -> Iterator[tuple[Tokens, TextPosition]]:
    """Sequences of `length` tokens, each beginning with the last token of the one before; with each
    the position where the next one begins.
    """
    held = np.empty(0, np.uint32)
    starts: list[tuple[int, TextPosition]] = []  # index in `held` at which each piece begins
    for position, tokens in pieces:
        starts.append((len(held), position))
        held = np.concatenate([held, tokens])
        while len(held) >= length:
            sequence, held = held[:length], held[length - 1 :]
            starts = [(index - length + 1, at) for index, at in starts]
            while len(starts) > 1 and starts[1][0] <= 0:
                del starts[0]
            index, first = starts[0]
            yield sequence, first._replace(token=first.token - index)
