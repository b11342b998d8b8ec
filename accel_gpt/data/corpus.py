"""Open the data of a run: training sources, evaluation splits, and the position to resume from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from accel_gpt.config.data import DataConfig, Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import USEFUL_EPOCHS, Plan
from accel_gpt.data.downloads import Cache
from accel_gpt.data.loader import Loader, read_sequences
from accel_gpt.data.mixture import Mixture, Pattern
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import Split, resident
from accel_gpt.data.sources import (
    Source,
    TrainedSource,
    open_sources,
    train_paths,
    val_names,
    val_paths,
)
from accel_gpt.data.tokenizer import Tokenizer, named_tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.model.targets import TargetMask

StateDict = Mapping[str, Any]
CHECKED_TOKENS = 10_000_000  # searched for end-of-text; assumption: no document is longer
GROUP_SHARDS = 8  # shards whose sequences are permuted together if data.shuffle is groups


@dataclass(frozen=True)
class EvalSplit:
    """One split to evaluate."""

    name: str | None  # None if it is the only one
    share: float  # weight of this split in the mean loss
    split: Split
    tokens: int | None  # tokens to evaluate, counted from the first; None: all


@dataclass(kw_only=True)
class Corpus:
    """The training sources, the splits to evaluate, and their tokenizer."""

    train: Mixture
    tokenizer: Tokenizer
    evaluated: Mapping[str, tuple[EvalSplit, ...]]  # keys: train and val
    vocab_size: int  # the model's vocabulary, at least as large as documents need
    target_mask: TargetMask  # the targets that do not count, in training and evaluation
    commits: Mapping[str, str]  # URL of a Hub repository -> commit
    cache: Cache | None  # of remote shards; None if all data are local

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 (hex) of the training sources and their shares."""
        return self.train.fingerprint

    def identity(self) -> dict[str, str]:
        """Return the fingerprints that must be the same on all ranks, by description."""
        val = [part.split.fingerprint[:12] for part in self.evaluated["val"]]
        return {
            "the fingerprint of the training data": self.fingerprint[:12],
            "the fingerprint of the validation data": ", ".join(val),
            "the fingerprint of the tokenizer": self.tokenizer.fingerprint[:12],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the data fields of `TrainState`, for a checkpoint.

        They do not include the position, `TrainState.sequences`.
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

        If the sources or weights have changed, a new pattern begins at the current sequence. Each
        source continues after the sequences that were already read from it.
        """
        if state["data_fingerprint"] == self.fingerprint:
            origin = state["data_origin"]
            given = state["data_given"]
        else:
            origin = state["sequences"]
            given = sequences_given(state)
        self.train = replace(self.train, origin=origin, given=given)

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """Return the micro-batches of one rank, starting at sequence `position` of the run."""
        chunks = read_sequences(
            mixture=self.train,
            plan=plan,
            vocab_size=self.vocab_size,
            rank=rank,
            position=position,
        )
        return Loader(chunks, plan.micro_batch_size, device)

    @property
    def waits_for(self) -> str:
        """Return the remote shards that reading waits for, and why; "" if it waits for none."""
        remotes = [source.split.remote for source in self.train.sources]
        return "; ".join(remote.waits_for for remote in remotes if remote and remote.waits_for)

    def splits(self) -> list[Split]:
        """Return all splits that are evaluated or trained on."""
        evaluated = [part.split for parts in self.evaluated.values() for part in parts]
        return evaluated + [source.split for source in self.train.sources]

    def remove_cache(self) -> None:
        """Remove the remote shards that the run has kept on this machine."""
        if self.cache is not None:
            self.cache.remove()

    def epoch_metrics(self, sequences: int) -> dict[str, float]:
        """Return metrics: the epochs of each source read after `sequences` of the run."""
        epochs = self.train.epochs(sequences)
        if len(epochs) == 1:
            return {"data/epochs": epochs[0]}
        each = zip(self.train.sources, epochs, strict=True)
        return {f"data/epochs/{source.name}": count for source, count in each}

    def lines(self, plan: Plan) -> list[str]:
        """Return the first log lines of a run: its sources, with the tokens and epochs of each."""
        epochs = self.train.epochs(plan.max_steps * plan.sequences_per_step)
        lines = []
        for source, count in zip(self.train.sources, epochs, strict=True):
            weight = f", weight {source.weight:g}" if len(epochs) > 1 else ""
            remote = source.split.remote
            where = remote.store.url if remote else source.split.folder
            lines.append(
                f"data     {where}: {source.split.tokens:,} train tokens{weight}; "
                f"this run reads {count:.2f} epochs"
                + (f"; more than {USEFUL_EPOCHS} add little" if count > USEFUL_EPOCHS else "")
            )
        val_tokens = sum(part.split.tokens for part in self.evaluated["val"])
        lines[-1] += (
            f"; {val_tokens:,} val tokens, tokenizer {self.tokenizer.kind} of "
            f"{self.tokenizer.vocab_size:,}"
        )
        return lines


# --------------------------------------------------------------------------- opening


def open_corpus(config: Config) -> Corpus:
    """Open `data.train` and `data.val`.

    Raises `DataError` if they were made with different tokenizers, `UserError` if not with
    `data.tokenizer`.
    """
    data = config.data
    cache = None
    if any(is_url(source.path) for source in [*train_paths(data), *val_paths(data)]):
        cache = Cache(data.cache_gb, config.out_dir, config.train.timeout_seconds)
    sources = open_sources(train_paths(data), "train", data, cache=cache)
    sources.sort(key=lambda source: source.split.fingerprint)  # independent of the listed order
    for before, source in pairwise(sources):
        require(
            source.split.fingerprint != before.split.fingerprint,
            f"data.train lists the tokens of {source.path} twice; list them once, with a weight",
        )
    train = Mixture(
        sources=tuple(sources),
        block_size=config.model.block_size,
        shuffle=data.shuffle,
        group=GROUP_SHARDS,
        seed=config.seed,
    )
    val = open_sources(
        val_paths(data) or [Weighted(source.path, source.weight) for source in sources],
        "val",
        data,
        names=val_names(data),
        known=sources,
        cache=cache,
    )
    check_cache(sources, data)
    first = sources[0]
    for source in [*sources[1:], *val]:
        source.tokenizer.require_same(
            first.tokenizer, f"the {source.split.name} split of {source.path}", first.path
        )
    if data.tokenizer:
        check_named_tokenizer(data.tokenizer, first)
    return Corpus(
        train=train,
        tokenizer=first.tokenizer,
        evaluated={
            "train": eval_splits(sources, config.eval.train_tokens),
            "val": eval_splits(val, config.eval.tokens, named=bool(val_names(data))),
        },
        vocab_size=model_vocabulary(config, first.tokenizer, first.path),
        target_mask=TargetMask(document_end(data, [*sources, *val]), config),
        commits=data.commits or {},
        cache=cache,
    )


def vocabulary_of(config: Config) -> int:
    """Return the vocabulary size of the model, as `open_corpus` does, from one training source."""
    source = open_sources(train_paths(config.data)[:1], "train", config.data)[0]
    return model_vocabulary(config, source.tokenizer, source.path)


def eval_splits(
    sources: Sequence[Source], tokens: int | None, named: bool = False
) -> tuple[EvalSplit, ...]:
    """Return one split to evaluate for each source.

    The sources divide `tokens` by weight; if `named`, each source evaluates all `tokens`. Remote
    tokens are read into memory. Raises `UserError` if a source is remote and `tokens` is None.
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
                    f"eval.tokens is null (the whole split), but {source.path} is remote; set a "
                    "number"
                )
            split = resident(split, budget)
        name = source.name if named or len(sources) > 1 else None
        found.append(EvalSplit(name, share, split, budget))
    return tuple(found)


