"""Data folders behind a URL. Their token shards are downloaded before use into a cache on disk.

Each URL has a folder in the cache. The name of a cached shard begins with a hash of its size and
content, so a shard that changes at its address gets another name. One process downloads a shard to
a .part file, the others wait for its lock. The cache has a size limit for shards. To make room it
removes those that were used longest ago: processes renew the time of change of shards in use.

Other files (index, tokenizer) are small. Each launch downloads them once, and falls back to the
copies of an earlier launch if the store is unreachable.

`hub_folder.py` has the folders in repositories of the Hub. fsspec reads all others.
"""

import contextlib
import hashlib
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accel_gpt.data.hub_client import is_offline
from accel_gpt.data.index import is_shard_name
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import locked_file, write_all

T = TypeVar("T")
SHARD_ENDINGS = (".npy", ".bin", ".ds")
CACHED = re.compile(r".+\.(npy|bin|ds)(\.part)?")  # names that count toward the limit of the cache
BLOCK = 1 << 24  # bytes requested from a store at once
CHUNK = 1 << 18  # bytes read and written at once
TIMEOUT_SECONDS = 60.0  # without a byte, of http
TRY_AGAIN = frozenset((408, 425, 429))  # of the statuses below 500
TRIES = 6
PAUSE_SECONDS = 1.0  # doubled after each try: half a minute in all
LONGEST_PAUSE_SECONDS = 30.0
ROOM_SECONDS = 60.0  # for which a shard waits for room in the cache
UNUSED_SECONDS = 120.0  # after which a shard may be removed
RENEW_SECONDS = 20.0  # between two marks of a shard in use
CONTENT_TAGS = ("ETag", "etag", "md5Hash")  # as the stores of fsspec name them
TIMES = ("mtime", "LastModified", "Last-Modified", "created")


