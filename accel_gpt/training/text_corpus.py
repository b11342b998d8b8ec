"""The corpus of a run that tokenizes its text while it trains."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from accel_gpt.config.data import DataConfig, PrepareConfig, TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.folders import open_place
from accel_gpt.data.foreign import known_tokenizer
from accel_gpt.data.loader import Loader
from accel_gpt.data.shards import Shard, Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, require
from accel_gpt.redact import without_secrets
from accel_gpt.text.documents import guess_source
from accel_gpt.text.streaming import Place, Text, read_text
from accel_gpt.training.corpus import (
    Corpus,
    Part,
    document_end,
    model_vocabulary,
    open_shards,
    parts,
    settle,
    val_names,
    val_sources,
)
from accel_gpt.training.state import TrainState


@dataclass(frozen=True)
class TextCorpus(Corpus):
    """A corpus whose training windows come from `text`; each process has a place in it."""

    text: Text
    places: tuple[Place, ...] = ()  # of each process; empty: the beginning

    def identity(self) -> dict[str, str]:
        """As of other corpora; copies of the text on several machines are the same."""
        same = self.text.digest(times=False)
        return super().identity() | {"the fingerprint of the training data": same[:12]}

    def describe(self, state: TrainState) -> None:
        """Note in `state` what is trained on."""
        state.data_fingerprint, state.data_sources = self.text.fingerprint, []

    def continued(self, state: TrainState) -> "TextCorpus":
        """The corpus where a run of `state` takes it up.

        Raises `UserError` on another number of processes, whose shares of the text are others.
        """
        if state.data_fingerprint != self.text.fingerprint:  # begins at its beginning
            settle(state)
            state.text_places = []
        self.describe(state)
        places = [Place(epoch, tuple(position), n) for epoch, position, n in state.text_places]
        require(
            len(places) in (0, state.world_size),
            f"the run streamed its text on {len(places)} processes and cannot go on with "
            f"{state.world_size}; use as many, or prepare the text once with accel-gpt prepare",
        )
        return replace(self, places=tuple(places))

    def note_place(self, state: TrainState, loader: Loader) -> None:
        """Note in `state` the place of every process; a collective."""
        place = loader.place
        state.text_places = gather_object([[place.epoch, list(place.position), place.token]])

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """The micro-batches of process `rank` from its place on."""
        place = self.places[rank] if self.places else Place()
        return Loader(read_text(self.text, place, plan, rank), plan.micro_batch_size, device)

    def epoch_figures(self, sequences: int) -> dict[str, float]:
        """Not known: nobody has counted the text."""
        return {}

    def lines(self, plan: Plan) -> list[str]:
        """Where the text comes from."""
        where = self.text.config.dataset or self.text.config.path
        return [
            f"data     {without_secrets(str(where))} in its own order, tokenized while training by "
            f"{self.tokenizer.kind} of {self.tokenizer.vocab_size:,}"
        ]


def open_corpus(config: Config) -> Corpus:
    """The corpus that `data.train` names: prepared shards, or text that is tokenized on the way."""
    return open_text(config) if isinstance(config.data.train, TextStream) else open_shards(config)


def open_text(config: Config) -> TextCorpus:
    """Open the text of `data.train` and gather what is evaluated.

    Raises `UserError` where the tokenizer or the budget of the evaluation is not given.
    """
    data, stream = config.data, config.data.train
    assert isinstance(stream, TextStream)
    require(
        data.tokenizer is not None,
        "data.train streams text but data.tokenizer is not set; give gpt2, bytes or the path of a "
        "tokenizer.json",
    )
    assert data.tokenizer is not None
    require(
        config.eval.tokens is not None,
        "eval.tokens is null, the whole split, but streamed text has no end; give a number",
    )
    budget = int(config.eval.tokens or 0) + 1
    tokenizer = known_tokenizer(data.tokenizer)
    settings = {k: v for k, v in asdict(stream).items() if k != "streaming"}
    source = "dataset" if stream.dataset else guess_source(str(stream.path))
    text = Text(PrepareConfig(source=source, tokenizer=data.tokenizer, **settings), tokenizer)
    held = val_sources(data)
    val = [open_held_out(source.path, data, tokenizer) for source in held]
    evaluated = {
        "train": (Part(None, 1.0, in_memory(text, "train", budget), config.eval.tokens),),
        "val": parts(held, val, config.eval.tokens, val_names(data))
        or (Part(None, 1.0, in_memory(text, "val", budget), config.eval.tokens),),
    }
    vocab_size = model_vocabulary(config, tokenizer, "data.tokenizer")
    return TextCorpus(tokenizer, evaluated, vocab_size, document_end(data, tokenizer), text)


def open_held_out(place: str, data: DataConfig, tokenizer: Tokenizer) -> Split:
    """The val split of a folder; `DataError` where it has another tokenizer."""
    split, other = open_place(place, "val", data)
    if other.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"data.val {place} has another tokenizer ({other.kind}) than data.tokenizer "
            f"{data.tokenizer}; prepare it again with that one"
        )
    return split


def in_memory(text: Text, name: str, count: int) -> Split:
    """The first tokens of a split as one shard in memory."""
    tokens: Tokens = text.first_tokens(name, count)
    tokenizer = text.tokenizer
    return Split(
        *(Path("streamed text"), name, (Shard("memory", len(tokens)),), tokens.dtype),
        *(tokenizer.vocab_size, tokenizer.eot_id, tokenizer.kind, tokenizer.fingerprint),
        fingerprint=text.fingerprint,
        lengths=np.array([len(tokens)]),
        memory=tokens,
    )
