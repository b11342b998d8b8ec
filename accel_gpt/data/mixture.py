"""Several sources read in exact proportion: which source gives the k-th sequence, and which window.

The pattern of sources repeats after D sequences, D being the common denominator of the weights; at
every prefix each source is less than one sequence off its share (Tijdeman 1980, "The chairman
assignment problem"). Its table has D entries, so that any position is found by arithmetic.

Legend: M sources, D length of the pattern.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.data.order import Order
from accel_gpt.data.shards import Split, Tokens
from accel_gpt.errors import UserError

Ints = npt.NDArray[np.int64]
LONGEST_PATTERN = 100_000  # sequences; its table takes a tenth of a second and 1 MB a source
AHEAD_SHARDS = 4  # shards of a remote source asked for before they are needed


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
        pattern, place = np.divmod(k, len(sources))
        source = sources[place]
        return source, pattern * np.array(self.shares)[source] + before[place]

    def counts(self, k: int) -> list[int]:
        """(M,) sequences that each source gives among the first `k`."""
        pattern, place = divmod(k, sum(self.shares))
        rest = np.bincount(self.table[0][:place], minlength=len(self.shares))
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
    """The windows of a run: of one source in its order, or of several by their weights.

    `origin` and `consumed` tell where a run took up this mixture: sequence `origin` is the first of
    its pattern, and each source goes on after the windows that it had given before.
    """

    names: tuple[str, ...]
    splits: tuple[Split, ...]
    orders: tuple[Order, ...]
    pattern: Pattern
    origin: int = 0
    consumed: tuple[int, ...] = field(default=())

    @property
    def fingerprint(self) -> str:
        """Of one source its own; of several SHA-256 (hex) of theirs and their shares."""
        prints = [split.fingerprint for split in self.splits]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256(repr((prints, self.pattern.shares)).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that holds the ids of every source."""
        return np.result_type(*(split.dtype for split in self.splits))

    def locate(self, k: Ints) -> tuple[Ints, Ints, Ints]:
        """Source, shard and first token of the windows number `k`: arrays shaped like `k`."""
        source, index = self.pattern.locate(k - self.origin)
        index += np.array(self.start)[source]
        shard, first = np.empty_like(k), np.empty_like(k)
        for number in sorted(set(source.ravel().tolist())):
            here = source == number
            shard[here], first[here] = self.orders[number].locate(index[here])
        return source, shard, first

    @property
    def start(self) -> tuple[int, ...]:
        """(M,) windows that each source had given at `origin`."""
        return self.consumed or (0,) * len(self.orders)

    def given(self, k: int) -> list[int]:
        """(M,) windows that each source has given when `k` sequences of the run are done."""
        counts = self.pattern.counts(k - self.origin)
        return [start + count for start, count in zip(self.start, counts, strict=True)]

    def epochs(self, k: int) -> dict[str, float]:
        """How often each source has been read through after `k` sequences, by name."""
        each = zip(self.names, self.given(k), self.orders, strict=True)
        return {name: given / order.windows_per_epoch for name, given, order in each}

    def windows(self, source: Ints, shard: Ints, first: Ints, length: int) -> Tokens:
        """The tokens of the windows that `locate` found (N,), as (N, length)."""
        if len(self.splits) == 1:
            return self.splits[0].windows(shard, first, length)
        rows = np.empty((len(source), length), self.dtype)
        for number in sorted(set(source.ravel().tolist())):
            here = source == number
            rows[here] = self.splits[number].windows(shard[here], first[here], length)
        return rows

    @property
    def remote(self) -> bool:
        """Whether shards are fetched while they are read."""
        return any(split.store is not None for split in self.splits)

    def ahead(self, k: int, source: Ints, shard: Ints) -> None:
        """Have fetched what the windows up to number `k` read, and then those after them."""
        given = self.given(k)
        for number, (split, order) in enumerate(zip(self.splits, self.orders, strict=True)):
            if split.store is not None:
                now = list(dict.fromkeys(shard[source == number].tolist()))
                split.ahead(now, order.upcoming(given[number], AHEAD_SHARDS))
