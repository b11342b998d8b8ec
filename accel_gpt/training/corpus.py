"""The text of a run: what is trained on, what is evaluated, where a continued run takes it up."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_gpt.config.data import DataConfig, TextStream, Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain
from accel_gpt.config.plan import Plan
from accel_gpt.data.folders import open_place
from accel_gpt.data.loader import Loader, read_windows
from accel_gpt.data.mixture import Mixture, Pattern
from accel_gpt.data.order import Order
from accel_gpt.data.remote.stores import shown_place
from accel_gpt.data.shards import Split, resident
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.training.accelerator import code_versions
from accel_gpt.training.state import TrainState


@dataclass(frozen=True)
class Part:
    """One source of what is evaluated."""

    name: str | None  # None: the only one
    share: float  # of the mean
    split: Split
    tokens: int | None  # that are evaluated, the same ones every time; None: all


@dataclass(frozen=True)
class Corpus(ABC):
    """Tokenized text, its tokenizer and what is evaluated."""

    tokenizer: Tokenizer
    evaluated: Mapping[str, tuple[Part, ...]]  # of the splits train and val
    vocab_size: int  # of the model: the tokenizer's, or more
    document_end: int | None  # the token that ends a document, where data.document_mask asks for it

    def new_state(self, config: Config, world_size: int) -> TrainState:
        """The state of a run that has not begun."""
        state = TrainState(
            world_size=world_size,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            config=to_flat(to_plain(config)),
            versions=code_versions(),
        )
        self.describe(state)
        return state

    def identity(self) -> dict[str, str]:
        """Fingerprints of what is trained on and evaluated, the same on all ranks."""
        state = TrainState()
        self.describe(state)
        val = [part.split.fingerprint[:12] for part in self.evaluated["val"]]
        return {
            "the fingerprint of the training data": state.data_fingerprint[:12],
            "that of the validation data": ", ".join(val),
            "that of the tokenizer": self.tokenizer.fingerprint[:12],
        }

    @abstractmethod
    def describe(self, state: TrainState) -> None:
        """Note in `state` what is trained on, and from where."""

    @abstractmethod
    def continued(self, state: TrainState) -> "Corpus":
        """The corpus where a run of `state` takes it up, noted in `state`."""

    @abstractmethod
    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """The micro-batches of process `rank` from `position`, a number of windows."""

    @abstractmethod
    def lines(self, plan: Plan) -> list[str]:
        """What is trained on, for the first lines of a run."""

    def unknown_bytes(self) -> list[str]:
        """A line where bits per byte cannot be computed, for the first lines of a run."""
        held = [part.split for parts in self.evaluated.values() for part in parts]
        without = [s for s in held if np.isnan(self.tokenizer.bytes_within(s)).any()]
        return [
            f"data     no bits per byte of the {split.name} split: the tokenizer changes text, or "
            f"lacks characters, and {split.folder} does not say how many bytes its text had"
            for split in without
        ]

    @abstractmethod
    def note_place(self, state: TrainState, loader: Loader) -> None:
        """Note in `state` where reading goes on; a collective."""

    @abstractmethod
    def epoch_figures(self, sequences: int) -> dict[str, float]:
        """How often the data was read through after so many windows, where that is known."""


@dataclass(frozen=True)
class ShardCorpus(Corpus):
    """A corpus of prepared shards, of one source or several."""

    train: Mixture

    def describe(self, state: TrainState) -> None:
        """Note in `state` what is trained on, and from where."""
        train = self.train
        state.data_fingerprint = train.fingerprint
        each = zip(train.names, train.pattern.weights, train.splits, strict=True)
        state.data_sources = [
            {"name": name, "weight": weight, "fingerprint": split.fingerprint}
            for name, weight, split in each
        ]

    def continued(self, state: TrainState) -> "ShardCorpus":
        """The corpus where a run of `state` takes it up, noted in `state`.

        Other sources or weights than before begin a new pattern at this sequence, in which each
        source goes on after the windows that it has given.
        """
        if state.data_fingerprint != self.train.fingerprint:
            settle(state)
        given = tuple(state.data_given.get(split.fingerprint, 0) for split in self.train.splits)
        train = replace(self.train, origin=state.data_origin, consumed=given)
        self.describe(state)
        return replace(self, train=train)

    def note_place(self, state: TrainState, loader: Loader) -> None:
        """Nothing to note: the number of windows tells the place."""

    def epoch_figures(self, sequences: int) -> dict[str, float]:
        """How often the data was read through after so many sequences; of several sources each."""
        epochs = self.train.epochs(sequences)
        if len(epochs) == 1:
            return {"data/epochs": next(iter(epochs.values()))}
        return {f"data/epochs/{name}": turns for name, turns in epochs.items()}

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """The micro-batches of process `rank` from `position`, a number of windows."""
        rows = read_windows(self.train, plan, self.vocab_size, rank, position)
        return Loader(rows, plan.micro_batch_size, device)

    def lines(self, plan: Plan) -> list[str]:
        """Sources, tokens and epochs of the whole run, for its first lines."""
        train, tokenizer = self.train, self.tokenizer
        val = sum(part.split.tokens for part in self.evaluated["val"])
        epochs = train.epochs(plan.max_steps * plan.sequences_per_step)
        each = zip(train.splits, train.pattern.weights, epochs.values(), strict=True)
        lines = [
            f"data     {split.folder}: {split.tokens:,} train tokens"
            + (f", weight {weight:g}" if len(train.splits) > 1 else "")
            + f"; {turns:.2f} epochs"
            for split, weight, turns in each
        ]
        lines[-1] += f"; {val:,} val tokens, tokenizer {tokenizer.kind} of {tokenizer.vocab_size:,}"
        return lines


def open_shards(config: Config) -> ShardCorpus:
    """Open `data.train` and `data.val`; `DataError` where they do not fit each other."""
    data, block_size = config.data, config.model.block_size
    by_content = [(open_place(s.path, "train", data), s) for s in sources_of(data)]
    by_content.sort(key=lambda pair: pair[0][0].fingerprint)  # however they were listed
    opened, sources = [pair[0] for pair in by_content], [pair[1] for pair in by_content]
    tokenizer = same_tokenizer(sources, opened)
    splits = tuple(split for split, _ in opened)
    prints = [split.fingerprint for split in splits]
    for number, source in enumerate(sources):
        require(
            prints.index(prints[number]) == number,
            f"data.train has the tokens of {source.path} twice; give them once, with their weight",
        )
    orders = tuple(
        Order(split.lengths, block_size, data.shuffle, config.seed, split.fingerprint)
        for split in splits
    )
    pattern = Pattern(tuple(source.weight for source in sources))
    train = Mixture(names_of(sources), splits, orders, pattern)
    held = val_sources(data) or sources
    known = {source.path: tokenizer for source, (_, tokenizer) in zip(sources, opened, strict=True)}
    opened_val = [open_place(s.path, "val", data, known.get(s.path)) for s in held]
    check_cache(splits, data)
    same_tokenizer([*sources, *held], [*opened, *opened_val])
    budget = config.eval.tokens
    val = [split for split, _ in opened_val]
    evaluated = {
        "train": parts(sources, list(splits), budget),
        "val": parts(held, val, budget, val_names(data)),
    }
    vocab_size = model_vocabulary(config, tokenizer, sources[0].path)
    return ShardCorpus(tokenizer, evaluated, vocab_size, document_end(data, tokenizer), train)


def model_vocabulary(config: Config, tokenizer: Tokenizer, where: str) -> int:
    """The vocabulary of the model.

    Raises `UserError` where the config asks for fewer tokens than the tokenizer of `where` has.
    """
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size is {vocab_size:,} but the tokenizer of {where} has "
            f"{tokenizer.vocab_size:,} tokens; leave model.vocab_size unset or raise it"
        )
    return vocab_size


def sources_of(data: DataConfig) -> list[Weighted]:
    """The folders of `data.train`, one or several."""
    require(
        bool(data.train), "data.train is empty; name the folder of token shards, or one to prepare"
    )
    assert not isinstance(data.train, TextStream)
    return [Weighted(data.train)] if isinstance(data.train, str) else list(data.train)


def names_of(sources: list[Weighted]) -> tuple[str, ...]:
    """The last part of each path where that tells them apart, else the whole; of a URL without
    user, password and query.
    """
    paths = tuple(shown_place(source.path) for source in sources)
    names = tuple(Path(path).name for path in paths)
    return names if len(set(names)) == len(names) else paths


def same_tokenizer(sources: list[Weighted], opened: list[tuple[Split, Tokenizer]]) -> Tokenizer:
    """The tokenizer of all sources; `DataError` where they differ."""
    first = opened[0][1]
    for source, (split, tokenizer) in zip(sources, opened, strict=True):
        if tokenizer.fingerprint != first.fingerprint:
            raise DataError(
                f"the {split.name} shards of {source.path} were made with another tokenizer "
                f"({tokenizer.kind}, {tokenizer.fingerprint[:12]}) than those of "
                f"{sources[0].path} ({first.kind}, {first.fingerprint[:12]}); prepare them again"
            )
    return first


def check_cache(splits: tuple[Split, ...], data: DataConfig) -> None:
    """`UserError` where a shuffle over all shards cannot be served from the cache."""
    remote = [split for split in splits if split.store is not None]
    need = sum(split.tokens * split.dtype.itemsize for split in remote) / 1e9
    if data.shuffle in ("global", "replacement"):
        require(
            need <= data.cache_gb,
            f"data.shuffle is {data.shuffle}, which reads all {need:.1f} GB of the remote shards "
            f"at random, more than data.cache_gb {data.cache_gb:g}; set data.shuffle to shards or "
            "raise it",
        )


def val_sources(data: DataConfig) -> list[Weighted]:
    """The folders of `data.val`, each of which counts alike; none: those of `data.train`."""
    if data.val is None or isinstance(data.val, str):
        return [Weighted(data.val)] if data.val else []
    return [Weighted(path) for path in data.val.values()]


def val_names(data: DataConfig) -> tuple[str, ...]:
    """The names that `data.val` gives to its folders."""
    return tuple(data.val) if isinstance(data.val, Mapping) else ()


def parts(
    sources: list[Weighted],
    splits: list[Split],
    tokens: int | None,
    given: tuple[str, ...] = (),
) -> tuple[Part, ...]:
    """What is evaluated: of each source its share of `tokens`, or all where names are `given`.

    Of one that is fetched these are its first tokens. Raises `UserError` for the whole of it.
    """
    total = sum(source.weight for source in sources)
    names = given or (names_of(sources) if len(sources) != 1 else (None,))
    found = []
    for name, source, split in zip(names, sources, splits, strict=True):
        share = source.weight / total
        budget = None if tokens is None else max(1, round(tokens * (1 if given else share)))
        if split.store is not None:
            if budget is None:
                raise UserError(
                    f"eval.tokens is null, the whole split, but {source.path} is remote; give a "
                    "number"
                )
            split = resident(split, budget)
        found.append(Part(name, share, split, budget))
    return tuple(found)


def document_end(data: DataConfig, tokenizer: Tokenizer) -> int | None:
    """The token at which attention ends; `UserError` where the tokenizer has none."""
    require(
        not data.document_mask or tokenizer.eot_id is not None,
        f"data.document_mask is true but the {tokenizer.kind} tokenizer has no end-of-text token; "
        "prepare the data with bytes, bpe or gpt2",
    )
    return tokenizer.eot_id if data.document_mask else None


def settle(state: TrainState) -> None:
    """Count in `state.data_given` what its sources have given up to now."""
    sources = sources_before(state)
    counts = Pattern(tuple(s["weight"] for s in sources)).counts(
        state.sequences - state.data_origin
    )
    for source, count in zip(sources, counts, strict=True):
        given = state.data_given.get(source["fingerprint"], 0)
        state.data_given[source["fingerprint"]] = given + count
    state.data_origin = state.sequences


def sources_before(state: TrainState) -> list[dict[str, Any]]:
    """The sources of a state; one that names none had one."""
    one = {"name": "data", "weight": 1.0, "fingerprint": state.data_fingerprint}
    return state.data_sources or [one]


def source_changes(before: TrainState, now: TrainState) -> dict[str, tuple[Any, Any]]:
    """What differs between the sources of two states: key -> (before, now)."""
    if before.data_fingerprint == now.data_fingerprint:
        return {}
    states = (before, now)
    if all(len(sources_before(state)) == 1 for state in states):
        return {"data.train": (before.data_fingerprint[:12], now.data_fingerprint[:12])}
    found = [{s["fingerprint"]: s for s in sources_before(state)} for state in states]
    changes = {}
    for fingerprint in {**found[0], **found[1]}:
        pair = [sources.get(fingerprint) for sources in found]
        spoken = [f"weight {s['weight']:g}" if s else "absent" for s in pair]
        if spoken[0] != spoken[1]:
            name = next(s["name"] for s in reversed(pair) if s)
            changes[f"data.train[{name}]"] = (spoken[0], spoken[1])
    return changes
