"""What a run with stages reads, computed anew: one sequence after the other, in plain Python.

It imports nothing of accel_gpt. Sources: a Feistel network of 6 rounds with cycle walking (Black &
Rogaway 2002) whose rounds use the finalizer of splitmix64 (Steele, Lea & Flood 2014); Tijdeman
1980, "The chairman assignment problem"; README of the order: the module docstrings of
data/order.py, data/mixture.py and config/stages.py.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

WORD = (1 << 64) - 1


class Window(NamedTuple):
    """Tokens that a step reads: `length` inputs, and one more for the last target."""

    source: str
    shard: int
    first: int  # index of the first token in the shard
    length: int
    stage: int  # from 0
    epoch: int  # of the source


@dataclass(frozen=True)
class ReferenceSource:
    """Shards on a disk."""

    fingerprint: str
    lengths: tuple[int, ...]  # tokens of each shard


@dataclass(frozen=True)
class ReferenceStage:
    """What a stage reads, with all its settings."""

    first_step: int
    weights: Mapping[str, float]  # name of a source -> weight
    block_size: int
    tokens_per_step: int


@dataclass(frozen=True)
class ReferenceRun:
    """A run of `steps` steps; `windows` lists what each of them reads."""

    sources: Mapping[str, ReferenceSource]
    stages: Sequence[ReferenceStage]
    steps: int
    longest: int  # tokens of a whole sequence
    seed: int
    shuffle: str  # global, shards or none

    def windows(self) -> Iterator[list[Window]]:
        """Yield the windows of each step, in the order in which they are read."""
        given = dict.fromkeys(self.sources, 0)  # whole sequences of each source
        mixed: Mapping[str, Fraction] = {}
        for step in range(self.steps):
            number = max(n for n, one in enumerate(self.stages) if one.first_step <= step)
            stage = self.stages[number]
            if shares(stage.weights) != mixed:
                mixed = shares(stage.weights)
                pattern = tijdeman([mixed[name] for name in self.in_order(mixed)])
            found: list[Window] = []
            for _ in range(stage.tokens_per_step // self.longest):
                name = self.in_order(mixed)[next(pattern)]
                epoch, shard, first = self.locate(self.sources[name], given[name])
                given[name] += 1
                found += [
                    Window(name, shard, start, stage.block_size, number, epoch)
                    for start in range(first, first + self.longest, stage.block_size)
                ]
            yield found

    def in_order(self, mixed: Mapping[str, Fraction]) -> list[str]:
        """Return the sources of a mixture in the order of their fingerprints."""
        return sorted(mixed, key=lambda name: self.sources[name].fingerprint)

    def locate(self, source: ReferenceSource, k: int) -> tuple[int, int, int]:
        """Return epoch, shard and first token of the whole sequence `k` of a source."""
        T = self.longest
        counts = [max(n // T - 1, 1) if n > T else 0 for n in source.lengths]
        total = sum(counts)
        epoch, index = divmod(k, total)
        shards = list(range(len(counts)))
        if self.shuffle == "global":
            index = permuted(index, total, self.key(source, epoch, "windows"))
        if self.shuffle == "shards":
            key = self.key(source, epoch, "shards")
            shards = [permuted(n, len(counts), key) for n in shards]
        for shard in shards:
            if index < counts[shard]:
                break
            index -= counts[shard]
        offset = 0
        if epoch > 0:
            slack = source.lengths[shard] - 1 - counts[shard] * T
            offset = splitmix(shard ^ self.key(source, epoch, "offset")) % (min(slack, T - 1) + 1)
        return epoch, shard, offset + index * T

    def key(self, source: ReferenceSource, epoch: int, purpose: str) -> int:
        """Derive 64 bits from the seed, the source, its epoch and the purpose."""
        text = f"{self.seed}/{source.fingerprint}/{epoch}/{purpose}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the exact share of each source."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def tijdeman(of: Sequence[Fraction]) -> Iterator[int]:
    """Yield whose turn it is, without end: Tijdeman 1980, section 2.

    Of the sources with share * n - given >= 1 / (2 M - 2), the one that would be too late first:
    the least (1 - 1 / (2 M - 2) - (share * n - given)) / share.
    """
    least = Fraction(1, max(1, 2 * len(of) - 2))
    length = math.lcm(*(share.denominator for share in of))
    while True:
        given = [0] * len(of)
        for n in range(1, length + 1):
            late = [share * n - got for share, got in zip(of, given, strict=True)]
            due = [one for one in range(len(of)) if late[one] >= least]
            chosen = min(due, key=lambda one: (1 - least - late[one]) / of[one])
            given[chosen] += 1
            yield chosen


def permuted(index: int, size: int, key: int) -> int:
    """Return the image of `index` under the keyed permutation of 0 ... size - 1."""
    bits = max(2, (size - 1).bit_length())
    widths = (bits // 2, bits - bits // 2)  # of the low and the high half
    value = index
    while True:
        low, high = value & ((1 << widths[0]) - 1), value >> widths[0]
        sizes = widths
        for number in range(6):
            mixed = high ^ splitmix(low ^ splitmix(key + number & WORD))
            low, high = mixed & ((1 << sizes[1]) - 1), low
            sizes = sizes[::-1]
        value = high << widths[0] | low
        if value < size:
            return value


def splitmix(word: int) -> int:
    """Return the finalizer of splitmix64."""
    word = word + 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31
