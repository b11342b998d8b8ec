"""Verify the token files of a run by their SHA-256, in the background, while it trains.

A shard of ours must have the SHA-256 in its dataset.json. A file of another project must have the
SHA-256 that the first launch of the run recorded. The same pass finds tokens beyond the vocabulary
and files that hold nothing but token 0. Downloaded shards are verified by the cache (`remote.py`).

Reads and writes data_files.json in the run's folder: the SHA-256 of each verified file with its
size, time of change and inode. A file that still has all three is not read again.
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
FEWEST = 16  # tokens from which on nothing but token 0 is no text
RECORD_SECONDS = 30.0  # between two writes of the record; assumption
CLOSE_SECONDS = 2.0  # for which a run that ends waits for the thread; assumption


@dataclass(frozen=True)
class VerifiedFile:
    """A file in the record."""

    size: int
    mtime_ns: int = option(REQUIRED, "Time of change, nanoseconds.", at_most=2**64)
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
        """The name of the file in the record: the same wherever the folder is."""
        return f"{self.split.fingerprint[:16]}/{self.shard.name}"


@dataclass(frozen=True)
class Content:
    """What one pass over a file found."""

    sha256: str
    largest: int
    """The largest token."""
    beyond: tuple[int, int] | None
    """The first token beyond the vocabulary, and its index; None: there is none."""


class DataVerifier:
    """Verifies the files of `splits` on a thread of low priority, each once a launch.

    `folder`: the run's. `accept_changes`: record a changed file of another project and do not
    refuse it. Only rank 0 writes the record.
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
        """Raise what was found so far, after at most `wait_seconds` for the rest of the files.

        Raises `DataError` for a file that was altered, cannot be read or cannot be trained on.
        """
        self.thread.join(wait_seconds)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread; the next launch verifies the rest."""
        self.closing.set()
        self.thread.join(CLOSE_SECONDS)

    def work(self) -> None:
        """Verify all files; the training thread raises the error."""
        lower_priority()
        try:
            for file in self.files:
                self.verify(file)
                if self.closing.is_set():
                    break
                self.verified += 1
                if time.monotonic() - self.recorded > RECORD_SECONDS:
                    self.write_record()
        except Exception as error:  # whatever it is, the training thread must raise it
            self.error = error
        self.write_record()

    def verify(self, file: DataFile) -> None:
        """Verify one file and record it; `DataError` if it cannot be trained on."""
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
                f"{file.path} holds nothing but token 0: it was never written; make it again"
            )
        self.record[file.key] = replace(seen, sha256=content.sha256)
        self.changed = True

    def require_unaltered(self, file: DataFile, found: str, recorded: str | None) -> None:
        """Raise `DataError` if a file has another SHA-256 than its index or record says."""
        if file.shard.sha256 not in (None, found):
            raise DataError(
                f"{file.path} was altered: its SHA-256 begins with {found[:12]}, in {INDEX} with "
                f"{file.shard.sha256[:12]}; restore the file or prepare the data again"
            )
        if file.shard.sha256 is None and recorded not in (None, found) and not self.accept_changes:
            raise DataError(
                f"{file.path} was altered: its SHA-256 begins with {found[:12]}, at an earlier "
                f"launch with {recorded[:12]}; restore the file, or accept it with "
                "--checkpoint.allow_change data.train"
            )

    def read(self, opened: BufferedReader, file: DataFile) -> Content | None:
        """Read a file from its beginning to its end; None if the run ends meanwhile."""
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
        """Write the record if rank 0 verified files; a disk that is full does not end the run."""
        if self.changed and is_main():
            with contextlib.suppress(OSError):
                content = {key: asdict(entry) for key, entry in self.record.items()}
                write_file(self.record_path, [json.dumps(content, indent=1).encode()])
                self.changed = False
        self.recorded = time.monotonic()


def local_files(splits: Sequence[Split]) -> list[DataFile]:
    """List the files of `splits`, each once, without files that are downloaded or in memory."""
    found: dict[Path, DataFile] = {}
    for split in splits:
        if split.remote is None and split.memory is None:
            for shard in split.shards:
                path = split.folder / shard.name
                found.setdefault(path, DataFile(path, split, shard))
    return list(found.values())


def describe_file(opened: BufferedReader, sha256: str) -> VerifiedFile:
    """Return what changes with the content of a file, and is known without reading it."""
    stat = os.fstat(opened.fileno())
    return VerifiedFile(
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        inode=stat.st_ino,
        sha256=sha256,
    )


def read_record(path: Path, log: Callable[[str], None]) -> dict[str, VerifiedFile]:
    """Read the verified files of earlier launches; none, with a warning, if it is damaged."""
    record = load_record_or_none(dict[str, VerifiedFile], path)
    if record is None and path.exists():
        log(f"WARNING: {path} is damaged; all data files are verified again")
    return record or {}


def lower_priority() -> None:
    """Let other threads run before this one, where threads have priorities: on Linux."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
