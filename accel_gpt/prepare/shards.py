"""Write the token shards and the index of a data folder."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_gpt.data.index import FORMAT, INDEX, VERSION
from accel_gpt.data.shards import HEADER, Shard, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError
from accel_gpt.files import sha256, sync, write_file

BUFFER_BYTES = 1 << 20  # bytes collected before a write


class Group(NamedTuple):
    """The tokens of pieces of text, in order, with end-of-text after each document."""

    tokens: Tokens
    sizes: list[int]
    """Tokens of each piece."""
    documents: list[int]
    """Documents that count for each piece."""
    utf8_bytes: list[int]
    """Bytes of the text of each piece."""


class ShardWriter:
    """Write a stream of tokens into shards of `shard_tokens` tokens; the last shard is shorter.

    With a `state` that `save()` returned, resume from it and remove tokens written after it. Raises
    `DataError` if the files hold less than the state says.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.shards: list[Shard] = []
        # counts of the current shard
        self.tokens = 0
        self.documents = 0
        self.bytes = 0
        self.buffer = bytearray()  # tokens not yet written to the file
        if state is not None:
            self.resume(state)

    @property
    def path(self) -> Path:
        """Return the file of the current shard."""
        return self.folder / f"{self.split}_{len(self.shards):06d}.npy"

    @property
    def total_tokens(self) -> int:
        """Return the tokens in all shards."""
        return self.tokens + sum(shard.tokens for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Return the UTF-8 bytes of the text in all shards."""
        return self.bytes + sum(shard.bytes or 0 for shard in self.shards)

    def add(self, tokens: Tokens, documents: int, utf8_bytes: int) -> bool:
        """Append tokens; return whether a shard became full.

        `documents` and `utf8_bytes` count for the shard in which the tokens begin. A document
        continues in the next shard if the current shard is full.
        """
        before = len(self.shards)
        self.documents += documents
        self.bytes += utf8_bytes
        while len(tokens):
            if self.tokens == 0:
                self.path.write_bytes(bytes(HEADER))
            part = tokens[: self.shard_tokens - self.tokens]
            self.buffer += part.data
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self.tokens == self.shard_tokens:
                self.close_shard()
            elif len(self.buffer) >= BUFFER_BYTES:
                self.flush()
        return len(self.shards) > before

    def add_group(self, group: Group) -> bool:
        """Append the pieces of a group; return whether a shard became full."""
        if self.tokens + len(group.tokens) < self.shard_tokens:
            return self.add(group.tokens, sum(group.documents), sum(group.utf8_bytes))
        full = False
        start = 0
        for size, documents, utf8_bytes in zip(
            group.sizes, group.documents, group.utf8_bytes, strict=True
        ):
            full |= self.add(group.tokens[start : start + size], documents, utf8_bytes)
            start += size
        return full

    def cut_end(self, count: int, tokenizer: Tokenizer) -> tuple[Tokens, int, int]:
        """Remove about the last `count` tokens from the current shard, and return them.

        The cut is between two documents; if the shard holds only one, it is inside the document.
        Returns the tokens, documents and bytes for `add()` of another writer. The bytes are exact,
        unless the tokenizer changed the text: then they are the share of the decoded bytes.
        """
        eot_id = tokenizer.eot_id
        self.flush()
        tokens = np.fromfile(self.path, self.dtype, offset=HEADER)
        kept = self.tokens - count
        starts = np.flatnonzero(tokens[:-1] == eot_id) + 1  # all documents except the first
        if len(starts):
            kept = int(starts[np.argmin(abs(starts - kept))])
        os.truncate(self.path, HEADER + kept * self.dtype.itemsize)
        documents = max(1, int(sum(starts >= kept)))
        decoded = [decoded_bytes(part, tokenizer) for part in (tokens[:kept], tokens[kept:])]
        utf8_bytes = self.bytes * decoded[1] // max(1, sum(decoded))
        if eot_id is not None:  # a cut document counts where it ends; without eot_id, in both
            self.documents = max(0, self.documents - documents)
        self.tokens = kept
        self.bytes -= utf8_bytes
        return tokens[kept:], documents, utf8_bytes

    def save(self) -> dict[str, Any]:
        """Sync everything added so far to disk; return the state from which to resume."""
        if self.tokens:
            self.flush()
            sync(self.path)
        return {
            "shards": [entry(shard) for shard in self.shards],
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
        }

    def finish(self) -> list[Shard]:
        """Complete the last shard; return all shards in order."""
        if self.tokens:
            self.close_shard()
        return self.shards

    def flush(self) -> None:
        """Write the buffer to the file of the current shard."""
        with self.path.open("ab") as file:
            file.write(self.buffer)
        self.buffer.clear()

    def close_shard(self) -> None:
        """Write the header of the current shard, sync it to disk, and begin the next shard."""
        self.flush()
        path = self.path
        fields = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.tokens,)}
        with path.open("r+b") as file:
            np.lib.format.write_array_header_1_0(file, fields)
            assert file.tell() == HEADER
        sync(path)
        self.shards.append(
            Shard(
                name=path.name,
                tokens=self.tokens,
                documents=self.documents,
                bytes=self.bytes,
                sha256=sha256(path),
                max_token=int(np.memmap(path, self.dtype, "r", HEADER).max()),
            )
        )
        self.tokens = 0
        self.documents = 0
        self.bytes = 0

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, and truncate the current shard to it."""
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self.tokens = int(state["tokens"])
        self.documents = int(state["documents"])
        self.bytes = int(state["bytes"])
        for shard in self.shards:
            self.check_size(self.folder / shard.name, shard.tokens)
        if self.tokens:
            os.truncate(self.path, self.check_size(self.path, self.tokens))

    def check_size(self, path: Path, tokens: int) -> int:
        """Raise `DataError` if a file holds fewer than `tokens` tokens; return their file size."""
        size = HEADER + tokens * self.dtype.itemsize
        if not path.exists() or path.stat().st_size < size:
            raise DataError(f"{path.name} is missing, or shorter than the journal says")
        return size


def decoded_bytes(tokens: Tokens, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of the text of `tokens`, read in parts to save memory."""
    found = 0
    for start in range(0, len(tokens), BUFFER_BYTES):
        found += int(tokenizer.token_bytes[tokens[start : start + BUFFER_BYTES]].sum())
    return found


def write_index(
    folder: str | Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Sequence[Shard]],
    prepared: Mapping[str, Any],
    vocab_size: int | None = None,
) -> None:
    """Write dataset.json: the tokenizer, the shards, and the settings (`prepared`).

    `vocab_size`: all tokens are below it; None: the vocabulary of the tokenizer.
    """
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint},
        "vocab_size": vocab_size or tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "prepared": dict(prepared),
        "splits": {name: [entry(shard) for shard in shards] for name, shards in splits.items()},
    }
    content = json.dumps(index, indent=1) + "\n"
    write_file(Path(folder) / INDEX, [content.encode()])


def entry(shard: Shard) -> dict[str, Any]:
    """Return the index entry of a shard."""
    return {key: value for key, value in asdict(shard).items() if key not in ("offset", "sample")}
