"""Read token shards, local or remote.

A data folder of `prepare/` holds shards `{split}_{000000}.npy` (one dimension, uint16 or uint32),
tokenizer.json, and the index dataset.json.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from accel_gpt.damage import Expected, damage_of, find_damage
from accel_gpt.data.downloads import RemoteFolder
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.errors import DataError

Tokens = NDArray[Any]
Ints = NDArray[np.int64]

HEADER = 128  # bytes before the tokens in a shard that `prepare/` wrote
BLOCK = 4096  # bytes of one sampled block, a multiple of every token size
BLOCKS = 5  # blocks sampled from each shard: the first, the last, and three between


class NoSplit(DataError):
    """A data folder has no shards of a split."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of stored ids: 2 bytes if `vocab_size` is at most 65,536, else 4."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def data_error(damage: str) -> DataError:
    """Return the error for a damaged shard."""
    return DataError(f"shard {damage}; restore it, or prepare the data again")


def token_beyond(file: str | Path, token: int, index: int, vocab_size: int) -> DataError:
    """Return the error for a token beyond the vocabulary, at `index` of a file."""
    return DataError(
        f"{file} holds token {token} at index {index:,}, beyond the vocabulary of {vocab_size}; "
        "raise model.vocab_size above it, or prepare the data again"
    )


@dataclass(frozen=True)
class Shard:
    """One shard file. Fields are None if a file of another project does not say them."""

    name: str
    tokens: int
    documents: int | None = None
    """Documents that begin in this shard."""
    bytes: int | None = None
    """UTF-8 bytes of the documents that begin in this shard."""
    sha256: str | None = None
    """SHA-256 of the file, hex."""
    max_token: int | None = None
    offset: int = HEADER
    """Bytes before the first token."""
    sample: str | None = None
    """If there is no `sha256`: the `sampled_digest` of the file."""


@dataclass(frozen=True)
class Split:
    """The shards of one split; safe to read from several threads.

    A read opens its shards and closes them again: no number of shards needs many open files.
    """

    folder: Path
    name: str
    shards: tuple[Shard, ...]
    dtype: np.dtype[Any]
    """Type of the stored ids."""
    vocab_size: int
    eot_id: int | None
    tokenizer_kind: str
    tokenizer_fingerprint: str
    fingerprint: str
    """SHA-256 (hex) of the tokenizer's fingerprint, and each shard's token count and content."""
    remote: RemoteFolder | None = field(default=None, compare=False)
    """The folder to download the files from; None: they are in `folder`."""
    arrays: tuple[Tokens, ...] | None = field(default=None, repr=False, compare=False)
    """The tokens of each shard, if an array holds them and not a file."""
    checked: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Numbers of the shards whose header was checked."""

    @cached_property
    def lengths(self) -> Ints:
        """Return the tokens in each shard."""
        return np.array([shard.tokens for shard in self.shards], np.int64)

    @property
    def tokens(self) -> int:
        """Return the tokens in all shards together."""
        return int(self.lengths.sum())

    def path(self, number: int) -> Path:
        """Return the path of a shard; if the split is remote, its path in the cache."""
        name = self.shards[number].name
        return self.remote.path(name) if self.remote else self.folder / name

    def read(self, shard: int, start: int, length: int) -> Tokens:
        """Read tokens `start` to `start + length` of one shard, as `read_many()` does."""
        assert 0 <= start <= start + length <= self.shards[shard].tokens
        tokens: Tokens = self.read_many(np.array([shard]), np.array([start]), length)[0]
        return tokens

    def read_many(self, shard: Ints, start: Ints, length: int) -> Tokens:
        """Read `length` tokens of each `shard` (N,), from token `start` (N,) on, as (N, length).

        Raises `DataError` if a file cannot be read or does not match the index.
        """
        tokens = np.empty((len(shard), length), self.dtype)
        if self.arrays is not None:
            for row, number, first in zip(tokens, shard.tolist(), start.tolist(), strict=True):
                row[:] = self.arrays[number][first : first + length]
            if self.dtype.kind == "i" and tokens.size and tokens.min() < 0:
                number = int(shard[tokens.min(axis=1).argmin()])
                raise DataError(
                    f"{self.shards[number].name} holds token {tokens.min()}; return ids of 0 and "
                    "more"
                )
            return tokens
        first = (start * self.dtype.itemsize).tolist()  # bytes after the header
        rows_of = defaultdict[int, list[int]](list)
        for row, number in enumerate(shard.tolist()):
            rows_of[number].append(row)
        for number, rows in rows_of.items():
            path, file = self.open(number)
            try:
                for row in rows:
                    fill(tokens[row], path, file, self.shards[number].offset + first[row])
            finally:
                os.close(file)
        return tokens

    def open(self, number: int) -> tuple[Path, int]:
        """Open a shard for reading, after downloading it if it is remote; return its descriptor.

        Check its header the first time.
        """
        name = self.shards[number].name
        while True:
            path = self.remote.fetch(name) if self.remote else self.folder / name
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError as error:
                # another process may have removed a remote shard from the cache since
                if self.remote is None or path.exists():
                    raise data_error(damage_of(path, error)) from None
        try:
            self.check_header(number, path, file)
        except BaseException:
            os.close(file)
            raise
        return path, file

    def check_header(self, number: int, path: Path, file: int) -> None:
        """Raise `DataError` if the header of an open shard says something else than the index."""
        shard = self.shards[number]
        if number in self.checked:
            return
        if shard.name.endswith(".npy") and shard.offset > 0:
            with os.fdopen(file, "rb", closefd=False) as opened:
                dtype, tokens, _ = npy_header(path, opened)
            if (dtype.itemsize, tokens) != (self.dtype.itemsize, shard.tokens):
                raise DataError(
                    f"shard {path} holds {tokens} tokens of {dtype}, expected {shard.tokens} of "
                    f"{self.dtype}; prepare the data again"
                )
        self.checked.add(number)

    def prefetch(self, now: Sequence[int], then: Sequence[int] = ()) -> None:
        """Download remote shards in the background, first `now`, then `then`."""
        if self.remote is not None:
            needed, rest = ([self.shards[number].name for number in part] for part in (now, then))
            self.remote.prefetch(needed, rest)


def resident(split: Split, tokens: int | None) -> Split:
    """Return a split with its first `tokens` (None: all) in memory, plus one as the last target."""
    wanted = split.tokens if tokens is None else min(tokens + 1, split.tokens)
    before = np.cumsum(split.lengths) - split.lengths
    lengths = np.minimum(split.lengths, wanted - before)[before < wanted]
    arrays = tuple(split.read(i, 0, int(n)) for i, n in enumerate(lengths))
    shards = zip(split.shards, lengths.tolist(), strict=False)
    kept = tuple(
        replace(shard, tokens=length, bytes=(shard.bytes or 0) * length // shard.tokens)
        for shard, length in shards
    )
    return replace(split, shards=kept, remote=None, arrays=arrays)


def fill(row: Tokens, path: Path, file: int, first: int) -> None:
    """Fill `row` with the bytes of the open file at `path`, from byte `first` on."""
    try:
        found = more = os.preadv(file, [row.data], first)
        while more and found < row.nbytes:  # Linux reads at most 2 GiB per call
            more = os.preadv(file, [row.view(np.uint8)[found:].data], first + found)
            found += more
    except OSError as error:
        raise data_error(damage_of(path, error)) from None
    if found != row.nbytes:
        raise DataError(f"shard {path} became shorter during the run; restore it and launch again")


def npy_header(path: Path, file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
    """Return the type and number of tokens of the open .npy file `path`, and the bytes before.

    Raises `DataError` unless the file holds a one-dimensional array of integers.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, _, dtype = read(file)
    except OSError as error:
        raise data_error(damage_of(path, error)) from None
    except Exception as error:  # numpy may also raise errors of Python's parser
        raise DataError(f"{path} is not a valid .npy file: {error}; restore it") from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"{path} holds {dtype} of shape {shape}; expected a one-dimensional array of token ids"
        )
    return dtype, shape[0], file.tell()


