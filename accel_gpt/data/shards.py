"""Formats on disk: token shards and their index, written whole and read through memory maps.

A data folder holds `{split}_{000000}.npy` (one dimension, uint16 or uint32), tokenizer.json and
dataset.json, the index: tokenizer, vocabulary, and what each shard holds.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_gpt.errors import DataError, UserError

Tokens = NDArray[Any]

INDEX = "dataset.json"
FORMAT = "accel_gpt-dataset"
VERSION = 1
OPEN_MAPS = 64  # shards of a split that are mapped at once


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What ids are stored as: 2 bytes when the vocabulary is below 65,536, else 4."""
    return np.dtype("<u2" if vocab_size < 65536 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One shard file, as the index describes it."""

    name: str
    tokens: int
    documents: int
    """Documents that begin in this shard."""
    bytes: int
    """UTF-8 bytes of the documents that begin in this shard."""
    sha256: str
    """Of the file, hex."""
    max_token: int


@dataclass(frozen=True)
class Split:
    """The shards of one split, open for reading; safe to use from several threads."""

    folder: Path
    name: str
    shards: tuple[Shard, ...]
    vocab_size: int
    eot_id: int | None
    tokenizer_kind: str
    tokenizer_fingerprint: str
    fingerprint: str
    """SHA-256 (hex) of the tokenizer's fingerprint and each shard's tokens and hash."""
    lengths: NDArray[np.int64] = field(compare=False)
    """Tokens in each shard."""
    maps: OrderedDict[int, Tokens] = field(default_factory=OrderedDict, repr=False, compare=False)
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return int(self.lengths.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored ids."""
        return token_dtype(self.vocab_size)

    def read(self, shard: int, start: int, length: int) -> Tokens:
        """Tokens `start` to `start + length` of a shard, as a view of the mapped file.

        Raises `DataError` when the file is not what the index says.
        """
        assert 0 <= start <= start + length <= self.shards[shard].tokens
        return self.mapped(shard)[start : start + length]

    def mapped(self, shard: int) -> Tokens:
        """The whole shard; the one that was not used for longest is closed beyond `OPEN_MAPS`."""
        with self.lock:
            if shard not in self.maps:
                self.maps[shard] = map_shard(self.folder, self.shards[shard], self.dtype)
                if len(self.maps) > OPEN_MAPS:
                    self.maps.popitem(last=False)
            self.maps.move_to_end(shard)
            return self.maps[shard]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_split, (self.folder, self.name)


def map_shard(folder: Path, shard: Shard, dtype: np.dtype[Any]) -> Tokens:
    """The tokens of a shard file, checked against the index by its header alone."""
    path = folder / shard.name
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")  # np.load would open zip files too
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file that can be read: {error}") from None
    if (tokens.dtype, tokens.shape) != (dtype, (shard.tokens,)):
        raise DataError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; {INDEX} says {dtype} of shape "
            f"({shard.tokens},); prepare the data again"
        )
    return np.asarray(tokens)


# --------------------------------------------------------------------------- opening


def open_split(folder: str | Path, split: str) -> Split:
    """Open a split of a data folder after checks that read no shard.

    Raises `UserError` when there is no folder, `DataError` when it cannot be trained on.
    """
    folder = Path(folder)
    index = read_index(folder)
    where = folder / INDEX
    try:
        shards = tuple(Shard(**entry) for entry in index["splits"].get(split, ()))
        vocab_size, eot_id = int(index["vocab_size"]), index["eot_id"]
        kind, tokenizer = str(index["tokenizer"]["kind"]), str(index["tokenizer"]["fingerprint"])
        lengths = np.array([shard.tokens for shard in shards], np.int64)
        known = ", ".join(index["splits"])
        for shard in shards:
            check_shard(folder, shard, vocab_size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where} is damaged ({error!r}); prepare the data again") from None
    if not shards:
        raise DataError(f"{where} lists no shards of split {split}; it has: {known or 'none'}")
    content = json.dumps([tokenizer, [(shard.tokens, shard.sha256) for shard in shards]])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    return Split(folder, split, shards, vocab_size, eot_id, kind, tokenizer, fingerprint, lengths)


def read_index(folder: Path) -> dict[str, Any]:
    """Content of dataset.json, once it is known to be in a format that this code reads."""
    where = folder / INDEX
    if not folder.is_dir():
        raise UserError(
            f"data folder {folder} does not exist; give an existing one, or say how to make it "
            "in data.prepare (source, path, tokenizer)"
        )
    try:
        index = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {INDEX}; it is not a prepared data folder") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{where} is not valid JSON ({error}); prepare the data again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{where} is not an index of ours; expected format {FORMAT!r} in it")
    version = index.get("version")
    if version != VERSION:
        raise DataError(
            f"{where} has format version {version}; this code reads version {VERSION}: update "
            "accel_gpt, or prepare the data again"
        )
    return index


