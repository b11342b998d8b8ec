"""Count where windows of tokens occur in a split, by 64-bit hashes, in one pass over its tokens.

The hash of tokens x_0 .. x_{n-1} is the sum of r[x_k] * BASE^k modulo 2^64, with a random number r
for each token. Sums of a prefix give the hashes of all windows of a chunk at once (Karp and Rabin
1987). A window collides with any of 10^8 others with a probability of 5e-12.

Legend: M tokens of a chunk, K keys, n tokens of a window.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel_gpt.data.loader import check_tokens
from accel_gpt.data.shards import Split, Tokens

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

CHUNK = 1 << 20  # tokens read at once
BASE = 0x9E3779B97F4A7C15  # an odd number has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 1 << 64)
MODULUS = 1 << 64
SLOT_BITS = 20  # of a key, which choose its slot in a `KeyTable`: 4 MiB of int32
SEED = 1  # of the random numbers


class Hasher:
    """Hashes all windows of a chunk of tokens."""

    def __init__(self, vocab_size: int) -> None:
        generator = np.random.default_rng(SEED)
        self.values = generator.integers(0, MODULUS - 1, vocab_size, np.uint64, endpoint=True)
        self.powers = powers(BASE, CHUNK)
        self.inverses = powers(INVERSE, CHUNK)

    def prefix(self, tokens: Tokens) -> Keys:
        """Return the sums of all prefixes of `tokens` (M,), as (M + 1,)."""
        if len(tokens) > len(self.powers):
            self.powers = powers(BASE, len(tokens))
            self.inverses = powers(INVERSE, len(tokens))
        sums = np.zeros(len(tokens) + 1, np.uint64)
        np.cumsum(self.values[tokens] * self.powers[: len(tokens)], out=sums[1:])
        return sums

    def keys(self, sums: Keys, n: int) -> Keys:
        """Return the key of each window of `n` tokens, by its start, from the sums of prefixes."""
        count = max(0, len(sums) - n)
        return (sums[n:] - sums[:count]) * self.inverses[:count]

    def rows(self, tokens: Tokens) -> Keys:
        """Return the key of each row of `tokens` (W, n), as (W,)."""
        return np.asarray((self.values[tokens] * self.powers[: tokens.shape[1]]).sum(axis=1))


def powers(base: int, count: int) -> Keys:
    """Return base^0 .. base^(count - 1) modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


class KeyTable:
    """Counts how often each of some keys occurs in a stream of keys."""

    def __init__(self, keys: Keys) -> None:
        ordered = np.sort(keys)
        self.keys = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
        self.counts = np.zeros(len(self.keys), np.int64)
        slots = self.keys >> np.uint64(64 - SLOT_BITS)
        self.first = np.full(1 << SLOT_BITS, -1, np.int32)  # of the keys in a slot
        starts = np.flatnonzero(np.diff(slots, prepend=np.uint64(MODULUS - 1)))
        self.first[slots[starts]] = starts
        ends = np.append(starts[1:], len(self.keys))
        self.longest = int((ends - starts).max(initial=0))  # most keys in one slot

    def count(self, keys: Keys) -> None:
        """Count the `keys` of the stream."""
        index = self.first[keys >> np.uint64(64 - SLOT_BITS)]
        possible = np.flatnonzero(index >= 0)
        keys = keys[possible]
        index = index[possible]
        for _ in range(self.longest):
            equal = self.keys[index] == keys
            self.counts += np.bincount(index[equal], minlength=len(self.keys))
            rest = np.flatnonzero(~equal)
            index = index[rest] + 1
            keys = keys[rest]
            inside = np.flatnonzero(index < len(self.keys))
            index = index[inside]
            keys = keys[inside]

    def counts_of(self, keys: Keys) -> Counts:
        """Return the count of each of `keys`, which must be keys of this table."""
        return self.counts[np.searchsorted(self.keys, keys)]