def check_named_tokenizer(name: str, source: Source) -> None:
    """Raise `UserError` if `data.tokenizer` names another tokenizer than the data were made with.

    Needs no vocabulary from elsewhere. A file may be gone, because the data outlive it.
    """
    tokenizer = source.tokenizer
    is_same = True
    if name in ("gpt2", "bytes"):
        is_same = tokenizer.kind == name
    elif Path(name).exists():
        is_same = tokenizer.fingerprint == named_tokenizer(name).fingerprint
    require(
        is_same,
        f"data.tokenizer is {name}, but the tokenizer of {source.path} is {tokenizer.summary}",
    )


def model_vocabulary(config: Config, tokenizer: Tokenizer, path: str) -> int:
    """Return the vocabulary size of the model.

    Raises `UserError` if documents can hold tokens beyond it.
    """
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    needed = tokenizer.needed_vocab_size
    start = config.model.init_from
    of_weights = "" if start == "scratch" else f" of the weights of {start}"
    require(
        vocab_size >= needed,
        f"model.vocab_size{of_weights} is {vocab_size:,}, but the tokenizer of {path} has "
        f"{needed:,} tokens",
    )
    return vocab_size


def document_end(data: DataConfig, sources: Sequence[Source]) -> int | None:
    """Return the token at which attention ends, or None without `data.document_mask`.

    Raises `UserError` if the tokenizer has no end-of-text token, or if it ends no document in the
    shards of a source.
    """
    if not data.document_mask:
        return None
    for source in {source.path: source for source in reversed(sources)}.values():
        check_documents(source)  # the first split of each folder
    return sources[0].tokenizer.eot_id