def check_shard(folder: Path, shard: Shard, vocab_size: int) -> None:
    """Check the name, the size of the file and the largest token of one shard."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", shard.name):
        raise DataError(
            f"{folder / INDEX} names a shard {shard.name!r}; expected a plain file name of letters,"
            " digits, '.', '_' and '-'"
        )
    path = folder / shard.name
    expected = len(header(token_dtype(vocab_size), shard.tokens))
    expected += shard.tokens * token_dtype(vocab_size).itemsize
    try:
        actual = os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"shard {path} of {expected} bytes cannot be found: {error.strerror}; restore it, or "
            "prepare the data again"
        ) from None
    if actual != expected:
        raise DataError(
            f"shard {path} has {actual} bytes, expected {expected}; it was "
            f"{'cut short' if actual < expected else 'changed'}: prepare the data again"
        )
    if shard.tokens < 1:
        raise DataError(f"shard {path} has {shard.tokens} tokens, expected at least 1")
    if not 0 <= shard.max_token < vocab_size:
        raise DataError(
            f"shard {path} holds token {shard.max_token}, expected less than vocab_size "
            f"{vocab_size}; it was made with another tokenizer"
        )


def header(dtype: np.dtype[Any], tokens: int) -> bytes:
    """What precedes the tokens in a .npy file: 128 bytes, as numpy pads it to a multiple of 64."""
    spelled = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({tokens},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{spelled:<117}\n".encode()


# --------------------------------------------------------------------------- writing


class ShardWriter:
    """Cuts a stream of documents into files of `shard_tokens` tokens, the last one shorter."""

    def __init__(
        self, folder: str | Path, split: str, dtype: np.dtype[Any], shard_tokens: int
    ) -> None:
        self.folder, self.split = Path(folder), split
        self.buffer = np.empty(shard_tokens, dtype)  # pages are taken as they are filled
        self.filled = self.documents = self.bytes = 0
        self.shards: list[Shard] = []

    def add(self, tokens: Tokens, documents: int, utf8_bytes: int) -> None:
        """Append `documents` documents of `utf8_bytes` bytes, which count for the shard where they
        begin; a document is parted only where a shard is full.
        """
        self.documents += documents
        self.bytes += utf8_bytes
        while len(tokens):
            part = tokens[: len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            tokens = tokens[len(part) :]
            if self.filled == len(self.buffer):
                self.close_shard()

    def finish(self) -> list[Shard]:
        """Write what is left; all shards in order."""
        if self.filled:
            self.close_shard()
        return self.shards

    def close_shard(self) -> None:
        """Write the buffer as the next shard."""
        tokens = self.buffer[: self.filled]
        name = f"{self.split}_{len(self.shards):06d}.npy"
        sha256 = write_file(self.folder / name, [header(tokens.dtype, len(tokens)), tokens.data])
        largest = int(tokens.max())
        shard = Shard(name, len(tokens), self.documents, self.bytes, sha256, largest)
        self.shards.append(shard)
        self.filled = self.documents = self.bytes = 0


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    """Write a file completely or not at all; its SHA-256 in hex."""
    temporary = path.with_name(f"{path.name}.tmp")
    hasher = hashlib.sha256()
    with temporary.open("wb", buffering=0) as file:
        for part in parts:
            hasher.update(part)
            write_all(file, memoryview(part).cast("B"))
        os.fsync(file.fileno())
    temporary.rename(path)
    return hasher.hexdigest()


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`; one call of the system writes at most 2 GB."""
    while data:
        data = data[file.write(data) or 0 :]


def write_index(
    folder: str | Path,
    *,
    kind: str,
    fingerprint: str,
    vocab_size: int,
    eot_id: int | None,
    splits: Mapping[str, Sequence[Shard]],
    prepared: Mapping[str, Any],
) -> None:
    """Write dataset.json: tokenizer (`kind`, `fingerprint`), shards, and how they were made."""
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"kind": kind, "fingerprint": fingerprint},
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "prepared": dict(prepared),
        "splits": {name: [asdict(shard) for shard in shards] for name, shards in splits.items()},
    }
    write_file(Path(folder) / INDEX, [(json.dumps(index, indent=1) + "\n").encode()])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for it if need be; the file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"another process holds {path}; waiting until it has prepared data\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
