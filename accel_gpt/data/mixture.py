"""Mix several sources in exact proportion: decide which source gives sequence k of a run.

The pattern of sources repeats after D sequences, where D is the common denominator of the shares.
After any number of sequences, each source is less than one sequence from its exact share (Tijdeman
1980, "The chairman assignment problem"). A table of D entries locates any position directly.

Legend: M sources, D length of the pattern.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_gpt.data.order import Order, Shuffle
from accel_gpt.data.shards import Ints, Tokens
from accel_gpt.data.sources import DataRead, Source, TrainedSource
from accel_gpt.errors import UserError

LONGEST_PATTERN = 100_000  # sequences; the table takes 0.1 s and 1 MB per source
PREFETCH_SHARDS = 4  # shards of a remote source to download ahead


@dataclass(frozen=True)
class Pattern:
    """The repeating pattern of sources for relative weights (M,)."""

    weights: tuple[float, ...]

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Return the sequences of each source in one pattern, (M,); they add up to D.

        Raises `UserError` if the pattern is too long.
        """
        exact = [Fraction(str(weight)) for weight in self.weights]
        shares = [weight / sum(exact) for weight in exact]
        length = math.lcm(*(share.denominator for share in shares))
        if length > LONGEST_PATTERN:
            raise UserError(
                f"the weights of data.train, {', '.join(map(str, self.weights))}, repeat only "
                f"after {length:,} sequences; the limit is {LONGEST_PATTERN:,}: use whole numbers "
                "or fewer decimals"
            )
        return tuple(int(share * length) for share in shares)

    @cached_property
    def sources(self) -> Ints:
        """Return the source of each sequence of a pattern, (D,)."""
        return np.fromiter(assign(self.shares), np.int64, sum(self.shares))

    @cached_property
    def preceding(self) -> Ints:
        """Count the earlier sequences of the same source for each sequence of a pattern, (D,)."""
        preceding = np.empty_like(self.sources)
        for source, share in enumerate(self.shares):
            preceding[self.sources == source] = np.arange(share)
        return preceding

    def locate(self, k: Ints) -> tuple[Ints, Ints]:
        """Return the source of each sequence in `k`, and its index within the source."""
        pattern, position = np.divmod(k, len(self.sources))
        source = self.sources[position]
        return source, pattern * np.array(self.shares)[source] + self.preceding[position]

    def counts(self, k: int) -> list[int]:
        """Count the sequences of each source among the first `k`, (M,)."""
        pattern, position = divmod(k, sum(self.shares))
        rest = np.bincount(self.sources[:position], minlength=len(self.shares))
        return [pattern * share + int(n) for share, n in zip(self.shares, rest, strict=True)]


@functools.cache
def pattern_of(weights: tuple[float, ...]) -> Pattern:
    """Return the pattern for relative weights (M,), with its tables computed once."""
    return Pattern(weights)


