"""Compute the order of the training sequences from the seed, the data's fingerprint and k.

Sequence k of a source is `block_size + 1` tokens of one shard. It does not depend on the number of
ranks, the micro-batch or restarts, so k is the whole state. Its epoch is k // sequences_per_epoch.
Each epoch after the first cuts every shard at a new offset, so that a small corpus does not repeat
its sequences. Any k is located directly, without a stored permutation.

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
# Feistel rounds; an even number leaves both halves with their own widths. 4 suffice (Luby-Rackoff).
ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """Locate the sequences of a split in the order in which a run reads them."""

    lengths: Ints  # (S,) tokens of each shard
    block_size: int
    shuffle: Shuffle
    group: int  # largest number of shards in a group
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
        """Count the sequences of each shard in an epoch, (S,).

        This is the number that fits at the largest offset, T - 1, so all epochs have equal length.
        A shard below 2 T tokens has one sequence if it holds T + 1 tokens, else none.
        """
        fits = np.maximum(self.lengths // self.block_size - 1, 1)
        counts: Ints = np.where(self.lengths > self.block_size, fits, 0)
        return counts

    @cached_property
    def sequences_per_epoch(self) -> int:
        """Count the sequences of an epoch: N."""
        return int(self.counts.sum())

    def locate(self, k: Ints) -> tuple[Ints, Ints]:
        """Return the shard and first token of the sequences `k`, as two arrays shaped like `k`."""
        if self.shuffle == "replacement":
            return self.random_crops(k)
        shard = np.empty_like(k)
        start = np.empty_like(k)
        epochs, index = np.divmod(k, self.sequences_per_epoch)
        for epoch in sorted(set(epochs.ravel().tolist())):
            here = epochs == epoch
            shard[here], start[here] = self.within_epoch(epoch, index[here])
        return shard, start

    def within_epoch(self, epoch: int, index: Ints) -> tuple[Ints, Ints]:
        """Return the shard and first token of the sequences `index` (0 to N - 1) of one epoch."""
        if self.shuffle == "global":
            index = permute(index, self.sequences_per_epoch, self.key(epoch, "windows"))
        shards = self.shard_order(epoch)
        counts = self.counts[shards]
        ends = np.cumsum(counts)
        if self.shuffle == "groups":
            index = self.within_groups(epoch, shards, index)
        slot = np.searchsorted(ends, index, side="right")  # which of `shards` holds the sequence
        shard = shards[slot]
        starts = ends - counts
        number = index - starts[slot]  # index of the sequence within its shard
        return shard, self.offset(epoch, shard) + number * self.block_size

    def within_groups(self, epoch: int, shards: Ints, index: Ints) -> Ints:
        """Permute `index` within each group of `shards`; `shards` are in the order of the epoch."""
        _, edges = self.groups(shards)
        group = np.searchsorted(edges, index, side="right") - 1
        image = np.empty_like(index)
        for number in set(group.tolist()):
            here = group == number
            first = edges[number]
            size = int(edges[number + 1] - first)
            key = self.key(epoch, f"group {number}")
            image[here] = first + permute(index[here] - first, size, key)
        return image

    def groups(self, shards: Ints) -> tuple[Ints, Ints]:
        """Return the first shard and the first sequence of each group, as indices in the epoch.

        Both arrays end with the totals, S and N. Group sizes differ by at most one shard. Each
        shard is its own group unless `shuffle` is groups.
        """
        S = len(self.lengths)
        size = self.group if self.shuffle == "groups" else 1
        n_groups = -(-S // size)  # rounded up
        first_shards = np.arange(n_groups + 1) * S // n_groups
        sequences_before = np.concatenate(([0], np.cumsum(self.counts[shards])))  # (S + 1,)
        return first_shards, sequences_before[first_shards]

    def upcoming(self, k: int, count: int) -> list[int]:
        """List the next `count` shards to read from sequence `k` on, in order.

        With shuffle `groups` the list covers two groups, regardless of `count`. With `global` and
        `replacement`, which jump between shards, it has all shards.
        """
        if self.shuffle in ("global", "replacement"):
            return np.flatnonzero(self.counts).tolist()
        if self.shuffle == "groups":
            count = 2 * self.group
        epoch, index = divmod(k, self.sequences_per_epoch)
        found: list[int] = []
        while len(found) < count and epoch <= k // self.sequences_per_epoch + 1:
            shards = self.shard_order(epoch)
            first_shards, edges = self.groups(shards)
            group = np.searchsorted(edges, index, side="right") - 1
            shards = shards[first_shards[group] :]
            found += shards[self.counts[shards] > 0].tolist()
            epoch += 1
            index = 0
        return found[:count]

    def shard_order(self, epoch: int) -> Ints:
        """Return the shards (S,) in the order in which an epoch reads them.

        With shuffle `none`, `global` and `replacement` this is the order of the data folder.
        """
        shards = np.arange(len(self.lengths))
        if self.shuffle in ("shards", "groups"):
            return permute(shards, len(shards), self.key(epoch, "shards"))
        return shards

    def offset(self, epoch: int, shard: Ints) -> Ints:
        """Return the offset at which each shard is cut in this epoch: 0 to T - 1."""
        if epoch == 0:
            return np.zeros_like(shard)
        slack = self.lengths[shard] - 1 - self.counts[shard] * self.block_size
        choices = np.minimum(slack, self.block_size - 1) + 1
        draw = mix(shard.astype(np.uint64) ^ np.uint64(self.key(epoch, "offset")))
        first: Ints = (draw % choices.astype(np.uint64)).astype(np.int64)
        return first

    def random_crops(self, k: Ints) -> tuple[Ints, Ints]:
        """Draw independent sequences: each possible first token of any shard is equally likely."""
        draw = mix(mix(k.astype(np.uint64)) ^ np.uint64(self.key(0, "crops")))
        ends = np.cumsum(np.maximum(self.lengths - self.block_size, 0))
        position = (draw % np.uint64(ends[-1])).astype(np.int64)
        shard = np.searchsorted(ends, position, side="right")
        return shard, position - np.where(shard > 0, ends[shard - 1], 0)

    def key(self, epoch: int, purpose: str) -> int:
        """Derive a 64-bit key from the seed, the fingerprint, the epoch and the purpose."""
        return derive_seed(self.seed, self.fingerprint, epoch, purpose)


def derive_seed(*parts: int | str) -> int:
    """Derive a 64-bit seed from `parts`, equal on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: Ints, size: int, key: int) -> Ints:
    """Map `index` by a keyed permutation of 0 ... size - 1.

    A Feistel network permutes the smallest power of two that covers the range. A result outside
    the range goes through the network again (cycle walking, Black & Rogaway 2002). This takes at
    most two passes on average.
    """
    bits = max(2, (size - 1).bit_length())
    value = index.astype(np.uint64)
    todo = np.ones(value.shape, dtype=bool)
    while todo.any():
        value[todo] = feistel(value[todo], bits, key)
        todo = value >= size
    return value.astype(np.int64)


def feistel(value: Words, bits: int, key: int) -> Words:
    """Map each word of `bits` bits by a keyed bijection: a Feistel network of `ROUNDS` rounds."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = value & mask(low_bits)
    high = value >> np.uint64(low_bits)
    keys = mix(np.uint64(key) + np.arange(ROUNDS, dtype=np.uint64))
    for round_key in keys:
        mixed = (high ^ mix(low ^ round_key)) & mask(high_bits)
        low, high = mixed, low
        low_bits, high_bits = high_bits, low_bits
    return (high << np.uint64(low_bits)) | low


def mask(bits: int) -> np.uint64:
    """Return the word whose lowest `bits` bits are set."""
    return np.uint64((1 << bits) - 1)


def mix(word: Words) -> Words:
    """Mix the bits of each word with the finalizer of splitmix64 (Steele, Lea & Flood 2014)."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
