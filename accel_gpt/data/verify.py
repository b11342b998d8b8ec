"""Verify the token files of a run by their SHA-256, in the background, while it trains.

A shard with an entry in dataset.json must have the SHA-256 of that entry. A file of another project
must have the SHA-256 that an earlier launch of the run recorded. The same pass finds tokens beyond
the vocabulary, and files that hold only token 0. The cache verifies downloaded shards
(`remote.py`).

Reads and writes data_files.json in the run's folder: the SHA-256 of each verified file, with its
size, modification time and inode. If these three are unchanged, the file is not read again.
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path

import numpy as np

from accel_gpt.config.options import REQUIRED, option
from accel_gpt.data.index import INDEX
from accel_gpt.data.shards import Shard, Split, token_beyond
from accel_gpt.errors import DataError
from accel_gpt.files import write_file
from accel_gpt.launcher import is_main
from accel_gpt.records import load_record_or_none

RECORD = "data_files.json"
BLOCK = 4 << 20  # bytes read at once, a multiple of every token size
FEWEST = 16  # tokens; a shorter file may hold only token 0
RECORD_SECONDS = 30.0  # between two writes of the record; assumption
CLOSE_SECONDS = 2.0  # longest wait for the thread at the end of a run; assumption


@dataclass(frozen=True)
class VerifiedFile:
    """An entry of data_files.json."""

    size: int
    mtime_ns: int = option(REQUIRED, "Modification time, nanoseconds.", at_most=2**64)
    inode: int = option(REQUIRED, "Inode.", at_most=2**64)
    sha256: str = option(REQUIRED, "SHA-256, hex.")


@dataclass(frozen=True)
class DataFile:
    """One local token file of a run."""

    path: Path
    split: Split
    shard: Shard

    @property
    def key(self) -> str:
        """Return the key of the file in the record; it does not depend on the folder's path."""
        return f"{self.split.fingerprint[:16]}/{self.shard.name}"


@dataclass(frozen=True)
class Content:
    """The result of reading one file."""

    sha256: str
    largest: int
    """The largest token."""
    beyond: tuple[int, int] | None
    """The first token beyond the vocabulary, and its index; None if there is none."""


