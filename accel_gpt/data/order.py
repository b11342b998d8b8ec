"""Which sequence comes when: pure functions of (seed, data fingerprint, k), O(1) memory, seekable.

The k-th sequence of a run is `block_size + 1` tokens of one shard, whatever the number of
ranks, the micro-batch or the restarts; k is the whole state. Its epoch is k //
sequences_per_epoch. Each epoch but the first cuts every shard at a new offset, so that a small
corpus does not repeat its sequences.

Legend: N sequences per epoch, S shards, T block_size.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from accel_gpt.data.shards import Ints
from accel_gpt.errors import DataError

Shuffle = Literal["global", "groups", "shards", "none", "replacement"]
Words = npt.NDArray[np.uint64]
ROUNDS = 6  # Feistel rounds, even so that the halves end where they began; 4 suffice (Luby-Rackoff)


@dataclass(frozen=True)
class Order:
    """The order of the sequences of a split."""

    lengths: Ints  # (S,) tokens of each shard
    block_size: int
    shuffle: Shuffle
    group: int  # shards of a group, at most
    seed: int
    fingerprint: str

    def __post_init__(self) -> None:
        if not (self.lengths > self.block_size).any():
            longest = int(self.lengths.max(initial=0))
            raise DataError(
                f"the longest shard has {longest:,} tokens, fewer than one sequence of "
                f"model.block_size + 1 = {self.block_size + 1:,}; give more text or a smaller "
                "block_size"
            )

    @cached_property
    def counts(self) -> Ints:
        """(S,) sequences of each shard in every epoch: as many as fit at any offset below T."""
        fits = np.maximum(self.lengths // self.block_size - 1, 1)
        counts: Ints = np.where(self.lengths > self.block_size, fits, 0)
        return counts

    @cached_property
    def sequences_per_epoch(self) -> int:
        """N."""
        return int(self.counts.sum())

    def locate(self, k: Ints) -> tuple[Ints, Ints]:
        """Shard and first token of the sequences number `k`: two arrays shaped like `k`."""
        if self.shuffle == "replacement":
            return self.random_crops(k)
        shard, start = np.empty_like(k), np.empty_like(k)
        epochs, index = np.divmod(k, self.sequences_per_epoch)
        for epoch in sorted(set(epochs.ravel().tolist())):
            here = epochs == epoch
            shard[here], start[here] = self.within_epoch(epoch, index[here])
        return shard, start

    def within_epoch(self, epoch: int, index: Ints) -> tuple[Ints, Ints]:
        """Shard and first token of the sequences `index` (0 to N - 1) of one epoch."""
        if self.shuffle == "global":
            index = permute(index, self.sequences_per_epoch, self.key(epoch, "windows"))
        shards = self.shard_order(epoch)
        counts = self.counts[shards]
        ends = np.cumsum(counts)
        if self.shuffle == "groups":
            index = self.within_groups(epoch, shards, index)
        slot = np.searchsorted(ends, index, side="right")
        shard, number = shards[slot], index - (ends - counts)[slot]
        return shard, self.offset(epoch, shard) + number * self.block_size

    def within_groups(self, epoch: int, shards: Ints, index: Ints) -> Ints:
        """`index`, permuted within each group of the `shards` in their order."""
        edges = self.groups(shards)[1]
        group = np.searchsorted(edges, index, side="right") - 1
        image = np.empty_like(index)
        for number in set(group.tolist()):
            here, first = group == number, edges[number]
            size, key = int(edges[number + 1] - first), self.key(epoch, f"group {number}")
            image[here] = first + permute(index[here] - first, size, key)
        return image

    def groups(self, shards: Ints) -> tuple[Ints, Ints]:
        """Where each group begins in `shards`, and its first sequence; then the ends: S and N.

        Their sizes differ by one shard at most. A shard is a group of its own but for `groups`.
        """
        S, size = len(self.lengths), self.group if self.shuffle == "groups" else 1
        begins = np.arange(-(-S // size) + 1) * S // -(-S // size)
        return begins, np.concatenate(([0], np.cumsum(self.counts[shards])))[begins]

    def upcoming(self, k: int, count: int) -> list[int]:
        """Shards of the sequences from number `k` on, in order: the next `count` of them, those of
        two groups, or all where the order jumps between shards.
        """
        if self.shuffle in ("global", "replacement"):
            return np.flatnonzero(self.counts).tolist()
        count = 2 * self.group if self.shuffle == "groups" else count
        epoch, index = divmod(k, self.sequences_per_epoch)
        found: list[int] = []
        while len(found) < count and epoch <= k // self.sequences_per_epoch + 1:
            shards = self.shard_order(epoch)
            begins, edges = self.groups(shards)
            shards = shards[begins[np.searchsorted(edges, index, side="right") - 1] :]
            found += shards[self.counts[shards] > 0].tolist()
            epoch, index = epoch + 1, 0
        return found[:count]

    def shard_order(self, epoch: int) -> Ints:
        """(S,) shards in the order in which an epoch reads them, unless it jumps between them."""
        shards = np.arange(len(self.lengths))
        if self.shuffle in ("shards", "groups"):
            return permute(shards, len(shards), self.key(epoch, "shards"))
        return shards

    def offset(self, epoch: int, shard: Ints) -> Ints:
        """First token of the first sequence of each shard in this epoch, below T."""
        if epoch == 0:
            return np.zeros_like(shard)
        slack = self.lengths[shard] - 1 - self.counts[shard] * self.block_size
        choices = np.minimum(slack, self.block_size - 1) + 1
        draw = mix(shard.astype(np.uint64) ^ np.uint64(self.key(epoch, "offset")))
        first: Ints = (draw % choices.astype(np.uint64)).astype(np.int64)
        return first

    def random_crops(self, k: Ints) -> tuple[Ints, Ints]:
        """Independent sequences, every first token of every shard equally likely."""
        draw = mix(mix(k.astype(np.uint64)) ^ np.uint64(self.key(0, "crops")))
        ends = np.cumsum(np.maximum(self.lengths - self.block_size, 0))
        position = (draw % np.uint64(ends[-1])).astype(np.int64)
        shard = np.searchsorted(ends, position, side="right")
        return shard, position - np.where(shard > 0, ends[shard - 1], 0)

    def key(self, epoch: int, purpose: str) -> int:
        """64 bits that depend on everything the order may depend on."""
        return derive_seed(self.seed, self.fingerprint, epoch, purpose)


def derive_seed(*parts: int | str) -> int:
    """64 bits drawn from `parts`, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: Ints, size: int, key: int) -> Ints:
    """Image of `index` under a keyed permutation of 0 ... size - 1.

    A Feistel network on the smallest sufficient number of bits; values outside are sent through it
    again (cycle walking, Black & Rogaway 2002), twice on average at most.
    """
    bits = max(2, (size - 1).bit_length())
    value = index.astype(np.uint64)
    todo = np.ones(value.shape, dtype=bool)
    while todo.any():
        value[todo] = feistel(value[todo], bits, key)
        todo = value >= size
    return value.astype(np.int64)


def feistel(value: Words, bits: int, key: int) -> Words:
    """One pass of a keyed bijection on words of `bits` bits."""
    low_bits, high_bits = bits // 2, bits - bits // 2
    low, high = value & mask(low_bits), value >> np.uint64(low_bits)
    keys = mix(np.uint64(key) + np.arange(ROUNDS, dtype=np.uint64))
    for round_key in keys:
        high_mask = mask(high_bits)
        low, high = (high ^ mix(low ^ round_key)) & high_mask, low
        low_bits, high_bits = high_bits, low_bits
    return (high << np.uint64(low_bits)) | low


def mask(bits: int) -> np.uint64:
    """The word whose lowest `bits` bits are set."""
    return np.uint64((1 << bits) - 1)


def mix(word: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014): every bit depends on every other."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