def assign(shares: Sequence[int]) -> Iterator[int]:
    """Yield the source of each sequence of one pattern, by Tijdeman's algorithm.

    Of the sources that lag behind their share, the one with the earliest deadline is next.
    """
    length, slack = sum(shares), max(1, 2 * len(shares) - 2)
    common = math.lcm(*shares)
    per_share = [common // share for share in shares]
    given = [0] * len(shares)
    for n in range(1, length + 1):
        lag = [slack * (share * n - length * x) for share, x in zip(shares, given, strict=True)]
        due = [i for i, late in enumerate(lag) if late >= length]
        chosen = min(due, key=lambda i: (length * (slack - 1) - lag[i]) * per_share[i])
        given[chosen] += 1
        yield chosen


class Located(NamedTuple):
    """The positions of sequences in their sources, as arrays of equal shape."""

    source: Ints
    shard: Ints
    first: Ints
    """Index of the first token in the shard."""


@dataclass(frozen=True)
class Mixture:
    """The sequences of a run, from one source or from several by weight.

    `origin`: the position at which this pattern starts, above 0 in a later stage, or if a run
    resumed with other sources. `given`: the sequences that each source gave before `origin`, by
    fingerprint; each source continues after them.
    """

    sources: tuple[Source, ...]
    block_size: int
    shuffle: Shuffle
    group: int
    seed: int
    origin: int = 0
    given: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epochs(0)  # rejects sources shorter than a sequence, and too long patterns

    @cached_property
    def pattern(self) -> Pattern:
        """Return the pattern of the sources."""
        return pattern_of(tuple(source.weight for source in self.sources))

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Return the order of each source, (M,)."""
        return tuple(
            Order(
                lengths=source.split.lengths,
                block_size=self.block_size,
                shuffle=self.shuffle,
                group=self.group,
                seed=self.seed,
                fingerprint=source.split.fingerprint,
            )
            for source in self.sources
        )

    @cached_property
    def start(self) -> list[int]:
        """Return the sequences that each source gave before `origin`, (M,)."""
        return [self.given.get(source.split.fingerprint, 0) for source in self.sources]

    @property
    def trained(self) -> list[TrainedSource]:
        """Return the sources as a checkpoint stores them."""
        return [TrainedSource(s.name, s.weight, s.split.fingerprint) for s in self.sources]

    @property
    def fingerprint(self) -> str:
        """Return the only source's fingerprint, or a SHA-256 (hex) of all sources and shares."""
        prints = [source.split.fingerprint for source in self.sources]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256(repr((prints, self.pattern.shares)).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest type that holds the ids of all sources."""
        return np.result_type(*(source.split.dtype for source in self.sources))

    def locate(self, k: Ints) -> Located:
        """Locate the sequences `k` of the run."""
        source, index = self.pattern.locate(k - self.origin)
        index += np.array(self.start)[source]
        shard = np.empty_like(k)
        first = np.empty_like(k)
        for number, order in enumerate(self.orders):
            here = source == number
            shard[here], first[here] = order.locate(index[here])
        return Located(source, shard, first)

    def read(self, located: Located, length: int) -> Tokens:
        """Read the first `length` tokens of N sequences, as (N, length)."""
        tokens = np.empty((len(located.source), length), self.dtype)
        for number, source in enumerate(self.sources):
            here = located.source == number
            tokens[here] = source.split.read_many(located.shard[here], located.first[here], length)
        return tokens

    def file_of(self, located: Located, row: int) -> tuple[Path, int]:
        """Return the file of sequence `row`, and the index of its first token in the file."""
        split = self.sources[int(located.source[row])].split
        return split.path(int(located.shard[row])), int(located.first[row])

    def counts(self, k: int) -> list[int]:
        """Count the sequences that each source has given after `k` sequences of the run, (M,)."""
        counts = self.pattern.counts(k - self.origin)
        return [start + count for start, count in zip(self.start, counts, strict=True)]

    def epochs(self, k: int) -> list[float]:
        """Return the epochs of each source after `k` sequences of the run, (M,)."""
        each = zip(self.counts(k), self.orders, strict=True)
        return [count / order.sequences_per_epoch for count, order in each]

    def prefetch(self, located: Located, k: int) -> None:
        """Download remote shards in the background: for `located`, then from sequence `k` on."""
        for number, source in enumerate(self.sources):
            if source.split.remote is not None:
                here = located.source == number
                now = list(dict.fromkeys(located.shard[here].tolist()))
                then = self.orders[number].upcoming(self.counts(k)[number], PREFETCH_SHARDS)
                source.split.prefetch(now, then)


# --------------------------------------------------------------------------- what a run reads


def same_data(some: Sequence[TrainedSource], others: Sequence[TrainedSource]) -> bool:
    """Return whether two lists have the same tokens with the same shares; names do not count."""
    if [one.fingerprint for one in some] != [one.fingerprint for one in others]:
        return False
    shares = [pattern_of(tuple(one.weight for one in each)).shares for each in (some, others)]
    return shares[0] == shares[1]


def sequences_given(reads: Sequence[DataRead], position: int) -> dict[str, int]:
    """Count the sequences that each source gives before a position, by fingerprint."""
    given: dict[str, int] = {}
    edges = [*(read.first for read in reads), position]
    for read, end in zip(reads, edges[1:], strict=True):
        pattern = pattern_of(tuple(source.weight for source in read.sources))
        counts = pattern.counts(max(min(end, position) - read.first, 0))
        for source, count in zip(read.sources, counts, strict=True):
            given[source.fingerprint] = given.get(source.fingerprint, 0) + count
    return given