def is_url(path: str) -> bool:
    """Return whether `path` is a URL (scheme://...) and not a folder of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


class FileInfo(NamedTuple):
    """What is known of a file before it is downloaded."""

    size: int
    sha256: str | None = None
    tag: str = ""
    """Changes with the content alone; empty: the store has none."""
    changed: str = ""
    """When the file changed, for stores without tags."""


class Unreachable(Exception):
    """A failure that may be gone at the next try."""


class Missing(DataError):
    """There is no such file; some files are optional."""


class Refused(UserError):
    """The store requires other credentials; some stores also say so of files that do not exist."""


# --------------------------------------------------------------------------- what fsspec reads


class Store:
    """A folder behind a URL. Its methods raise `Unreachable`, or a `UserError` for what stays."""

    def __init__(self, url: str) -> None:
        self.full_url = url
        self.url = url.partition("?")[0].rstrip("/")
        self.protocol = url.partition("://")[0].lower()
        self.is_http = self.protocol in ("http", "https")

    @cached_property
    def system(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` if its package is missing."""
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {}
        if self.is_http:
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {
                "timeout": ClientTimeout(
                    total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS
                ),
                "trust_env": True,  # proxies
                "headers": {"Accept-Encoding": "identity"},
            }
        try:
            system, path = url_to_fs(self.full_url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"{self.url} cannot be read: {reason(error)}") from None
        return system, str(path)

    def locate(self, name: str) -> tuple[Any, str]:
        """File system and path of a file; the query of a URL stays at its end."""
        system, path = self.system
        folder, mark, query = path.partition("?")
        return system, f"{folder.rstrip('/')}/{name}{mark}{query}"

    def list(self) -> dict[str, FileInfo]:
        """List the files right in the folder."""
        if self.is_http:
            raise UserError(
                f"{self.url} has no dataset.json that can be read, and a web folder cannot be "
                "listed; give the URL of a folder made by data.prepare, or shards on hf://, s3:// "
                "or gs://"
            )
        with self.explained():
            system, path = self.system
            entries = system.ls(path.rstrip("/"), detail=True)
            files = [entry for entry in entries if entry["type"] == "file"]
            return {entry["name"].rpartition("/")[2]: file_info(entry) for entry in files}

    def download(self, name: str, target: Path) -> None:
        """Download a whole file."""
        with self.explained(name):
            system, path = self.locate(name)
            system.get_file(path, str(target))

    def read(self, name: str, start: int, size: int) -> Iterator[tuple[int, bytes]]:
        """Yield pieces of a file of `size` bytes, each with its position, from `start` on.

        A server without ranges begins at 0 again.
        """
        with self.explained(name):
            system, path = self.locate(name)
            if self.is_http:  # as a stream: without ranges a file is read whole
                headers = {"Range": f"bytes={start}-"} if start else {}
                file = system.open(path, "rb", block_size=0, size=size, headers=headers)
                start = start if file.r.status == 206 else 0
            else:
                file = system.open(path, "rb", block_size=BLOCK)
                file.seek(start)
            with file:
                while data := file.read(CHUNK):
                    yield start, data
                    start += len(data)
        if start < size:
            raise Unreachable(f"it broke off after {start} of {size} bytes")

    @contextlib.contextmanager
    def explained(self, name: str = "") -> Iterator[None]:
        """Turn whatever a file system raises into an `Unreachable` or a `UserError`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of aiohttp, botocore, huggingface_hub, ssl, ...
            raise self.explain(error, f"{self.url}/{name}".rstrip("/")) from None

    def explain(self, error: BaseException, where: str) -> Exception:
        """Return what to raise, by the type of an error and the status of the answer."""
        causes = [one for one in (error, error.__cause__, error.__context__) if one is not None]
        answers = [getattr(one, "response", one) for one in causes]
        codes = [getattr(one, "status_code", getattr(one, "status", None)) for one in answers]
        status = next((code for code in codes if isinstance(code, int)), 0)
        if self.protocol == "hf" and is_offline():  # a bucket: it has no cache
            return UserError(f"{where} cannot be read, as HF_HUB_OFFLINE is set; unset it")
        if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
            return Missing(f"{where} does not exist; check the address")
        if isinstance(error, PermissionError) or (400 <= status < 500 and status not in TRY_AGAIN):
            return Refused(
                f"{where} may not be read: {reason(error)}; check the address and your credentials"
            )
        return Unreachable(reason(error))


def reason(error: BaseException) -> str:
    """Return an error in one line, without the long queries of URLs that a store redirects to."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def file_info(entry: dict[str, Any]) -> FileInfo:
    """Return what fsspec lists of a file."""
    return FileInfo(
        size=entry.get("size") or 0,
        tag=next((str(entry[key]) for key in CONTENT_TAGS if entry.get(key)), ""),
        changed=next((str(entry[key]) for key in TIMES if entry.get(key)), ""),
    )


