"""The data of a run: what it trains on, what it evaluates, and where a resumed run continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from accel_gpt.config.data import DataConfig, Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import Loader, read_sequences
from accel_gpt.data.mixture import Mixture, Pattern
from accel_gpt.data.shards import Split, resident
from accel_gpt.data.sources import (
    Source,
    TrainedSource,
    open_sources,
    train_paths,
    trained_sources,
    val_names,
    val_paths,
)
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class EvalSplit:
    """One source of what is evaluated."""

    name: str | None  # None: the only one
    share: float  # of the mean
    split: Split
    tokens: int | None  # evaluated, the same ones every time; None: all

    @property
    def evaluated_tokens(self) -> int:
        """Return the number of tokens that an evaluation reads."""
        whole = self.split.tokens
        return whole if self.tokens is None else min(whole, self.tokens)


@dataclass(kw_only=True)
class Corpus:
    """Token shards of one source or several, what is evaluated of them, and their tokenizer."""

    train: Mixture
    tokenizer: Tokenizer
    evaluated: Mapping[str, tuple[EvalSplit, ...]]  # of the splits train and val
    vocab_size: int  # of the model: the tokenizer's, or more
    document_end: int | None  # the token at which attention ends; None: no data.document_mask
    commits: Mapping[str, str]  # URL in a repository of the Hub -> commit

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what is trained on: the sources and their shares."""
        return self.train.fingerprint

    def identity(self) -> dict[str, str]:
        """Fingerprints of what is trained on and evaluated, the same on all ranks."""
        val = [part.split.fingerprint[:12] for part in self.evaluated["val"]]
        return {
            "the fingerprint of the training data": self.fingerprint[:12],
            "that of the validation data": ", ".join(val),
            "that of the tokenizer": self.tokenizer.fingerprint[:12],
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data, by the names of `TrainState`.

        The position is not among it: `TrainState.sequences` counts the sequences of the run.
        """
        return {
            "data_fingerprint": self.fingerprint,
            "data_sources": [
                TrainedSource(source.name, source.weight, source.split.fingerprint)
                for source in self.train.sources
            ],
            "data_origin": self.train.origin,
            "data_given": dict(self.train.given),
            "data_commits": dict(self.commits),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from the fields of a `TrainState`.

        Other sources or weights than before begin a new pattern at this sequence, in which each
        source continues after the sequences that it has given.
        """
        if state["data_fingerprint"] == self.fingerprint:
            origin = state["data_origin"]
            given = state["data_given"]
        else:
            origin = state["sequences"]
            given = sequences_given(state)
        self.train = replace(self.train, origin=origin, given=given)

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """Micro-batches of one rank, from sequence `position` of the run on."""
        chunks = read_sequences(
            mixture=self.train,
            plan=plan,
            vocab_size=self.vocab_size,
            rank=rank,
            position=position,
        )
        return Loader(chunks, plan.micro_batch_size, device)

    def evaluated_splits(self) -> list[Split]:
        """Return what is evaluated, of the splits train and val."""
        return [part.split for parts in self.evaluated.values() for part in parts]

    def splits(self) -> list[Split]:
        """Return what is evaluated and trained on."""
        return self.evaluated_splits() + [source.split for source in self.train.sources]

    @property
    def evaluated_tokens(self) -> int:
        """Return the number of tokens that each evaluation reads, of all splits."""
        parts = [part for parts in self.evaluated.values() for part in parts]
        return sum(part.evaluated_tokens for part in parts)

    def epoch_metrics(self, sequences: int) -> dict[str, float]:
        """Return the epochs read after so many sequences of the run, for each source."""
        epochs = self.train.epochs(sequences)
        if len(epochs) == 1:
            return {"data/epochs": epochs[0]}
        each = zip(self.train.sources, epochs, strict=True)
        return {f"data/epochs/{source.name}": count for source, count in each}

    def lines(self, plan: Plan) -> list[str]:
        """Describe sources, tokens and epochs of the whole run, for its first lines."""
        epochs = self.train.epochs(plan.max_steps * plan.sequences_per_step)
        lines = []
        for source, count in zip(self.train.sources, epochs, strict=True):
            weight = f", weight {source.weight:g}" if len(epochs) > 1 else ""
            remote = source.split.remote
            where = remote.description if remote else source.split.folder
            lines.append(
                f"data     {where}: {source.split.tokens:,} train tokens{weight}; "
                f"this run reads {count:.2f} epochs of them"
            )
        val_tokens = sum(part.split.tokens for part in self.evaluated["val"])
        lines[-1] += (
            f"; {val_tokens:,} val tokens, tokenizer {self.tokenizer.kind} of "
            f"{self.tokenizer.vocab_size:,}"
        )
        grouped = replace(self.train, shuffle="groups")
        shards, gb = self.train.remote_reads(plan.sequences_per_step)
        grouped_shards, grouped_gb = grouped.remote_reads(plan.sequences_per_step)
        if grouped_shards < shards:
            lines.append(
                f"data     the first step needs {shards:,} remote shards, {gb:,.1f} GB, as "
                f"data.shuffle is {self.train.shuffle}; with groups it needs {grouped_shards:,}, "
                f"{grouped_gb:,.1f} GB"
            )
        return lines

    def lines_on_bytes(self) -> list[str]:
        """Return a line for each split whose bits per byte cannot be computed."""
        return [
            f"data     no bits per byte of the {split.name} split: the tokenizer changes text, or "
            f"lacks characters, and {split.folder} does not say how many bytes its text had"
            for split in self.evaluated_splits()
            if np.isnan(self.tokenizer.bytes_within(split)).any()
        ]


# --------------------------------------------------------------------------- opening


def open_corpus(config: Config) -> Corpus:
    """Open `data.train` and `data.val`; `DataError` where they do not fit each other."""
    data = config.data
    sources = open_sources(train_paths(data), "train", data)
    sources.sort(key=lambda source: source.split.fingerprint)  # however they are listed
    for before, source in pairwise(sources):
        require(
            source.split.fingerprint != before.split.fingerprint,
            f"data.train has the tokens of {source.path} twice; give them once, with their weight",
        )
    train = Mixture(
        sources=tuple(sources),
        block_size=config.model.block_size,
        shuffle=data.shuffle,
        group=data.shuffle_group,
        seed=config.seed,
    )
    val = open_sources(
        val_paths(data) or [Weighted(source.path, source.weight) for source in sources],
        "val",
        data,
        names=val_names(data),
        known=sources,
    )
    check_cache(sources, data)
    first = sources[0]
    for source in [*sources[1:], *val]:
        source.tokenizer.require_same(
            first.tokenizer, f"the {source.split.name} split of {source.path}", first.path
        )
    return Corpus(
        train=train,
        tokenizer=first.tokenizer,
        evaluated={
            "train": eval_splits(sources, config.eval.tokens),
            "val": eval_splits(val, config.eval.tokens, named=bool(val_names(data))),
        },
        vocab_size=model_vocabulary(config, first.tokenizer, first.path),
        document_end=document_end(data, first.tokenizer),
        commits=data.commits or {},
    )


def eval_splits(
    sources: Sequence[Source], tokens: int | None, named: bool = False
) -> tuple[EvalSplit, ...]:
    """Return what is evaluated: of each source its share of `tokens`; if `named`, all `tokens`.

    The first tokens of a remote source are read into memory. Raises `UserError` if all tokens of a
    remote source are to be evaluated.
    """
    total = sum(source.weight for source in sources)
    found = []
    for source in sources:
        split = source.split
        share = source.weight / total
        budget = tokens
        if tokens is not None and not named:
            budget = max(1, round(tokens * share))
        if split.remote is not None:
            if budget is None:
                raise UserError(
                    f"eval.tokens is null, the whole split, but {source.path} is remote; give a "
                    "number"
                )
            split = resident(split, budget)
        name = source.name if named or len(sources) > 1 else None
        found.append(EvalSplit(name, share, split, budget))
    return tuple(found)


def model_vocabulary(config: Config, tokenizer: Tokenizer, path: str) -> int:
    """Return the vocabulary of the model; `UserError` if it has less than the tokenizer."""
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        start = config.model.init_from
        require(
            start == "scratch",
            f"the vocabulary of {start} has {vocab_size:,} tokens but the tokenizer of {path} has "
            f"{tokenizer.vocab_size:,}; prepare the data with the tokenizer of those weights",
        )
        raise UserError(
            f"model.vocab_size is {vocab_size:,} but the tokenizer of {path} has "
            f"{tokenizer.vocab_size:,} tokens; leave model.vocab_size unset or raise it"
        )
    return vocab_size


def document_end(data: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the token at which attention ends; `UserError` if the tokenizer has none."""
    require(
        not data.document_mask or tokenizer.eot_id is not None,
        f"data.document_mask is true but the {tokenizer.kind} tokenizer has no end-of-text token; "
        "prepare the data with bytes, bpe or gpt2",
    )
    return tokenizer.eot_id if data.document_mask else None


def check_cache(sources: Sequence[Source], data: DataConfig) -> None:
    """Raise `UserError` if the remote shards that are shuffled together do not fit the cache.

    With `groups` these are two groups, as a batch may end one and begin the next.
    """
    if data.shuffle in ("shards", "none"):
        return
    count = None
    together = "all"
    advice = "set data.shuffle to groups"
    if data.shuffle == "groups":
        count = 2 * data.shuffle_group
        together = "two groups"
        advice = "lower data.shuffle_group"
    needed = 0
    for source in sources:
        if source.split.remote is not None:
            sizes = [source.split.remote.room_needed(shard.name) for shard in source.split.shards]
            needed += sum(sorted(sizes, reverse=True)[:count])
    require(
        needed <= data.cache_gb * 1e9,
        f"data.shuffle is {data.shuffle}, which needs {together} of the remote shards at once, "
        f"{needed / 1e9:,.1f} GB, more than data.cache_gb {data.cache_gb:g}; {advice} or raise it",
    )


# --------------------------------------------------------------------------- changes of sources


def sequences_given(state: StateDict) -> dict[str, int]:
    """Count the sequences that each source has given in all, by fingerprint."""
    sources = trained_sources(state)
    given = dict(state["data_given"])
    pattern = Pattern(tuple(source.weight for source in sources))
    counts = pattern.counts(state["sequences"] - state["data_origin"])
    for source, count in zip(sources, counts, strict=True):
        given[source.fingerprint] = given.get(source.fingerprint, 0) + count
    return given


def source_changes(before: StateDict, now: StateDict) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the sources of two states: key -> (before, now)."""
    if before["data_fingerprint"] == now["data_fingerprint"]:
        return {}
    if len(trained_sources(before)) == len(trained_sources(now)) == 1:
        return {"data.train": (describe_data(before), describe_data(now))}
    former = {source.fingerprint: source for source in trained_sources(before)}
    present = {source.fingerprint: source for source in trained_sources(now)}
    changes: dict[str, tuple[Any, Any]] = {}
    for fingerprint in former | present:
        old = former.get(fingerprint)
        new = present.get(fingerprint)
        was = describe_weight(old)
        is_now = describe_weight(new)
        if was == is_now:
            continue
        one = new or old
        assert one is not None
        key = f"data.train[{one.name}]"
        if key in changes:  # another content under the same name
            (content,) = [
                source.fingerprint for source in former.values() if source.name == one.name
            ]
            was = f"{changes[key][0]} ({content[:12]})"
            is_now = f"{is_now} ({fingerprint[:12]})"
        changes[key] = (was, is_now)
    return changes


def describe_weight(source: TrainedSource | None) -> str:
    """Return `weight 2`, or `absent` without a source."""
    return f"weight {source.weight:g}" if source else "absent"


def describe_data(state: StateDict) -> str:
    """Return the path and the fingerprint of a state's one source: `data/web (1a2b3c4d5e6f)`."""
    config = state.get("config", {})
    fingerprint = state["data_fingerprint"][:12]
    if "data.train.streaming" in config:  # an earlier version tokenized it while training
        return f"streamed text ({fingerprint})"
    path = config.get("data.train")
    return f"{path} ({fingerprint})" if isinstance(path, str) else fingerprint