@dataclass
class Documents:
    """Hashes and lengths of the documents that end-of-text tokens end, across chunks and shards."""

    hashes: list[Keys] = field(default_factory=list)
    lengths: list[Counts] = field(default_factory=list)
    open_hash: int = 0  # of the document that goes on in the next chunk
    open_length: int = 0

    def leave_out(self) -> None:
        """Forget the open document: the next chunk does not follow the last one."""
        self.open_hash = 0
        self.open_length = 0

    def add(self, sums: Keys, inverses: Keys, ends: Counts) -> None:
        """Add a chunk with the `sums` of its prefixes, and end-of-text tokens at `ends`."""
        starts = np.append(0, ends + 1)
        stops = np.append(ends, len(sums) - 1)
        safe = np.minimum(starts, len(inverses) - 1)
        hashes = (sums[stops] - sums[np.minimum(starts, stops)]) * inverses[safe]
        lengths = np.maximum(stops - starts, 0)
        first = int(hashes[0]) * pow(BASE, self.open_length, MODULUS) + self.open_hash
        hashes[0] = first % MODULUS
        lengths[0] += self.open_length
        self.open_hash = int(hashes[-1])
        self.open_length = int(lengths[-1])
        self.hashes.append(hashes[:-1])
        self.lengths.append(lengths[:-1])

    @property
    def ends(self) -> int:
        """Return the number of end-of-text tokens so far."""
        return sum(map(len, self.hashes))

    def close(self) -> tuple[Keys, Counts]:
        """Return hashes and lengths of all documents that are not empty."""
        hashes = np.concatenate([*self.hashes, np.array([self.open_hash], np.uint64)])
        lengths = np.concatenate([*self.lengths, np.array([self.open_length])])
        return hashes[lengths > 0], lengths[lengths > 0]


@dataclass
class Scan:
    """What one pass over the tokens of a split counts."""

    tables: Mapping[int, KeyTable]  # window length -> table
    unigrams: Counts  # (V,)
    documents: Documents | None  # None: the tokenizer has no end-of-text token
    tokens: int = 0


def chunks(split: Split, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield shard, start and length of at most `most` tokens, evenly spread over the split."""
    every = []
    for shard, tokens in enumerate(split.lengths.tolist()):
        for start in range(0, tokens, CHUNK):
            every.append((shard, start, min(CHUNK, tokens - start)))
    wanted = min(len(every), max(1, len(every) * most // max(1, split.tokens)))
    for number in range(wanted):
        yield every[number * len(every) // wanted]


def place_in(split: Split, shard: int, start: int, row: int) -> tuple[Path, int]:
    """Return the file of a shard, and the index of the first token that was read."""
    return split.path(shard), start


def scan(split: Split, hasher: Hasher, tables: Mapping[int, KeyTable], most: int) -> Scan:
    """Count the windows of `tables` in at most `most` tokens of a split."""
    found = Scan(
        tables=tables,
        unigrams=np.zeros(len(hasher.values), np.int64),
        documents=None if split.eot_id is None else Documents(),
    )
    longest = max(tables)
    following = (0, 0)  # shard and token after the last chunk
    for shard, start, length in chunks(split, most):
        end = min(start + length + longest - 1, int(split.lengths[shard]))
        tokens = split.read(shard, start, end - start)
        check_tokens(tokens[None], len(hasher.values), partial(place_in, split, shard, start))
        sums = hasher.prefix(tokens)
        found.unigrams += np.bincount(tokens[:length], minlength=len(found.unigrams))
        for n, table in tables.items():
            table.count(hasher.keys(sums, n)[:length])
        if found.documents is not None:
            if (shard, start) != following:
                found.documents.leave_out()
            at_end = start + length == split.lengths[shard]
            following = (shard + 1, 0) if at_end else (shard, start + length)
            ends = np.flatnonzero(tokens[:length] == split.eot_id)
            found.documents.add(sums[: length + 1], hasher.inverses, ends)
        found.tokens += length
    return found