# --------------------------------------------------------------------------- the cache


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and checked.

    `cache_dir`: None for ~/.cache/accel_gpt/shards; `cache_gb`: its limit in 1e9 bytes. The first
    `prefetch` starts a thread.
    """

    tries = TRIES

    def __init__(self, url: str, cache_dir: str | None, cache_gb: float) -> None:
        self.store = Store(url)
        self.limit = int(cache_gb * 1e9)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.root = Path(cache_dir).expanduser() if cache_dir else home / "accel_gpt" / "shards"
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        self.cache = self.root / f"{short_hash(self.store.url)}-{last}"
        self.folder = self.cache  # of small files
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache {self.root} cannot be made: {error.strerror}; set data.cache_dir"
            ) from None
        self.infos: dict[str, FileInfo] = {}
        self.current: set[str] = set()  # small files that this process downloaded
        self.offline = False
        self.wanted: list[str] = []  # shards, in the order of need
        self.used: set[str] = set()  # shards that this process keeps in the cache
        self.releasing = threading.Lock()  # no shard is wanted again while it is released
        self.thread: threading.Thread | None = None
        self.changed = threading.Event()
        self.closed = False

    def expect(self, name: str, size: int, sha256: str | None) -> None:
        """Take what a shard must be from an index that was checked."""
        self.infos[name] = FileInfo(size, sha256)

    def list(self) -> dict[str, FileInfo]:
        """List the files of the folder; raises `UserError` if it cannot be listed."""
        self.infos.update(self.retry(self.store.list))
        return self.infos

    def fetch(self, name: str) -> Path:
        """Return the local copy of a file, which is downloaded if the cache does not hold it.

        Raises `DataError` if there is no such file or it cannot be downloaded, `UserError` if it
        may not be read or finds no room.
        """
        assert is_shard_name(name), name
        if name.endswith(SHARD_ENDINGS):
            return self.fetch_shard(name)
        return self.fetch_small_file(name)

    def fetch_small_file(self, name: str) -> Path:
        """Return the local copy of a file whose name does not tell its version."""
        path = self.folder / name
        if name in self.current:
            return path
        if self.offline:
            if not path.exists():
                raise Missing(f"{self.store.url}/{name} is not in {self.folder}; go online")
            return path
        part = self.folder / f".{name}.{os.getpid()}.part"
        try:
            self.retry(lambda: self.store.download(name, part), name)
            part.rename(path)
        except Missing:
            path.unlink(missing_ok=True)
            raise
        except DataError as error:
            if not path.exists():
                raise
            sys.stderr.write(f"{error}; going on with the copy in {self.folder}\n")
            self.offline = True
        finally:
            part.unlink(missing_ok=True)
        self.current.add(name)
        return path

    def fetch_shard(self, name: str, wait: bool = True) -> Path:
        """Return the local copy of a shard. `wait`: for room in the cache."""
        if name not in self.infos:
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        path = self.shard_path(name)
        try:
            with locked_file(lock_path(path)):  # others wait for the shard
                if not path.is_file() or path.stat().st_size != self.infos[name].size:
                    self.download_shard(name, path, wait)
                os.utime(path, follow_symlinks=False)
        except OSError as error:
            raise DataError(f"{name} cannot be kept in {self.cache}: {error}") from None
        self.used.add(name)
        return path

    def shard_path(self, name: str) -> Path:
        """Return where the version of a shard that is described is cached."""
        info = self.infos[name]
        version = info.sha256 or info.tag or info.changed
        return self.cache / f"{short_hash(f'{info.size} {version}')}-{name}"

    @property
    def description(self) -> str:
        """Return what the first lines of a run call the folder."""
        return self.store.url

    def path(self, name: str) -> Path:
        """Return where a shard is read once it has been fetched."""
        return self.shard_path(name)

    def room_needed(self, name: str) -> int:
        """Return the bytes that a shard needs in the cache."""
        return self.infos[name].size

    # ----------------------------------------------------------------------- prefetching

    def prefetch(self, now: Sequence[str], then: Sequence[str] = ()) -> None:
        """Download shards in the background: all of `now`, and of `then` while there is room.

        Other shards may be removed. Raises `UserError` if the cache cannot hold all of `now`.
        """
        wanted = list(dict.fromkeys(now))
        needed = sum(self.room_needed(name) for name in wanted)
        self.check_room(needed)
        for name in then:
            if name in wanted:
                continue
            needed += self.room_needed(name)
            if needed > self.limit:
                break
            wanted.append(name)
        changed = set(wanted) != set(self.wanted)
        with self.releasing:
            if changed:
                self.wanted = wanted
            for name in self.used - set(wanted):
                self.release(name)
        if not changed:
            return
        self.changed.set()
        if self.thread is None:
            self.thread = threading.Thread(target=self.download_wanted, name="remote", daemon=True)
            self.thread.start()

    def release(self, name: str) -> None:
        """Mark a shard so that any process may remove it."""
        self.used.discard(name)
        unused_since = time.time() - 2 * UNUSED_SECONDS
        with contextlib.suppress(OSError):  # it is gone, or belongs to another user
            os.utime(self.shard_path(name), (unused_since, unused_since), follow_symlinks=False)

    def download_wanted(self) -> None:
        """Download the wanted shards, and mark them as used, until closed."""
        while not self.closed:
            self.changed.clear()
            for name in self.wanted:
                if self.changed.is_set():
                    break
                with contextlib.suppress(UserError):  # raised when the shard is needed
                    self.fetch_shard(name, wait=False)
                with self.releasing:
                    if name in self.used and name not in self.wanted:  # any more
                        self.release(name)
            self.changed.wait(RENEW_SECONDS)

    def close(self) -> None:
        """End the thread after the shard that it is downloading; the cache stays."""
        self.closed = True
        self.prefetch([])
        self.changed.set()

    # ----------------------------------------------------------------------- downloading

    def download_shard(self, name: str, path: Path, wait: bool) -> None:
        """Download a shard, check it, and only then give it its name.

        Raises `UserError` if it may not be read, `DataError` if it was wrong each time. An
        `OSError` comes from the local disk.
        """
        info = self.infos[name]
        part = path.with_name(f".{path.name}.part")
        try:
            self.make_room(part, info.size, wait)
            with part.open("r+b", buffering=0) as file:
                self.retry(lambda: self.transfer(name, info, file), name)
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def transfer(self, name: str, info: FileInfo, file: FileIO) -> None:
        """Download the rest of a shard, from the position of `file` on; `Unreachable` if wrong."""
        for position, data in self.store.read(name, file.tell(), info.size):
            file.seek(position)
            write_all(file, memoryview(data))
        size = file.tell()
        file.truncate()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if size == info.size and info.sha256 in (None, digest):
            return
        file.seek(0)
        raise Unreachable(
            f"it came with {size} bytes of SHA-256 {digest}, expected {info.size} of {info.sha256}"
        )

    def retry(self, call: Callable[[], T], name: str = "") -> T:
        """Return the result of `call`, retried while it is `Unreachable`; then `DataError`."""
        for number in range(self.tries):
            try:
                return call()
            except Unreachable as error:
                problem = error
            if number < self.tries - 1:  # at random, so that many processes do not come at once
                longest = min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2.0**number)
                time.sleep(longest * random.uniform(0.5, 1))
        raise DataError(
            f"{self.store.url}/{name} could not be fetched in {self.tries} tries: {problem}; check "
            "the network and launch again"
        )

    # ----------------------------------------------------------------------- room

    def make_room(self, part: Path, size: int, wait: bool) -> None:
        """Create `part` with `size` bytes; raises `UserError` if shards in use leave no room."""
        end = time.monotonic() + (ROOM_SECONDS if wait else 0)
        while True:
            with locked_file(self.root / ".lock"):
                part.unlink(missing_ok=True)
                cached = cached_shards(self.root)
                needed = size + sum(path_size for _, path_size in cached)
                for path, path_size in cached:
                    if needed > self.limit and remove_unused(path):
                        needed -= path_size
                if needed <= self.limit:
                    with part.open("wb") as file:
                        file.truncate(size)
                    return
            if time.monotonic() > end:
                self.check_room(needed)
            time.sleep(ROOM_SECONDS / 100)

    def check_room(self, needed: int) -> None:
        """Raise `UserError` if the cache has no room for `needed` bytes."""
        require(
            needed <= self.limit,
            f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at once in "
            f"{self.root}; set it above that",
        )


def short_hash(text: str) -> str:
    """Return the first 16 digits of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lock_path(path: Path) -> Path:
    """Return the lock of a cached shard or of its download."""
    return path.with_name(f".{path.name.removeprefix('.').removesuffix('.part')}.lock")


def cached_shards(root: Path) -> list[tuple[Path, int]]:
    """List shards and their downloads in the folders of all URLs, with their sizes in bytes.

    The longest unused comes first. A link to a shard in the Hub's cache counts as the shard.
    """
    found = []
    for path in root.glob("[0-9a-f]" * 16 + "-*/*"):
        if CACHED.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.lstat().st_mtime, path, path.stat().st_size))
    return [(path, size) for _, path, size in sorted(found)]


def remove_unused(path: Path) -> bool:
    """Remove a shard that no process uses; return whether it is gone."""
    try:
        with locked_file(lock_path(path), wait=False):
            if time.time() - path.lstat().st_mtime < UNUSED_SECONDS:
                return False
            if path.is_symlink():
                remove_from_hub_cache(path.readlink())
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def remove_from_hub_cache(path: Path) -> None:
    """Remove a file from the Hub's cache: the link in the snapshot, and the blob that it leads to.

    The blob may be a link into a store that several repositories share. The file there stays if
    its list of links, NAME.refs, has another one.
    """
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    links = path.with_name(f"{path.name}.refs")
    if not links.exists() or len(set(links.read_text().split())) == 1:
        path.unlink(missing_ok=True)
