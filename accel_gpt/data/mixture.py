"""Several sources read in exact proportion: which source gives the k-th sequence of a run.

The pattern of sources repeats after D sequences, D being the common denominator of the weights; at
every prefix each source is less than one sequence off its share (Tijdeman 1980, "The chairman
assignment problem"). Its table has D entries, so that any position is found by arithmetic.

Legend: M sources, D length of the pattern.
"""

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
from accel_gpt.data.sources import Source
from accel_gpt.errors import UserError

LONGEST_PATTERN = 100_000  # sequences; its table takes a tenth of a second and 1 MB a source
PREFETCH_SHARDS = 4  # of a remote source, before they are needed


@dataclass(frozen=True)
class Pattern:
    """Which source gives which sequence, for weights (M,) relative to each other."""

    weights: tuple[float, ...]

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """(M,) sequences of each source in one pattern; they add up to D.

        Raises `UserError` where the pattern would be too long.
        """
        exact = [Fraction(str(weight)) for weight in self.weights]
        shares = [weight / sum(exact) for weight in exact]
        length = math.lcm(*(share.denominator for share in shares))
        if length > LONGEST_PATTERN:
            raise UserError(
                f"the weights of data.train, {', '.join(map(str, self.weights))}, repeat only "
                f"after {length:,} sequences, at most {LONGEST_PATTERN:,}; give whole numbers or "
                "fewer decimals"
            )
        return tuple(int(share * length) for share in shares)

    @cached_property
    def sources(self) -> Ints:
        """(D,) source of each sequence of a pattern."""
        return np.fromiter(assign(self.shares), np.int64, sum(self.shares))

    @cached_property
    def preceding(self) -> Ints:
        """(D,) how many sequences of the same source precede each sequence of a pattern."""
        preceding = np.empty_like(self.sources)
        for source, share in enumerate(self.shares):
            preceding[self.sources == source] = np.arange(share)
        return preceding

    def locate(self, k: Ints) -> tuple[Ints, Ints]:
        """Source of the sequences number `k`, and how many of that source precede each."""
        pattern, position = np.divmod(k, len(self.sources))
        source = self.sources[position]
        return source, pattern * np.array(self.shares)[source] + self.preceding[position]

    def counts(self, k: int) -> list[int]:
        """(M,) sequences that each source gives among the first `k`."""
        pattern, position = divmod(k, sum(self.shares))
        rest = np.bincount(self.sources[:position], minlength=len(self.shares))
        return [pattern * share + int(n) for share, n in zip(self.shares, rest, strict=True)]


def assign(shares: Sequence[int]) -> Iterator[int]:
    """Source of each sequence of one pattern: of those that lag, the one due first (Tijdeman)."""
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
    """Where sequences lie: arrays of one shape."""

    source: Ints
    shard: Ints
    first: Ints
    """Index of the first token in the shard."""


@dataclass(frozen=True)
class Mixture:
    """The sequences of a run: of one source in its order, or of several by their weights.

    `origin` and `given`: where a run resumed with this mixture. Sequence `origin` is the first of
    its pattern, and each source continues after the sequences that it had given before.
    """

    sources: tuple[Source, ...]
    block_size: int
    shuffle: Shuffle
    group: int
    seed: int
    origin: int = 0
    given: Mapping[str, int] = field(default_factory=dict)
    """Sequences before `origin`, by the fingerprint of their source."""

    def __post_init__(self) -> None:
        self.epochs(0)  # refuses a source shorter than a sequence, and weights that never repeat

    @cached_property
    def pattern(self) -> Pattern:
        """Which source gives which sequence."""
        return Pattern(tuple(source.weight for source in self.sources))

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """(M,) the order of each source."""
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
        """(M,) sequences that each source had given at `origin`."""
        return [self.given.get(source.split.fingerprint, 0) for source in self.sources]

    @property
    def fingerprint(self) -> str:
        """Of one source its own; of several SHA-256 (hex) of theirs and their shares."""
        prints = [source.split.fingerprint for source in self.sources]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256(repr((prints, self.pattern.shares)).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that holds the ids of every source."""
        return np.result_type(*(source.split.dtype for source in self.sources))

    def locate(self, k: Ints) -> Located:
        """Locate the sequences number `k`."""
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
        """Return the file of sequence number `row`, and the index of its first token there."""
        split = self.sources[int(located.source[row])].split
        return split.path(int(located.shard[row])), int(located.first[row])

    def counts(self, k: int) -> list[int]:
        """(M,) sequences that each source has given when `k` sequences of the run are done."""
        counts = self.pattern.counts(k - self.origin)
        return [start + count for start, count in zip(self.start, counts, strict=True)]

    def epochs(self, k: int) -> list[float]:
        """(M,) how often each source has been read through after `k` sequences."""
        each = zip(self.counts(k), self.orders, strict=True)
        return [count / order.sequences_per_epoch for count, order in each]

    def remote_reads(self, count: int) -> tuple[int, float]:
        """Return how many remote shards the first `count` sequences lie in, and their GB."""
        located = self.locate(self.origin + np.arange(count))
        shards = 0
        size = 0
        for number, source in enumerate(self.sources):
            split = source.split
            if split.remote is not None:
                needed = np.unique(located.shard[located.source == number])
                shards += len(needed)
                size += int(split.lengths[needed].sum()) * split.dtype.itemsize
        return shards, size / 1e9

    def prefetch(self, located: Located, k: int) -> None:
        """Download remote shards in the background: first for `located`, then from `k` on."""
        for number, source in enumerate(self.sources):
            if source.split.remote is not None:
                here = located.source == number
                now = list(dict.fromkeys(located.shard[here].tolist()))
                then = self.orders[number].upcoming(self.counts(k)[number], PREFETCH_SHARDS)
                source.split.prefetch(now, then)
