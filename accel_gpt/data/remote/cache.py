"""Files fetched from elsewhere, kept on the local disk below a limit, shared by all processes.

Each source has a folder. Beside each of its files NAME lie .NAME.lock, which is locked while NAME
is fetched and then says what it is, and, meanwhile, .NAME.SIZE-TAG.part; a file *.lease, locked by
a process for as long as it lives, lists what that one needs now.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from accel_gpt.data.remote.stores import About
from accel_gpt.errors import UserError
from accel_gpt.files import sha256

NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
PART = rf"\.({NAME})\.(\d+)-[0-9a-f]{{8}}\.part"
FOLDER = r"[0-9a-f]{16}-[A-Za-z0-9._-]*"


class NoRoom(UserError):
    """What others need now leaves no room for a file."""


class Kept(NamedTuple):
    """A file, or a part of one, in the cache."""

    path: Path
    lock: Path
    key: str
    size: int
    used: int


@contextmanager
def locked(path: Path, block: bool = True) -> Iterator[IO[str] | None]:
    """The file `path`, made if need be and locked; None if it is locked already and not `block`."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield file


def record(lock: Path) -> dict[str, Any]:
    """What a lock file says of its file (size, mtime_ns, sha256, version, shard), {} if nothing."""
    try:
        found = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_record(lock: IO[str], path: Path, digest: str, version: str, shard: bool) -> None:
    """Say in a lock file what `path` is, as it is on the disk now."""
    stat = path.stat()
    what = {"sha256": digest, "version": version, "shard": shard}
    lock.truncate(0)
    lock.write(json.dumps({"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, **what}))
    lock.flush()


def intact(path: Path, about: About, lock: IO[str], shard: bool) -> bool:
    """Whether `path` is there as `about` tells, else it is removed; `lock` is its locked record.

    It is hashed where the record is not of its last change. A file of no known hash must be of the
    version that the store has now. `shard`: it may be evicted from now on.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    known = record(Path(lock.name))
    fresh = (known.get("size"), known.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns)
    if not fresh:
        known = {**known, "sha256": sha256(path)}
    same = stat.st_size == (about.size or stat.st_size)
    if about.sha256 is not None:
        same = same and known["sha256"] == about.sha256
    elif about.version:
        same = same and known.get("version") == about.version
    if not same:
        path.unlink()
    elif not fresh or (shard and not known.get("shard")):
        shard = shard or bool(known.get("shard"))
        write_record(lock, path, known["sha256"], known.get("version", ""), shard)
    return same


def touch(path: Path) -> None:
    """Note that a file is used now: its atime, so that the mtime tells whether it was changed."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


class Cache:
    """Folder of all that was fetched, kept below `limit` bytes.

    A file that another process has mapped may be removed: Linux keeps its content until then.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self.lease: int | None = None
        self.lease_path = root / f"{os.getpid()}-{secrets.token_hex(4)}.lease"
        self.held: frozenset[str] = frozenset()

    def hold(self, keys: Collection[str]) -> None:
        """Let nobody remove these (folder/name), until the next call or the end of the process."""
        needed = frozenset(keys)
        if needed == self.held:
            return
        with locked(self.root / ".lock"):
            if self.lease is None:
                self.lease = os.open(self.lease_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
                fcntl.flock(self.lease, fcntl.LOCK_EX)
            os.truncate(self.lease, 0)
            os.pwrite(self.lease, json.dumps(sorted(needed)).encode(), 0)
        for key in self.held - needed:
            touch(self.root / key)
        self.held = needed

    def release(self) -> None:
        """Hold nothing any more."""
        if self.lease is not None:
            self.lease_path.unlink(missing_ok=True)
            os.close(self.lease)
            self.lease, self.held = None, frozenset()

    def make_room(self, part: Path, size: int) -> None:
        """Create `part`, which counts as `size` bytes; `NoRoom` where the limit forbids it."""
        with locked(self.root / ".lock"):
            kept = [file for file in self.kept() if file.path != part]
            needed = sum(file.size for file in kept) + size
            victims = self.victims(kept, needed - self.limit)
            needed -= sum(file.size for file in victims)
            if needed > self.limit:
                raise NoRoom(
                    f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at "
                    f"once in {self.root}; set it above that"
                )
            for file in victims:
                file.path.unlink(missing_ok=True)
            part.touch()

    def evict_all(self) -> bool:
        """Remove all that nobody needs now, as the disk is full; whether there was any."""
        with locked(self.root / ".lock"):
            kept = self.kept()
            victims = self.victims(kept, sum(file.size for file in kept))
            for file in victims:
                file.path.unlink(missing_ok=True)
        return bool(victims)

    def victims(self, kept: list[Kept], excess: int) -> list[Kept]:
        """What was used least recently, of `excess` bytes or all that can go."""
        found: list[Kept] = []
        leased = self.leased() if excess > 0 else set()
        for file in sorted(kept, key=lambda file: file.used):
            if excess <= 0:
                break
            if file.key not in leased and self.removable(file):
                found.append(file)
                excess -= file.size
        return found

    def removable(self, file: Kept) -> bool:
        """Whether it is a shard, and not being fetched."""
        if file.path.suffix != ".part":
            return bool(record(file.lock).get("shard"))
        with locked(file.lock, block=False) as lock:
            return lock is not None

    def kept(self) -> list[Kept]:
        """Files that were fetched, and parts of such, in the folders of all URLs."""
        found = []
        for folder in self.root.iterdir():
            if not re.fullmatch(FOLDER, folder.name) or not folder.is_dir():
                continue
            entries = {entry.name: entry for entry in os.scandir(folder)}
            for entry in entries.values():
                part = re.fullmatch(PART, entry.name)
                name = part[1] if part else entry.name
                if f".{name}.lock" in entries and (part or re.fullmatch(NAME, name)):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        size = int(part[2]) if part else stat.st_size
                        lock = folder / f".{name}.lock"
                        key = f"{folder.name}/{name}"
                        found.append(Kept(Path(entry.path), lock, key, size, stat.st_atime_ns))
        return found

    def leased(self) -> set[str]:
        """What the living processes hold."""
        keys: set[str] = set()
        for path in self.root.glob("*.lease"):
            with locked(path, block=False) as dead:
                if dead is None:
                    keys.update(json.loads(path.read_text() or "[]"))
                else:
                    path.unlink(missing_ok=True)
        return keys
