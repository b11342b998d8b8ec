"""Token shards and the index of a data folder, as they are written."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.data.index import FORMAT, INDEX, VERSION
from accel_gpt.data.shards import HEADER, Shard, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError
from accel_gpt.files import sha256, sync, write_file

UNRECORDED = (("keep_crlf", False),)  # settings that older folders lack
BUFFER_BYTES = 1 << 20  # few system calls, little memory


class ShardWriter:
    """Cuts a stream of documents into files of `shard_tokens` tokens, the last one shorter.

    With a `state` that `save` returned it resumes there: tokens written later are cut off. Raises
    `DataError` when the files hold less than the state says.
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
        # of the shard being written
        self.tokens = 0
        self.documents = 0
        self.bytes = 0
        self.buffer = bytearray()  # tokens that are not in the file yet
        if state is not None:
            self.resume(state)

    @property
    def path(self) -> Path:
        """File of the shard being written."""
        return self.folder / f"{self.split}_{len(self.shards):06d}.npy"

    @property
    def total_tokens(self) -> int:
        """Tokens of all shards."""
        return self.tokens + sum(shard.tokens for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of the text of all shards."""
        return self.bytes + sum(shard.bytes or 0 for shard in self.shards)

    def add(self, tokens: Tokens, documents: int, utf8_bytes: int) -> bool:
        """Append tokens; return whether a shard became full.

        Their `documents` and `utf8_bytes` count for the shard in which they begin. A document is
        cut only where a shard is full.
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

    def cut_end(self, count: int, eot_id: int | None) -> tuple[Tokens, int, int]:
        """Cut about the last `count` tokens off the shard being written, between two documents.

        A shard that holds one document is cut inside it. Returns tokens, documents and bytes for
        `add`; the bytes are estimated by the share of the tokens.
        """
        self.flush()
        tokens = np.fromfile(self.path, self.dtype, offset=HEADER)
        kept = self.tokens - count
        starts = np.flatnonzero(tokens[:-1] == eot_id) + 1  # of documents but the first
        if len(starts):
            kept = int(starts[np.argmin(abs(starts - kept))])
        os.truncate(self.path, HEADER + kept * self.dtype.itemsize)
        documents = max(1, int(sum(starts >= kept)))
        utf8_bytes = self.bytes * (self.tokens - kept) // self.tokens
        if eot_id is not None:  # a document counts where it ends
            self.documents -= documents
        self.tokens = kept
        self.bytes -= utf8_bytes
        return tokens[kept:], documents, utf8_bytes

    def save(self) -> dict[str, Any]:
        """Make all that was added survive a power cut; return the state from which to resume."""
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
        """Write the header of the current shard, make it safe on disk, and go to the next one."""
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
        """Bring the files back to a saved state."""
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self.tokens = int(state["tokens"])
        self.documents = int(state["documents"])
        self.bytes = int(state["bytes"])
        for shard in self.shards:
            self.check_size(self.folder / shard.name, shard.tokens)
        if self.tokens:
            os.truncate(self.path, self.check_size(self.path, self.tokens))

    def check_size(self, path: Path, tokens: int) -> int:
        """Raise `DataError` unless a file holds `tokens` tokens; return the bytes they take."""
        size = HEADER + tokens * self.dtype.itemsize
        if not path.exists() or path.stat().st_size < size:
            raise DataError(f"{path.name} holds less than was written to it")
        return size


def write_index(
    folder: str | Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Sequence[Shard]],
    prepared: Mapping[str, Any],
) -> None:
    """Write dataset.json: the tokenizer, the shards, and how they were made."""
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint},
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "prepared": {k: v for k, v in prepared.items() if (k, v) not in UNRECORDED},
        "splits": {name: [entry(shard) for shard in shards] for name, shards in splits.items()},
    }
    content = json.dumps(index, indent=1) + "\n"
    write_file(Path(folder) / INDEX, [content.encode()])


def entry(shard: Shard) -> dict[str, Any]:
    """Convert a shard to its entry in the index."""
    return {key: value for key, value in asdict(shard).items() if key != "offset"}
