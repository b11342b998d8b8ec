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
from typing import Any

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
    def table(self) -> tuple[Ints, Ints]:
        """(D,) source of each sequence of a pattern, and how many of that source precede it."""
        sources = np.fromiter(assign(self.shares), np.int64, sum(self.shares))
        before = np.empty_like(sources)
        for source, share in enumerate(self.shares):
            before[sources == source] = np.arange(share)
        return sources, before

    def locate(self, k: Ints) -> tuple[Ints, Ints]:
        """Source of the sequences number `k`, and how many of that source precede each."""
        sources, before = self.table
        pattern, position = np.divmod(k, len(sources))
        source = sources[position]
        return source, pattern * np.array(self.shares)[source] + before[position]

    def counts(self, k: int) -> list[int]:
        """(M,) sequences that each source gives among the first `k`."""
        pattern, position = divmod(k, sum(self.shares))
        rest = np.bincount(self.table[0][:position], minlength=len(self.shares))
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

    def locate(self, k: Ints) -> tuple[Ints, Ints, Ints]:
        """Source, shard and first token of the sequences number `k`: arrays shaped like `k`."""
        source, index = self.pattern.locate(k - self.origin)
        index += np.array(self.start)[source]
        shard, first = np.empty_like(k), np.empty_like(k)
        for number, order in enumerate(self.orders):
            here = source == number
            shard[here], first[here] = order.locate(index[here])
        return source, shard, first

    def read(self, source: Ints, shard: Ints, first: Ints, length: int) -> Tokens:
        """The tokens of the sequences that `locate` found (N,), as (N, length)."""
        tokens = np.empty((len(source), length), self.dtype)
        for number, one in enumerate(self.sources):
            here = source == number
            tokens[here] = one.split.read_many(shard[here], first[here], length)
        return tokens

    def place(self, source: Ints, shard: Ints, first: Ints, row: int) -> tuple[Path, int]:
        """The file of sequence number `row` of those that `locate` found, and its first token."""
        split = self.sources[int(source[row])].split
        return split.folder / split.shards[int(shard[row])].name, int(first[row])

    def counts(self, k: int) -> list[int]:
        """(M,) sequences that each source has given when `k` sequences of the run are done."""
        counts = self.pattern.counts(k - self.origin)
        return [start + count for start, count in zip(self.start, counts, strict=True)]

    def epochs(self, k: int) -> list[float]:
        """(M,) how often each source has been read through after `k` sequences."""
        each = zip(self.counts(k), self.orders, strict=True)
        return [count / order.sequences_per_epoch for count, order in each]

    def remote_reads(self, count: int) -> tuple[int, float]:
        """How many remote shards the first `count` sequences are read from, and their GB."""
        source, shard, _ = self.locate(self.origin + np.arange(count))
        found = set(zip(source.tolist(), shard.tolist(), strict=True))
        splits = [one.split for one in self.sources]
        remote = [(splits[one], number) for one, number in found if splits[one].remote is not None]
        needed = sum(split.shards[number].tokens * split.dtype.itemsize for split, number in remote)
        return len(remote), needed / 1e9

    def prefetch(self, k: int, source: Ints, shard: Ints) -> None:
        """Have the shards of the sequences up to number `k` downloaded, and then the next ones."""
        for number, (one, order) in enumerate(zip(self.sources, self.orders, strict=True)):
            if one.split.remote is not None:
                now = list(dict.fromkeys(shard[source == number].tolist()))
                then = order.upcoming(self.counts(k)[number], PREFETCH_SHARDS)
                one.split.prefetch(now, then)
