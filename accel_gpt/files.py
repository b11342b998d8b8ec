"""Files that exist completely or not at all, and the lock that waits."""

import fcntl
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


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
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except OSError as error:
        error.filename = str(file.name)  # Python names that of an open alone
        raise


def sha256(path: Path) -> str:
    """Hash of a file in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def wait_for_lock(path: Path, doing: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for it if need be; the file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"another process holds {path}; waiting until it has {doing}\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link_tree(folder: Path, to: Path) -> None:
    """A copy of a folder that takes no room where the file system has hard links."""
    shutil.copytree(folder, to, copy_function=link)


def link(source: str, target: str) -> None:
    """Copy a file, without its content where the file system has hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
