"""Training straight from text: tokenized and packed on the fly, without shards.

Each rank reads its own share of the documents in the order of the source, again and again. Its
position is the document (or part of a long one) and the token in it where the next sequence begins,
so that a run stops and resumes exactly, on the same number of ranks.

Legend: B micro-batch, T block_size.
"""

import hashlib
import itertools
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
from accel_gpt.redact import redact
from accel_gpt.text.documents import Piece, Position, split_pieces
from accel_gpt.text.files import describe_source, guess_source
from accel_gpt.text.hub import Bookmarks

MOST_CHARACTERS = 100_000_000  # read at most to gather what is evaluated; assumption


class TextPosition(NamedTuple):
    """Where the next sequence of a rank begins."""

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
        rank: int = 0,
        world: int = 1,
        bookmarks: Bookmarks | None = None,
    ) -> Iterator[Piece]:
        """The pieces of the documents of a rank from `start` on."""
        cut = self.tokenizer.cuts_at_lines
        return split_pieces(self.config, cut, start, rank, world, bookmarks=bookmarks)

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
        self, start: TextPosition, rank: int, world: int, bookmarks: Bookmarks
    ) -> Iterator[tuple[TextPosition, Tokens]]:
        """Tokens of each train piece of a rank, epoch after epoch, with the position of the first.

        Raises `DataError` when there are none.
        """
        at, skip = start.piece, start.token
        for epoch in itertools.count(start.epoch):
            found = at != (0, 0, 0)
            for piece in self.read(at, rank, world, bookmarks):
                if piece.split == "train":
                    yield TextPosition(epoch, at, skip), self.encode(piece)[skip:]
                    found, skip = True, 0
                at = piece.after
            if not found:
                raise DataError("the streamed text holds no train document for this process")
            at = (0, 0, 0)


@dataclass(kw_only=True)
class TextCorpus(Corpus):
    """A corpus whose training sequences come from `text`, of which each rank has its own share."""

    text: Text
    positions: tuple[TextPosition, ...] = ()  # of each rank; empty: the beginning
    marks: tuple[Bookmarks, ...] = ()  # of each rank: the last one before its position, if any
    bookmarks: Bookmarks = field(default_factory=dict)  # of this rank, as it reads

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
            at = loader.position
            known = dict(self.bookmarks)  # the loader's thread adds to them
            mark = max((row for row in known if row <= at.piece[1]), default=None)
            last = [] if mark is None else [[mark, known[mark]]]
            state["text_places"] = gather_object([[at.epoch, list(at.piece), at.token, last]])
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Resume each rank at its position; other text than before begins at its beginning."""
        super().load_state_dict(state)
        same = state["data_fingerprint"] == self.fingerprint
        saved = state["text_places"] if same else []
        self.positions = tuple(TextPosition(place[0], tuple(place[1]), place[2]) for place in saved)
        self.marks = tuple(dict(place[3]) if len(place) > 3 else {} for place in saved)

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """Micro-batches of one rank from its position on.

        Raises `UserError` on another number of ranks, whose shares of the text differ.
        """
        require(
            len(self.positions) in (0, plan.world_size),
            f"the run streamed its text on {len(self.positions)} processes and cannot go on with "
            f"{plan.world_size}; use as many, or prepare the text once with accel-gpt prepare",
        )
        start = self.positions[rank] if self.positions else TextPosition()
        self.bookmarks = dict(self.marks[rank]) if self.positions else {}
        batches = text_batches(self.text, start, plan, rank, self.bookmarks)
        return Loader(batches, plan.micro_batch_size, device)

    def lines(self, plan: Plan) -> list[str]:
        """Where the text comes from."""
        path = self.text.config.dataset or self.text.config.path
        return [
            f"data     {redact(str(path))} in its own order, tokenized while training by "
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
    text = Text(PrepareConfig(source=source, tokenizer=data.tokenizer, **settings), tokenizer)
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


def text_batches(
    text: Text, start: TextPosition, plan: Plan, rank: int, bookmarks: Bookmarks
) -> Iterator[tuple[Sequences, TextPosition]]:
    """Micro-batches (B, T + 1) of one rank from `start` on, each with the position after it."""
    pieces = text.train_tokens(start, rank, plan.world_size, bookmarks)
    sequences = pack(pieces, plan.block_size + 1)
    while batch := list(itertools.islice(sequences, plan.micro_batch_size)):
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
