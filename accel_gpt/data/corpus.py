"""Open the data of a run: training sources, evaluation splits, and the position to resume from."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from accel_gpt.config.data import DataConfig, Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import USEFUL_EPOCHS, Plan, reference_steps
from accel_gpt.config.stages import spans, stage_configs, total_tokens
from accel_gpt.data.downloads import Cache
from accel_gpt.data.loader import Loader, Sequences, read_sequences
from accel_gpt.data.mixture import Mixture, same_data, sequences_given
from accel_gpt.data.shards import Split, resident
from accel_gpt.data.sources import (
    DataRead,
    Source,
    TrainedSource,
    all_train_paths,
    open_sources,
    train_names,
    train_paths,
    val_names,
    val_paths,
)
from accel_gpt.data.tokenizer import Tokenizer, named_tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.files import is_url
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
    """The training sources, the splits to evaluate, and their tokenizer.

    Positions count whole sequences: see config/stages.py.
    """

    mixtures: tuple[Mixture, ...]  # of each stage
    sources: list[Source]  # of all stages, each once
    starts: tuple[int, ...]  # position at which each stage begins
    end: int  # position after the last step; 0 without stages
    tokenizer: Tokenizer
    evaluated: Mapping[str, tuple[EvalSplit, ...]]  # keys: train and val
    vocab_size: int  # the model's vocabulary, at least as large as documents need
    target_mask: TargetMask  # the targets that do not count, in training and evaluation
    commits: Mapping[str, str]  # URL of a Hub repository -> commit
    cache: Cache | None  # of remote shards; None if all data are local
    reads: tuple[DataRead, ...] = ()  # of the whole run, what was read before included

    def __post_init__(self) -> None:
        self.follow((), 0)

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 (hex) of the training sources of all stages and their shares."""
        prints = list(dict.fromkeys(mixture.fingerprint for mixture in self.mixtures))
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256("/".join(prints).encode()).hexdigest()

    @property
    def weighted_sources(self) -> list[Source]:
        """Return the sources, weighted as the run reads them; a source that it never reads is out.

        If a stage reads other data, the weights are the sequences that each source gives.
        """
        if not self.changes_data:
            return self.sources
        given = sequences_given(self.reads, self.end)
        weighted = [
            replace(one, weight=given.get(one.split.fingerprint, 0)) for one in self.sources
        ]
        return [source for source in weighted if source.weight]

    @property
    def changes_data(self) -> bool:
        """Return whether a stage reads other data than another."""
        return len({mixture.fingerprint for mixture in self.mixtures}) > 1

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
        return {"data_read": list(self.reads), "data_commits": dict(self.commits)}

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from the fields of a `TrainState`.

        If the sources or weights have changed, a new pattern begins at the current position. Each
        source continues after the sequences that were already read from it.
        """
        self.follow(state["data_read"], state["sequences"])

    def follow(self, reads: Sequence[DataRead], position: int) -> None:
        """Lay out what is read from a position on, after the part of `reads` before it."""
        done = [read for read in reads if read.first < position]
        mixtures = list(self.mixtures)
        present = self.stage_of(max(position - 1, 0))  # of the last sequence that was read
        for number in range(present, len(mixtures)):
            trained = mixtures[number].trained
            if not done:
                done.append(DataRead(0, trained))
            elif not same_data(done[-1].sources, trained):
                done.append(DataRead(max(self.starts[number], position), trained))
            mixtures[number] = replace(
                mixtures[number],
                origin=done[-1].first,
                given=sequences_given(done[:-1], done[-1].first),
            )
        self.mixtures = tuple(mixtures)
        self.reads = tuple(done)

    def stage_of(self, position: int) -> int:
        """Return the number of the stage that reads the sequence at a position."""
        return bisect_right(self.starts, position) - 1

    def set_length(self, config: Config, position: int) -> None:
        """Move the stages after a position to their places in a run of another length."""
        self.starts, self.end = positions(config)
        self.follow(self.reads, position)

    def loader(self, plan: Plan, rank: int, device: torch.device, position: int) -> Loader:
        """Return the micro-batches of one rank, starting at a position of the run."""
        return Loader(self.micro_batches(plan, rank, position), device)

    def micro_batches(self, plan: Plan, rank: int, position: int) -> Iterator[Sequences]:
        """Yield the micro-batches of one rank (n, B, T + 1), stage by stage, without end."""
        first = self.stage_of(position)
        ends: list[int | None] = [*self.starts[first + 1 :], None]
        for number, end in enumerate(ends, start=first):
            yield from read_sequences(
                mixture=self.mixtures[number],
                plan=plan.stage(number),
                vocab_size=self.vocab_size,
                rank=rank,
                position=position,
                end=end,
            )
            position = end or position

    @property
    def waits_for(self) -> str:
        """Return the remote shards that reading waits for, and why; "" if it waits for none."""
        remotes = [source.split.remote for source in self.sources]
        return "; ".join(remote.waits_for for remote in remotes if remote and remote.waits_for)

    def splits(self) -> list[Split]:
        """Return all splits that are evaluated or trained on."""
        evaluated = [part.split for parts in self.evaluated.values() for part in parts]
        return evaluated + [source.split for source in self.sources]

    def remove_cache(self) -> None:
        """Remove the remote shards that the run has kept on this machine."""
        if self.cache is not None:
            self.cache.remove()

    def epoch_metrics(self, sequences: int) -> dict[str, float]:
        """Return metrics: the epochs of each source read before a position."""
        epochs = self.epochs(sequences)
        if len(epochs) == 1:
            return {"data/epochs": epochs[0]}
        each = zip(self.sources, epochs, strict=True)
        return {f"data/epochs/{source.name}": count for source, count in each}

    def epochs(self, position: int) -> list[float]:
        """Return the epochs of each source that are read before a position."""
        given = sequences_given(self.reads, position)
        sizes = {}
        for mixture in self.mixtures:
            for source, order in zip(mixture.sources, mixture.orders, strict=True):
                sizes[source.split.fingerprint] = order.sequences_per_epoch
        prints = [source.split.fingerprint for source in self.sources]
        return [given.get(key, 0) / sizes[key] for key in prints]

    def lines(self, plan: Plan) -> list[str]:
        """Return the first log lines of a run: its sources, with the tokens and epochs of each."""
        epochs = self.epochs(plan.total_sequences)
        lines = []
        for source, count in zip(self.sources, epochs, strict=True):
            mixed = len(epochs) > 1 and not self.changes_data
            weight = f", weight {source.weight:g}" if mixed else ""
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
    if any(is_url(source.path) for source in [*all_train_paths(config), *val_paths(data)]):
        cache = Cache(data.cache_gb, config.out_dir, config.train.timeout_seconds)
    mixtures, sources = open_mixtures(config, cache)
    check_cache(sources, data)
    began = len(mixtures[0].sources)  # sources of the first stage; the others are only followed
    followed = 0 if val_paths(data) else len(sources) - began
    val = open_sources(
        val_paths(data) or [Weighted(source.path, source.weight) for source in sources],
        "val",
        data,
        names=val_names(data) or ([] if val_paths(data) else [source.name for source in sources]),
        known=sources,
        cache=cache,
    )
    first = sources[0]
    for source in [*sources[1:], *val]:
        source.tokenizer.require_same(
            first.tokenizer, f"the {source.split.name} split of {source.path}", first.path
        )
    if data.tokenizer:
        check_named_tokenizer(data.tokenizer, first)
    starts, end = positions(config)
    return Corpus(
        mixtures=mixtures,
        sources=sources,
        starts=starts,
        end=end,
        tokenizer=first.tokenizer,
        evaluated={
            "train": eval_splits(mixtures[0].sources, config.eval.train_tokens),
            "val": eval_splits(
                val, config.eval.tokens, named=bool(val_names(data)), followed=followed
            ),
        },
        vocab_size=model_vocabulary(config, first.tokenizer, first.path),
        target_mask=TargetMask(document_end(data, [*sources, *val]), config),
        commits=data.commits or {},
        cache=cache,
    )


def open_mixtures(config: Config, cache: Cache | None) -> tuple[tuple[Mixture, ...], list[Source]]:
    """Open the training sources; return the mixture of each stage, and all sources, each once.

    The sources of the first stage come first.
    """
    names = train_names(config)
    mixtures: list[Mixture] = []
    opened: dict[str, Source] = {}  # by fingerprint
    listed: list[Weighted] = []
    for stage in stage_configs(config):
        before = listed
        listed = train_paths(stage.data)
        if listed == before:
            mixtures.append(mixtures[-1])
            continue
        sources = open_sources(
            listed,
            "train",
            stage.data,
            names=[names[source.path] for source in listed],
            known=list(opened.values()),
            cache=cache,
        )
        sources.sort(key=lambda source: source.split.fingerprint)  # independent of the listed order
        for one, source in pairwise(sources):
            require(
                source.split.fingerprint != one.split.fingerprint,
                f"data.train lists the tokens of {source.path} twice; list them once, with a "
                "weight",
            )
        mixture = Mixture(
            sources=tuple(sources),
            block_size=config.model.block_size,
            shuffle=stage.data.shuffle,
            group=GROUP_SHARDS,
            seed=config.seed,
        )
        mixtures.append(mixture)
        for source in sources:
            opened.setdefault(source.split.fingerprint, source)
    return tuple(mixtures), list(opened.values())


def positions(config: Config) -> tuple[tuple[int, ...], int]:
    """Return the positions at which the stages of a run begin, and the one after its last step.

    Without stages, the end is not needed and 0: evaluations need no length.
    """
    if not config.stages:
        return (0,), 0
    steps = reference_steps(config)
    starts = tuple(span.sequences for span in spans(config, steps))
    return starts, total_tokens(config, steps) // config.model.block_size


def vocabulary_of(config: Config) -> int:
    """Return the vocabulary size of the model, as `open_corpus` does, from one training source."""
    source = open_sources(train_paths(config.data)[:1], "train", config.data)[0]
    return model_vocabulary(config, source.tokenizer, source.path)


def eval_splits(
    sources: Sequence[Source], tokens: int | None, named: bool = False, followed: int = 0
) -> tuple[EvalSplit, ...]:
    """Return one split to evaluate for each source.

    The sources divide `tokens` by weight; if `named`, each source evaluates all `tokens`. So do the
    last ones that are only `followed`: they do not count in the mean. Remote tokens are read into
    memory. Raises `UserError` if a source is remote and `tokens` is None.
    """
    counted = sources[: len(sources) - followed]
    total = sum(source.weight for source in counted)
    found = []
    for source in sources:
        split = source.split
        share = source.weight / total if source in counted else 0.0
        budget = tokens
        if tokens is not None and share and not named:
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


def source_changes(before: StateDict, now: StateDict) -> dict[str, tuple[str, str]]:
    """Return what differs between the present sources of two states: key -> (before, now).

    `before`: of a checkpoint. `now`: of a run that begins.
    """
    position = before["sequences"]
    was = read_before(before["data_read"], position)
    new = read_before(now["data_read"], position)
    if same_data(was, new):
        return {}
    return {"data.train": (describe_sources(was), describe_sources(new))}


def read_before(reads: Sequence[DataRead], position: int) -> list[TrainedSource]:
    """Return the sources of the last sequence before a position."""
    before = [read.sources for read in reads if read.first < max(position, 1)]
    return before[-1] if before else []


def describe_sources(sources: Sequence[TrainedSource]) -> str:
    """Describe each source by name, weight and fingerprint: `web, weight 2 (1a2b3c4d5e6f)`."""
    each = (f"{s.name}, weight {s.weight:g} ({s.fingerprint[:12]})" for s in sources)
    return "; ".join(each) or "none"
