"""Token shards as they are written: straight to disk, so that a stopped writer can go on.

While a folder is made, shard i of a split is `{split}_{i:06d}.npy.part`; `finish` gives all of them
their names. At most `FLUSH_TOKENS` tokens wait in memory.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.data.shards import FORMAT, HEADER, INDEX, VERSION, Shard, Tokens
from accel_gpt.files import sha256, sync, write_all, write_file

FLUSH_TOKENS = 1 << 20  # 2 or 4 MiB: few system calls, little memory
FLUSH_ARRAYS = 1 << 16  # of perhaps one token each, with 112 bytes of overhead: 7 MiB
PART = ".part"  # ending of the shards of a folder that is not finished


class Stale(Exception):
    """What is on disk cannot be continued; the text says why."""


def header(dtype: np.dtype[Any], tokens: int) -> bytes:
    """What precedes the tokens in a .npy file: 128 bytes, as numpy pads it to a multiple of 64."""
    spelled = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({tokens},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{spelled:<117}\n".encode()


class ShardWriter:
    """Cuts a stream of documents into files of `shard_tokens` tokens, the last one shorter.

    With a `state` that `save` gave it goes on from there: what was written later is cut off.
    Raises `Stale` when the files hold less than the state says.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.split, self.dtype = Path(folder), split, dtype
        self.shard_tokens = shard_tokens
        self.shards: list[Shard] = []
        self.tokens = self.documents = self.bytes = self.max_token = 0  # of the shard begun last
        self.waiting: list[Tokens] = []
        self.flushed = 0  # tokens of that shard on disk
        self.hasher = hashlib.sha256()
        if state is not None:
            self.restore(state)

    def add(self, tokens: Tokens, documents: int, utf8_bytes: int) -> None:
        """Append `documents` documents of `utf8_bytes` bytes, which count for the shard where they
        begin; a document is parted only where a shard is full.
        """
        self.documents += documents
        self.bytes += utf8_bytes
        while len(tokens):
            part = tokens[: self.shard_tokens - self.tokens]
            self.waiting.append(part)
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self.tokens == self.shard_tokens:
                self.flush()
                self.close_shard(self.hasher.hexdigest())
            elif self.tokens - self.flushed >= FLUSH_TOKENS or len(self.waiting) >= FLUSH_ARRAYS:
                self.flush()

    def save(self) -> dict[str, Any]:
        """The state from which to go on, once all that was added survives a power cut."""
        self.flush()
        if self.tokens:
            sync(self.part(len(self.shards)))
        names = ("tokens", "documents", "bytes", "max_token")
        return {
            "shards": [entry(shard) for shard in self.shards],
            **{name: getattr(self, name) for name in names},
        }

    def finish(self) -> list[Shard]:
        """Write what is left and name the files; all shards in order."""
        self.flush()
        if self.tokens:
            path = self.part(len(self.shards))
            with path.open("r+b") as file:
                file.write(header(self.dtype, self.tokens))
            self.close_shard(sha256(path))
        for number, shard in enumerate(self.shards):
            self.part(number).rename(self.folder / shard.name)
        return self.shards

    def part(self, number: int) -> Path:
        """File of a shard before `finish`."""
        return self.folder / f"{self.split}_{number:06d}.npy{PART}"

    def flush(self) -> None:
        """Write the tokens that wait."""
        if not self.waiting:
            return
        tokens = np.concatenate(self.waiting)
        self.waiting = []
        self.max_token = max(self.max_token, int(tokens.max()))
        parts = [tokens.view(np.uint8).data]
        if not self.flushed:
            parts.insert(0, memoryview(header(self.dtype, self.shard_tokens)))
        path = self.part(len(self.shards))
        with path.open("ab" if self.flushed else "wb", buffering=0) as file:
            for part in parts:
                write_all(file, part)
                self.hasher.update(part)
        self.flushed += len(tokens)

    def close_shard(self, digest: str) -> None:
        """Count the shard as written; the next one begins."""
        path = self.part(len(self.shards))
        sync(path)
        name = path.name.removesuffix(PART)
        counts = (self.tokens, self.documents, self.bytes)
        self.shards.append(Shard(name, *counts, digest, self.max_token))
        self.tokens = self.documents = self.bytes = self.max_token = self.flushed = 0
        self.hasher = hashlib.sha256()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Bring the files back to a saved state."""
        self.shards = [Shard(**one) for one in state["shards"]]
        self.tokens, self.documents = int(state["tokens"]), int(state["documents"])
        self.bytes, self.max_token = int(state["bytes"]), int(state["max_token"])
        self.flushed = self.tokens
        for path in self.folder.glob(f"{self.split}_*.npy"):
            path.rename(f"{path}{PART}")
        lengths = [shard.tokens for shard in self.shards] + [self.tokens] * (self.tokens > 0)
        known = {self.part(number): length for number, length in enumerate(lengths)}
        for path in self.folder.glob(f"{self.split}_*.npy{PART}"):
            if path not in known:
                path.unlink()
        for path, length in known.items():
            size = HEADER + length * self.dtype.itemsize
            if not path.exists() or path.stat().st_size < size:
                raise Stale(f"{path.name} holds less than was written to it")
        if self.tokens:
            os.truncate(path, size)
            with path.open("r+b") as file:
                file.write(header(self.dtype, self.shard_tokens))
                file.seek(0)
                while data := file.read(1 << 20):
                    self.hasher.update(data)


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
        "splits": {name: [entry(shard) for shard in shards] for name, shards in splits.items()},
    }
    save_index(folder, index)


def save_index(folder: str | Path, index: Mapping[str, Any]) -> None:
    """Write dataset.json completely or not at all."""
    write_file(Path(folder) / INDEX, [(json.dumps(index, indent=1) + "\n").encode()])


def entry(shard: Shard) -> dict[str, Any]:
    """A shard of ours in the index."""
    return {key: value for key, value in asdict(shard).items() if key != "offset"}