def sampled_digest(path: Path, offset: int) -> str:
    """Return the SHA-256 (hex) of a few blocks of tokens: the first, the last, and some between.

    `offset`: bytes before the tokens.
    """
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        last = max(file.seek(0, os.SEEK_END) - offset - BLOCK, 0)
        starts = {last}
        for i in range(BLOCKS - 1):
            starts.add(last * i // (BLOCKS - 1) // 4 * 4)  # a multiple of every token size
        for start in sorted(starts):
            file.seek(offset + start)
            hasher.update(file.read(BLOCK))
    return hasher.hexdigest()


# --------------------------------------------------------------------------- opening


def open_split(folder: str | Path, split: str, remote: RemoteFolder | None = None) -> Split:
    """Open a split of a data folder, and check its index and the size of each shard.

    With `remote`, `folder` holds only the index and the tokenizer; shards are downloaded before
    they are read. Raises `UserError` if there is no folder, `DataError` if its data is not usable.
    """
    folder = Path(folder)
    index = read_index(folder)
    entries = index.splits.get(split)
    if not entries:
        known = ", ".join(index.splits) or "none"
        raise NoSplit(f"{folder / INDEX} lists no {split} shards; its splits: {known}")
    dtype = token_dtype(index.vocab_size)
    expected: list[Expected] = []
    for entry in entries:
        if entry.max_token >= index.vocab_size:
            raise DataError(
                f"shard {folder / entry.name} holds token {entry.max_token}, expected less than "
                f"vocab_size {index.vocab_size}: it was made with another tokenizer; prepare the "
                "data again"
            )
        size = HEADER + entry.tokens * dtype.itemsize
        if remote is None:
            expected.append(Expected(folder / entry.name, size))
        else:
            remote.expect(entry.name, size, entry.sha256)
    damage = find_damage(expected)
    if damage:
        raise data_error(damage)
    content = [index.tokenizer.fingerprint, [(entry.tokens, entry.sha256) for entry in entries]]
    return Split(
        folder=folder,
        name=split,
        shards=tuple(Shard(**vars(entry)) for entry in entries),
        dtype=dtype,
        vocab_size=index.vocab_size,
        eot_id=index.eot_id,
        tokenizer_kind=index.tokenizer.kind,
        tokenizer_fingerprint=index.tokenizer.fingerprint,
        fingerprint=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        remote=remote,
    )
