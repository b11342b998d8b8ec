"""Data folders behind a URL, downloaded file by file into a cache on the local disk.

Each URL has a folder in the cache. Beside each of its files NAME lie .NAME.lock, which is locked
while NAME is downloaded and then holds its hash and version, and .NAME.part, the download itself.
The first process to need a file downloads it, the others wait for the lock. When there is no room
below the limit, the shards go whose time of change is the oldest: processes renew it while they
need them.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accel_gpt.data.remote import FileInfo, Missing, Refused, Unreachable, open_store
from accel_gpt.data.shards import INDEX, Shard, read_index, token_dtype
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.files import LARGEST_TEXT, load_json, lock, write_all

T = TypeVar("T")
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
FOLDER = r"[0-9a-f]{16}-[A-Za-z0-9._-]*"
SHARDS = (".npy", ".bin", ".ds", ".part")  # endings of what may be removed to make room
CHUNK = 1 << 16  # bytes read at once; a TLS record has 2^14
PROGRESS = 1 << 20  # bytes; a try that got this much further is no failure of the server
CORRUPT = 3  # downloads of a file with a wrong hash before it is given up
RENEW = 20.0  # seconds after which what is needed is marked as used again


class Patience(NamedTuple):
    """Seconds and tries; with these a failure of half a minute is outlasted."""

    tries: int = 6
    first_pause: float = 1.0  # doubled after each try
    longest_pause: float = 30.0
    timeout: float = 60.0  # without a byte
    room: float = 60.0  # that a shard waits for room in the cache
    unused: float = 120.0  # after which a shard may be removed


class NoRoom(UserError):
    """What is in use leaves no room for a file."""


class Closed(DataError):
    """The folder was closed during a download."""


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and checked.

    `cache_dir`: None for ~/.cache/accel_gpt/shards; `cache_gb`: its limit in 1e9 bytes. The first
    `prefetch` starts a thread.
    """

    def __init__(
        self, url: str, cache_dir: str | None, cache_gb: float, patience: Patience | None = None
    ) -> None:
        self.patience = patience or Patience()
        self.store = open_store(url, self.patience.timeout)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.root = Path(cache_dir).expanduser() if cache_dir else home / "accel_gpt" / "shards"
        self.limit = int(cache_gb * 1e9)
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        digest = hashlib.sha256(self.store.url.encode()).hexdigest()[:16]
        self.folder = self.root / f"{digest}-{last}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache {self.root} cannot be made: {error.strerror}; set data.cache_dir"
            ) from None
        self.known: dict[str, FileInfo | None] = {}
        self.tags: dict[str, str] = {}  # of the files listed; they change with the content
        self.listed: dict[str, int] = {}  # bytes
        self.wanted: dict[str, Shard] = {}  # by name, in the order of need
        self.here: set[str] = set()  # files that this process checked
        self.thread: threading.Thread | None = None
        self.changed, self.closing = threading.Event(), threading.Event()

    # ----------------------------------------------------------------------- small files

    def has(self, name: str) -> bool:
        """Whether the folder has a file; one in the cache counts while the store is unreachable.

        Raises `UserError` where the folder may not be read, `DataError` where it is unreachable.
        """
        return self.info(name) is not None

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the folder; `UserError` where it cannot be listed."""
        found = self.retry(self.store.list, "").items()
        listed = {name: info for name, info in found if re.fullmatch(NAME, name)}
        self.tags = {name: info.sha256 or info.version for name, info in listed.items()}
        self.listed = {name: info.size or 0 for name, info in listed.items()}
        return dict(self.listed)

    def fetch(self, name: str) -> Path:
        """The local copy of a file, downloaded if the cache has none or another version."""
        info = self.info(name)
        if info is None:
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        if name.endswith(".json") and (info.size or 0) > LARGEST_TEXT:
            raise DataError(
                f"{self.store.url}/{name} has {info.size:,} bytes, expected at most "
                f"{LARGEST_TEXT:,}; it is not an index or a tokenizer"
            )
        return self.get(name, info)

    def info(self, name: str) -> FileInfo | None:
        """What the store knows of a file, requested once; None where it has no such file."""
        if name not in self.known:
            path = self.path(name)
            cached = record(path) if path.exists() else {}
            try:
                self.known[name] = self.retry(
                    lambda: self.store.info(name), name, tries=1 if cached else None
                )
            except Missing:
                self.known[name] = None
            except Refused:
                if name == INDEX:
                    raise
                self.known[name] = None  # S3 answers so for a missing file of what it does not list
            except Closed:
                raise
            except DataError as error:
                if not cached:
                    raise
                sys.stderr.write(f"{error}; going on with the copy in {self.folder}\n")
                self.known[name] = FileInfo(path.stat().st_size, cached.get("sha256"))
        return self.known[name]

    # ----------------------------------------------------------------------- shards

    def locate(self, shard: Shard) -> Path:
        """The file of a shard, downloaded if need be; `DataError` when that fails."""
        until = time.monotonic() + self.patience.room
        while True:
            try:
                return self.get(shard.name, self.expected(shard))
            except NoRoom:
                if time.monotonic() > until:
                    raise
                self.wait(self.patience.room / 100)
            except OSError as error:
                raise DataError(
                    f"shard {shard.name} cannot be kept in {self.folder}: {error}"
                ) from None

    def prefetch(self, now: Sequence[Shard], then: Sequence[Shard] = ()) -> None:
        """Download in the background what is needed now, then next as far as there is room.

        Other shards may be removed. Raises `UserError` when the cache cannot hold those of `now`.
        """
        wanted = {shard.name: shard for shard in now}
        needed = sum(map(self.size, now))
        if needed > self.limit:
            raise UserError(
                f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB of "
                f"{self.store.url} are needed at once; set it above that"
            )
        for shard in then:
            if shard.name not in wanted:
                needed += self.size(shard)
                if needed > self.limit:
                    break
                wanted[shard.name] = shard
        changed, self.wanted = wanted.keys() != self.wanted.keys(), wanted
        self.release()
        if changed:
            self.changed.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="remote", daemon=True)
                self.thread.start()

    def work(self) -> None:
        """Download what is wanted, and mark it as used, until closed."""
        while not self.closing.is_set():
            self.changed.clear()
            for shard in self.wanted.values():
                if self.changed.is_set():
                    break
                try:
                    self.get(shard.name, self.expected(shard))
                except (
                    AccelGPTError,
                    OSError,
                ):  # tried again, and raised where the shard is needed
                    continue
            self.changed.wait(min(RENEW, self.patience.unused / 4))

    def close(self) -> None:
        """End the thread, and whatever is being downloaded; the cache stays."""
        self.closing.set()
        self.changed.set()
        if self.thread is not None:
            self.thread.join(1.0)  # a read in progress ends with its time-out
        self.wanted = {}
        self.release()

    def expected(self, shard: Shard) -> FileInfo:
        """What a shard must be: by the index of the folder, or else by the store."""
        if shard.sha256 is not None:
            return FileInfo(self.size(shard), shard.sha256)
        info = self.info(shard.name)
        if info is None:
            raise Missing(f"{self.store.url}/{shard.name} does not exist; check the address")
        return info

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a token in shards of ours."""
        return token_dtype(int(read_index(self.folder)["vocab_size"])).itemsize

    def size(self, shard: Shard) -> int:
        """Bytes of a shard's file, by the index of the folder or else by the store."""
        if shard.sha256 is not None and (self.folder / INDEX).exists():
            return shard.offset + shard.tokens * self.itemsize
        if shard.name not in self.listed:
            info = self.info(shard.name)
            self.listed[shard.name] = (info and info.size) or 0
        return self.listed[shard.name]

    # ----------------------------------------------------------------------- one file

    def path(self, name: str) -> Path:
        """Where a file of the folder is kept; `DataError` for a name that could lead elsewhere."""
        if not re.fullmatch(NAME, name):
            raise DataError(
                f"{self.store.url} names a file {name!r}; expected letters, digits, '.', '_' "
                "and '-'"
            )
        return self.folder / name

    def get(self, name: str, info: FileInfo) -> Path:
        """A file as `info` describes it, marked as used; one process downloads, others wait."""
        path, part = self.path(name), self.folder / f".{name}.part"
        if name in self.here and mark(path):
            return path
        with lock(self.folder / f".{name}.lock") as held:
            if not matches(path, record(path), info):
                path.unlink(missing_ok=True)
                try:
                    self.make_room(part, info.size or 0)
                    digest = self.download(name, part, info)
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
                held.truncate(0)
                held.write(json.dumps({"sha256": digest, "version": info.version}))
                held.flush()
                part.rename(path)
            mark(path)
        self.here.add(name)
        return path

    def download(self, name: str, part: Path, info: FileInfo) -> str:
        """Fill the file `part`; its SHA-256 (hex), which is that of `info`.

        Raises `UserError` where the file may not be read, `DataError` where it never came right; an
        `OSError` is one of the local disk.
        """
        tries = best = wrong = count = 0
        digest = hashlib.sha256()
        with part.open("r+b", buffering=0) as file:
            while True:
                try:
                    for position, data in self.stream(name, count, info.size):
                        if position != count:  # the server begins anew
                            count, digest = 0, hashlib.sha256()
                        file.seek(count)
                        write_all(file, memoryview(data))
                        digest.update(data)
                        count += len(data)
                except Unreachable as error:
                    tries = tries + 1 if count < best + PROGRESS else 1
                    best = max(best, count)
                    self.pause(tries, self.patience.tries, name, error)
                    continue
                found = digest.hexdigest()
                if count == (info.size or count) and info.sha256 in (None, found):
                    file.truncate(count)
                    os.fsync(file.fileno())
                    return found
                wrong += 1
                if wrong == CORRUPT:
                    raise DataError(
                        f"{self.store.url}/{name} came {wrong} times with {count} bytes of SHA-256 "
                        f"{found}, expected {info.size} of {info.sha256}; it was changed: upload "
                        "it again"
                    )
                count, digest = 0, hashlib.sha256()

    def stream(self, name: str, start: int, size: int | None) -> Iterator[tuple[int, bytes]]:
        """Pieces of a file with their positions, from `start` or else from 0 on.

        Ends beyond `size`; raises `Unreachable` where the transfer ends before.
        """
        with self.explained(name):
            file, position = self.store.open(name, start)
            with contextlib.closing(file):
                if position not in (0, start):
                    raise Unreachable(f"the answer begins at byte {position}")
                while size is None or position <= size:
                    self.wait(0)
                    data = file.read(CHUNK)
                    if not data:
                        break
                    yield position, data
                    position += len(data)
                    if size is None and position > LARGEST_TEXT:
                        raise DataError(
                            f"{self.store.url}/{name} goes on after {LARGEST_TEXT:,} bytes, and "
                            "its server does not tell its size; serve the folder with "
                            "Content-Length"
                        )
        if size is not None and position < size:
            raise Unreachable(f"it broke off after {position} of {size} bytes")

    # ----------------------------------------------------------------------- tries

    def retry(self, call: Callable[[], T], name: str, tries: int | None = None) -> T:
        """The result of `call`, tried again while it is `Unreachable`; `DataError` in the end."""
        for number in itertools.count(1):
            try:
                with self.explained(name):
                    return call()
            except Unreachable as error:
                self.pause(number, tries or self.patience.tries, name, error)
        raise AssertionError

    def pause(self, tries: int, most: int, name: str, error: Unreachable) -> None:
        """Wait before the next try, at random so that many processes do not come at once;
        `DataError` after the last.
        """
        if tries >= most:
            raise DataError(
                f"{self.store.url}/{name} could not be fetched in {tries} tries: {error}; check "
                "the network and launch again"
            ) from None
        longest = min(self.patience.longest_pause, self.patience.first_pause * 2.0 ** (tries - 1))
        self.wait(longest * random.uniform(0.5, 1))

    def wait(self, seconds: float) -> None:
        """Sleep; `Closed` once the folder is closed."""
        if self.closing.wait(seconds):
            raise Closed(f"{self.store.url} was closed")

    @contextlib.contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Turn whatever a store raises into an `Unreachable` or a `UserError`."""
        try:
            yield
        except (AccelGPTError, Unreachable):
            raise
        except Exception as error:  # of urllib, http, ssl, fsspec, botocore, huggingface_hub
            raise self.store.explain(error, name) from None

    # ----------------------------------------------------------------------- room

    def make_room(self, part: Path, size: int) -> None:
        """Create `part` with `size` bytes; `NoRoom` where what is in use leaves no room for it."""
        with lock(self.root / ".lock"):
            part.unlink(missing_ok=True)
            kept = list(cached_files(self.root))
            excess = sum(stat.st_size for _, stat in kept) + size - self.limit
            for path, stat in sorted(kept, key=lambda entry: entry[1].st_mtime):
                unused = time.time() - stat.st_mtime > self.patience.unused
                if excess > 0 and unused and path.suffix in SHARDS and remove(path):
                    excess -= stat.st_size
            if excess > 0:
                raise NoRoom(
                    f"data.cache_gb is {self.limit / 1e9:g}, but {(self.limit + excess) / 1e9:g} "
                    f"GB are needed at once in {self.root}; set it above that"
                )
            with part.open("wb") as file:
                file.truncate(size)

    def release(self) -> None:
        """Let others remove what this process does not need any more."""
        for name in self.here - self.wanted.keys():
            if name.endswith(SHARDS):
                mark(self.folder / name, time.time() - 2 * self.patience.unused)
                self.here.discard(name)


def cached_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files that were downloaded, and those that are being, in the folders of all URLs."""
    for folder in root.iterdir():
        if re.fullmatch(FOLDER, folder.name) and folder.is_dir():
            for locked in folder.glob(".*.lock"):
                name = locked.name.removesuffix(".lock")
                for path in (folder / name[1:], folder / f"{name}.part"):
                    with contextlib.suppress(FileNotFoundError):
                        yield path, path.stat()


def remove(path: Path) -> bool:
    """Remove a file unless a process has it locked; whether it is gone."""
    name = path.name.removeprefix(".").removesuffix(".part")
    try:
        with lock(path.with_name(f".{name}.lock"), wait=False):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    return True


def mark(path: Path, used: float | None = None) -> bool:
    """Note when a file was used, now by default; whether it is there."""
    try:
        os.utime(path, None if used is None else (used, used))
    except FileNotFoundError:
        return False
    return True


def record(path: Path) -> dict[str, Any]:
    """What the lock of a file says of it (sha256, version), {} if nothing."""
    try:
        found = load_json(path.with_name(f".{path.name}.lock").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def matches(path: Path, known: dict[str, Any], info: FileInfo) -> bool:
    """Whether the file `path`, of which `known` was recorded, is what `info` describes."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if info.size not in (None, size):
        return False
    if info.sha256 is not None:
        return bool(known.get("sha256") == info.sha256)
    return not info.version or bool(known.get("version") == info.version)
