"""Data folders behind a URL, downloaded file by file into a cache on the local disk.

Each URL has a folder in the cache. Beside each of its files NAME lie .NAME.lock, which is locked
while NAME is downloaded and then holds its hash and version, and .NAME.part, the download itself.
The first process to need a file downloads it, the others wait for the lock. When there is no room
below the limit, the shards go whose time of change is the oldest: processes renew it while they
need them.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from accel_gpt.data.index import INDEX
from accel_gpt.data.remote import FileInfo, Missing, Refused, Store, Unreachable
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import lock, sha256, write_all
from accel_gpt.records import load_record_or_none

T = TypeVar("T")
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
SHARDS = (".npy", ".bin", ".ds", ".part")  # endings of what may be removed to make room
TRIES = 6
PAUSE = 1.0  # seconds, doubled after each try: half a minute in all
LONGEST_PAUSE = 30.0  # seconds
PROGRESS = 1 << 20  # bytes; a transfer that got this much further is no failure of the server
CORRUPT = 3  # downloads of a file with a wrong hash before it is given up
ROOM = 60.0  # seconds that a file waits for room in the cache
UNUSED = 120.0  # seconds until a shard that nobody needs may be removed
RENEW = 20.0  # seconds until a shard that is needed is marked again


@dataclass(frozen=True)
class Download:
    """What the lock of a downloaded file says of it."""

    sha256: str | None = None
    version: str = ""


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and checked.

    `cache_dir`: None for ~/.cache/accel_gpt/shards; `cache_gb`: its limit in 1e9 bytes. The first
    `prefetch` starts a thread.
    """

    def __init__(self, url: str, cache_dir: str | None, cache_gb: float) -> None:
        self.store = Store(url)
        self.limit = int(cache_gb * 1e9)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.root = Path(cache_dir).expanduser() if cache_dir else home / "accel_gpt" / "shards"
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        digest = hashlib.sha256(self.store.url.encode()).hexdigest()[:16]
        self.folder = self.root / f"{digest}-{last}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache {self.root} cannot be made: {error.strerror}; set data.cache_dir"
            ) from None
        self.infos: dict[str, FileInfo | None] = {}
        """What files must be, by an index or else by the store; None: there is no such file."""
        self.wanted: dict[str, None] = {}  # names, in the order of need
        self.checked: set[str] = set()  # names of files that this process found right
        self.thread: threading.Thread | None = None
        self.changed = threading.Event()
        self.closed = False
        self.offline = False

    def info(self, name: str) -> FileInfo | None:
        """Return what a file must be; None if the store has no such file. Requested once.

        While the store is unreachable, a file in the cache counts. Raises `UserError` if the folder
        may not be read, `DataError` if it is unreachable.
        """
        if name not in self.infos:
            path = self.path(name)
            cached = read_download(path) if path.exists() else None
            found: FileInfo | None = None
            try:
                found = self.retry(
                    lambda: self.store.info(name), name, once=cached is not None or self.offline
                )
            except Missing:
                pass
            except Refused:  # S3 answers so for a missing file of what it does not list
                if name == INDEX:
                    raise
            except DataError as error:
                if cached is None and not self.offline:
                    raise
                if not self.offline:
                    sys.stderr.write(f"{error}; going on with the copy in {self.folder}\n")
                self.offline = True
                found = FileInfo(path.stat().st_size, cached.sha256) if cached else None
            self.infos[name] = found
        return self.infos[name]

    def expect(self, name: str, size: int, sha256: str | None) -> None:
        """Take what a file must be from an index that was checked."""
        self.infos[name] = FileInfo(size, sha256)

    def list(self) -> dict[str, FileInfo]:
        """List the files of the folder; raises `UserError` if it cannot be listed."""
        listed = self.retry(self.store.list, "")
        found = {name: info for name, info in listed.items() if re.fullmatch(NAME, name)}
        self.infos.update(found)
        return found

    def fetch(self, name: str, wait: bool = True) -> Path:
        """Return the local copy of a file; downloads it if the cache has none or another one.

        `wait`: for room. Raises `DataError` if there is no such file or it cannot be downloaded,
        `UserError` if it may not be read or finds no room.
        """
        path = self.path(name)
        info = self.info(name)
        if info is None:
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        if name in self.checked and mark(path):
            return path
        try:
            with lock(self.folder / f".{name}.lock") as held:  # others wait for the file
                if not matches(path, info):
                    path.unlink(missing_ok=True)
                    part = self.folder / f".{name}.part"
                    digest = self.download(name, info, part, wait)
                    held.truncate(0)
                    held.write(json.dumps(asdict(Download(digest, info.version))))
                    held.flush()
                    part.rename(path)
                mark(path)
        except OSError as error:
            raise DataError(f"{name} cannot be kept in {self.folder}: {error}") from None
        self.checked.add(name)
        return path

    def prefetch(self, now: Sequence[str], then: Sequence[str] = ()) -> None:
        """Download in the background what is needed now, then next as far as there is room.

        Other shards may be removed. Raises `UserError` when the cache cannot hold those of `now`.
        """
        wanted = dict.fromkeys(now)
        needed = sum(map(self.size, wanted))
        self.check_room(needed)
        for name in then:
            if name not in wanted:
                needed += self.size(name)
                if needed > self.limit:
                    break
                wanted[name] = None
        changed = wanted.keys() != self.wanted.keys()
        self.wanted = wanted
        for name in self.checked - wanted.keys():
            if name.endswith(SHARDS):  # let all processes remove what this one does not need
                mark(self.folder / name, time.time() - 2 * UNUSED)
                self.checked.discard(name)
        if changed:
            self.changed.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="remote", daemon=True)
                self.thread.start()

    def work(self) -> None:
        """Download what is wanted, and mark it as used, until closed."""
        while not self.closed:
            self.changed.clear()
            for name in self.wanted:
                if self.changed.is_set():
                    break
                with contextlib.suppress(UserError):  # raised where the file is needed
                    self.fetch(name, wait=False)
            self.changed.wait(RENEW)

    def close(self) -> None:
        """End the thread after the file that it is downloading; the cache stays."""
        self.closed = True
        self.prefetch([])
        self.changed.set()

    # ----------------------------------------------------------------------- one file

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 if the store does not know them."""
        info = self.info(name)
        return info.size or 0 if info else 0

    def path(self, name: str) -> Path:
        """Return where a file is kept; raises `DataError` for a name that could lead elsewhere."""
        if not re.fullmatch(NAME, name):
            raise DataError(
                f"{self.store.url} names a file {name!r}; expected letters, digits, '.', '_' "
                "and '-'"
            )
        return self.folder / name

    def download(self, name: str, info: FileInfo, part: Path, wait: bool) -> str:
        """Download a file to `part` and check it; return its SHA-256, hex.

        Raises `UserError` if the file may not be read, `DataError` if it was wrong each time. An
        `OSError` comes from the local disk.
        """
        try:
            self.make_room(part, info.size or 0, wait)
            with part.open("r+b", buffering=0) as file:
                for _ in range(CORRUPT):
                    self.retry(lambda: self.transfer(name, info, file), name)
                    count = file.tell()
                    file.truncate()
                    digest = sha256(part)
                    if count == (info.size or count) and info.sha256 in (None, digest):
                        os.fsync(file.fileno())
                        return digest
                    file.seek(0)
            raise DataError(
                f"{self.store.url}/{name} came {CORRUPT} times with {count} bytes of SHA-256 "
                f"{digest}, expected {info.size} of {info.sha256}; it was changed: upload it again"
            )
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def transfer(self, name: str, info: FileInfo, file: FileIO) -> None:
        """Download the rest of a file, from the position of `file` on."""
        while True:
            before = file.tell()
            try:
                for position, data in self.store.read(name, before, info.size):
                    file.seek(position)
                    write_all(file, memoryview(data))
                return
            except Unreachable:
                if file.tell() < before + PROGRESS:
                    raise

    def retry(self, call: Callable[[], T], name: str, once: bool = False) -> T:
        """Return the result of `call`, retried while it is `Unreachable`; then `DataError`."""
        tries = 1 if once else TRIES
        for number in range(1, tries + 1):
            try:
                return call()
            except Unreachable as error:
                problem = error
            longest = min(LONGEST_PAUSE, PAUSE * 2.0 ** (number - 1))
            if number < tries:  # at random, so that many processes do not come at once
                time.sleep(longest * random.uniform(0.5, 1))
        raise DataError(
            f"{self.store.url}/{name} could not be fetched in {tries} tries: {problem}; check the "
            "network and launch again"
        )

    # ----------------------------------------------------------------------- room

    def make_room(self, part: Path, size: int, wait: bool) -> None:
        """Create `part` with `size` bytes; raises `UserError` if files in use leave no room."""
        end = time.monotonic() + (ROOM if wait else 0)
        while True:
            with lock(self.root / ".lock"):
                part.unlink(missing_ok=True)
                kept = list(cached_files(self.root))
                needed = sum(stat.st_size for _, stat in kept) + size
                for path, stat in sorted(kept, key=lambda entry: entry[1].st_mtime):
                    unused = time.time() - stat.st_mtime > UNUSED
                    if needed > self.limit and unused and path.suffix in SHARDS and remove(path):
                        needed -= stat.st_size
                if time.monotonic() > end:
                    self.check_room(needed)
                if needed <= self.limit:
                    with part.open("wb") as file:
                        file.truncate(size)
                    return
            time.sleep(ROOM / 100)

    def check_room(self, needed: int) -> None:
        """Raise `UserError` if the cache has no room for `needed` bytes."""
        require(
            needed <= self.limit,
            f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at once in "
            f"{self.root}; set it above that",
        )


def cached_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield files that were or are being downloaded, in the folders of all URLs."""
    for locked in root.glob("[0-9a-f]" * 16 + "-*/.*.lock"):
        name = locked.name.removesuffix(".lock")
        for path in (locked.with_name(name[1:]), locked.with_name(f"{name}.part")):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()


def remove(path: Path) -> bool:
    """Remove a file unless a process has it locked; return whether it is gone."""
    name = path.name.removeprefix(".").removesuffix(".part")
    try:
        with lock(path.with_name(f".{name}.lock"), wait=False):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    return True


def mark(path: Path, used: float | None = None) -> bool:
    """Note when a file was used, now by default; return whether it exists."""
    try:
        os.utime(path, None if used is None else (used, used))
    except FileNotFoundError:
        return False
    return True


def read_download(path: Path) -> Download | None:
    """Read what the lock of a file says of its download; None if it says nothing."""
    return load_record_or_none(Download, path.with_name(f".{path.name}.lock"))


def matches(path: Path, info: FileInfo) -> bool:
    """Return whether the file `path` in the cache is what `info` describes."""
    if not path.is_file() or info.size not in (None, path.stat().st_size):
        return False
    known = read_download(path) or Download()
    if info.sha256 is not None:
        return known.sha256 == info.sha256
    return not info.version or known.version == info.version