class DataVerifier:
    """Verify each file of `splits` once per launch, on a thread of low priority.

    `folder`: the folder of the run. `accept_changes`: accept and record changed files of other
    projects. Only rank 0 writes the record.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        vocab_size: int,
        folder: Path,
        accept_changes: bool,
        log: Callable[[str], None],
    ) -> None:
        self.files = local_files(splits)
        self.vocab_size = vocab_size
        self.accept_changes = accept_changes
        self.record_path = folder / RECORD
        self.record = read_record(self.record_path, log)
        self.recorded = time.monotonic()
        self.changed = False  # the record differs from its file
        self.verified = 0  # files
        self.error: Exception | None = None
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.work, name="verifier", daemon=True)
        self.thread.start()

    def check(self, wait_seconds: float = 0.0) -> None:
        """Raise the error found so far, if any, after waiting up to `wait_seconds` for the thread.

        Raises `DataError` if a file was altered, cannot be read or holds invalid tokens.
        """
        self.thread.join(wait_seconds)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop the thread; the next launch verifies the remaining files."""
        self.closing.set()
        self.thread.join(CLOSE_SECONDS)

    def work(self) -> None:
        """Verify all files, and keep the first error for `check()`."""
        lower_priority()
        try:
            for file in self.files:
                self.verify(file)
                if self.closing.is_set():
                    break
                self.verified += 1
                if time.monotonic() - self.recorded > RECORD_SECONDS:
                    self.write_record()
        except Exception as error:
            self.error = error
        self.write_record()

    def verify(self, file: DataFile) -> None:
        """Verify one file and record it. Raises `DataError` if the file is not usable."""
        known = self.record.get(file.key)
        recorded = known.sha256 if known else None
        try:
            with file.path.open("rb") as opened:
                seen = describe_file(opened, sha256=file.shard.sha256 or recorded or "")
                if known == seen:
                    return
                content = self.read(opened, file)
        except OSError as error:
            raise DataError(
                f"{file.path} cannot be read: {error.strerror}; restore it and launch again"
            ) from None
        if content is None:
            return
        self.require_unaltered(file, content.sha256, recorded)
        if content.beyond is not None:
            token, index = content.beyond
            raise token_beyond(file.path, token, index, self.vocab_size)
        if content.largest == 0 and file.shard.tokens >= FEWEST:
            raise DataError(
                f"{file.path} holds only token 0, so its content was never written; prepare the "
                "data again"
            )
        self.record[file.key] = replace(seen, sha256=content.sha256)
        self.changed = True

    def require_unaltered(self, file: DataFile, found: str, recorded: str | None) -> None:
        """Raise `DataError` if the SHA-256 of a file differs from its index or the record."""
        if file.shard.sha256 not in (None, found):
            raise DataError(
                f"{file.path} was altered: its SHA-256 begins with {found[:12]}, but {INDEX} says "
                f"{file.shard.sha256[:12]}; restore the file or prepare the data again"
            )
        if file.shard.sha256 is None and recorded not in (None, found) and not self.accept_changes:
            raise DataError(
                f"{file.path} was altered: its SHA-256 begins with {found[:12]}, but an earlier "
                f"launch recorded {recorded[:12]}; restore the file, or accept it with "
                "--checkpoint.allow_change data.train"
            )

    def read(self, opened: BufferedReader, file: DataFile) -> Content | None:
        """Read a whole file; return None if `close()` is called meanwhile."""
        digest = hashlib.sha256(opened.read(file.shard.offset))
        buffer = bytearray(BLOCK)
        largest = 0
        beyond: tuple[int, int] | None = None
        index = 0  # of the first token of the block
        while size := opened.readinto(buffer):
            if self.closing.is_set():
                return None
            block = memoryview(buffer)[:size]
            digest.update(block)
            whole = size // file.split.dtype.itemsize
            if not whole:
                break
            tokens = np.frombuffer(buffer, file.split.dtype, whole)
            largest = max(largest, int(tokens.max()))
            if largest >= self.vocab_size and beyond is None:
                first = int(np.argmax(tokens >= self.vocab_size))
                beyond = int(tokens[first]), index + first
            index += whole
        return Content(digest.hexdigest(), largest, beyond)

    def write_record(self) -> None:
        """Write the record if it changed, on rank 0. A failed write does not end the run."""
        if self.changed and is_main():
            with contextlib.suppress(OSError):
                content = {key: asdict(entry) for key, entry in self.record.items()}
                write_file(self.record_path, [json.dumps(content, indent=1).encode()])
                self.changed = False
        self.recorded = time.monotonic()


def local_files(splits: Sequence[Split]) -> list[DataFile]:
    """List the local files of `splits`, each once; skip remote splits and splits in memory."""
    found: dict[Path, DataFile] = {}
    for split in splits:
        if split.remote is None and split.memory is None:
            for shard in split.shards:
                path = split.folder / shard.name
                found.setdefault(path, DataFile(path, split, shard))
    return list(found.values())


def describe_file(opened: BufferedReader, sha256: str) -> VerifiedFile:
    """Describe an open file by its size, modification time and inode, with the given SHA-256."""
    stat = os.fstat(opened.fileno())
    return VerifiedFile(
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        inode=stat.st_ino,
        sha256=sha256,
    )


def read_record(path: Path, log: Callable[[str], None]) -> dict[str, VerifiedFile]:
    """Read the record of earlier launches. If it is damaged, warn and return an empty record."""
    record = load_record_or_none(dict[str, VerifiedFile], path)
    if record is None and path.exists():
        log(f"WARNING: {path} is damaged; all data files are verified again")
    return record or {}


def lower_priority() -> None:
    """Lower the priority of this thread on Linux; other systems have no priority per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