def check_documents(source: Source) -> None:
    """Raise `UserError` unless end-of-text lies between documents of a source.

    Our own index counts the documents. In shards of other projects, the first `CHECKED_TOKENS` of
    the first shard are searched.
    """
    split = source.split
    tokenizer = source.tokenizer
    require(
        tokenizer.eot_id is not None,
        f"data.document_mask is true but the {tokenizer.kind} tokenizer has no end-of-text token",
    )
    if split.shards[0].documents is not None:
        return
    end = min(split.shards[0].tokens - 1, CHECKED_TOKENS)  # the last token separates nothing
    require(
        tokenizer.eot_id in split.read(0, 1, max(end - 1, 0)),
        f"data.document_mask is true, but the first {end:,} tokens of the {split.name} shards of "
        f"{source.path} have no end-of-text token ({tokenizer.eot!r}) between documents",
    )


def check_cache(sources: Sequence[Source], data: DataConfig) -> None:
    """Raise `UserError` if the remote shards that are shuffled together do not fit the cache.

    With `groups` the cache must hold two groups, because a batch may span two.
    """
    if data.shuffle in ("shards", "none"):
        return
    count = 2 * GROUP_SHARDS if data.shuffle == "groups" else None
    needed = 0
    for source in sources:
        if source.split.remote is not None:
            infos = source.split.remote.infos
            sizes = [infos[shard.name].size for shard in source.split.shards]
            needed += sum(sorted(sizes, reverse=True)[:count])
    require(
        needed <= data.cache_gb * 1e9,
        f"data.shuffle {data.shuffle} needs {needed / 1e9:,.1f} GB of remote shards at once, but "
        f"data.cache_gb is {data.cache_gb:g}; raise it, or set data.shuffle to "
        f"{'shards' if data.shuffle == 'groups' else 'groups'}",
    )


# --------------------------------------------------------------------------- changes of sources


def sequences_given(state: StateDict) -> dict[str, int]:
    """Count the sequences read so far from each source, by fingerprint."""
    sources = state["data_sources"]
    given = dict(state["data_given"])
    pattern = Pattern(tuple(source.weight for source in sources))
    counts = pattern.counts(state["sequences"] - state["data_origin"])
    for source, count in zip(sources, counts, strict=True):
        given[source.fingerprint] = given.get(source.fingerprint, 0) + count
    return given


def source_changes(before: StateDict, now: StateDict) -> dict[str, tuple[str, str]]:
    """Return what differs between the sources of two states: key -> (before, now)."""
    if before["data_fingerprint"] == now["data_fingerprint"]:
        return {}
    return {"data.train": (describe_sources(before), describe_sources(now))}


def describe_sources(state: StateDict) -> str:
    """Describe each source by name, weight and fingerprint: `web, weight 2 (1a2b3c4d5e6f)`."""
    sources = state["data_sources"]
    return "; ".join(f"{s.name}, weight {s.weight:g} ({s.fingerprint[:12]})" for s in sources)
