"""Data folders behind a URL. Their token shards are downloaded before use into a cache on disk.

Each run has its own cache on each machine, with a size limit for shards. To make room, it removes
shards that the run does not need soon, then those that it needs last. The processes of a run on one
machine share the cache and download one shard at a time. A shard appears under its name when it is
complete and verified. The name begins with a hash of size and content, so a shard that changes at
its address gets another name. At the end of the run the cache is removed.

Other files (index, tokenizer) are small and downloaded at each launch.

`hub_folder.py` has the folders in repositories of the Hub. fsspec reads all others.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accel_gpt.data.hub_client import is_offline
from accel_gpt.data.index import is_shard_name
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import TOKEN_ENDINGS, cache_folder, locked_file

T = TypeVar("T")
TIMEOUT_SECONDS = 60.0  # without a byte, of http
TRY_AGAIN = frozenset((408, 425, 429))  # of the statuses below 500
TRIES = 6
PAUSE_SECONDS = 1.0  # doubled after each try: half a minute in all
LONGEST_PAUSE_SECONDS = 30.0
NOT_SOON = 1 << 30  # the place in the order of need of a shard that is not needed soon
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

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.full_url = url
        self.options = options or {}  # of the file system
        self.url = url.partition("?")[0].rstrip("/")
        self.protocol = url.partition("://")[0].lower()
        self.is_http = self.protocol in ("http", "https")

    @cached_property
    def system(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` if its package is missing."""
        from fsspec.core import url_to_fs

        options: dict[str, Any] = dict(self.options)
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
        """Download a file."""
        with self.explained(name):
            system, path = self.locate(name)
            system.get_file(path, str(target))

    def info(self, name: str) -> dict[str, Any]:
        """Return what fsspec says of a file before it is downloaded; see `file_info`."""
        with self.explained(name):
            system, path = self.locate(name)
            info: dict[str, Any] = system.info(path)
            return info

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


class Cache:
    """The cache of a run on this machine: a folder that holds at most `limit` bytes of shards.

    `folder`: None for ~/.cache/accel_gpt/shards. `run`: the folder of the run; None for a cache
    that this process alone uses and removes when it ends.
    """

    def __init__(self, folder: str | None, gb: float, run: str | None) -> None:
        base = Path(folder) if folder else cache_folder() / "shards"
        self.limit = int(gb * 1e9)
        self.needs: dict[Path, int] = {}  # 0: needed now; otherwise the place in the order of need
        base.mkdir(parents=True, exist_ok=True)
        if run is None:
            self.root = Path(tempfile.mkdtemp(dir=base))
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        else:
            self.root = base / short_hash(f"{Path(run).resolve()} {socket.gethostname()}")

    def make_room(self, size: int, need: int) -> None:
        """Remove shards until `size` bytes fit, but none that is needed as early as `need`.

        The caller holds the lock, so that no other process is downloading. Raises `UserError` if
        the shards that stay leave no room.
        """
        for part in self.root.glob("*/*.part"):  # of a process that was killed
            part.unlink(missing_ok=True)
        cached = [path for path in self.root.glob("*/*") if path.name.endswith(TOKEN_ENDINGS)]
        cached.sort(key=lambda path: self.needs.get(path, NOT_SOON), reverse=True)
        needed = size + sum(path.stat().st_size for path in cached)
        for path in cached:
            if needed <= self.limit or self.needs.get(path, NOT_SOON) <= need:
                break
            needed -= path.stat().st_size
            path.unlink()
        self.check_room(needed)

    def check_room(self, needed: int) -> None:
        """Raise `UserError` if the cache has no room for `needed` bytes."""
        require(
            needed <= self.limit,
            f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at once in "
            f"{self.root}; set it above that",
        )

    def remove(self) -> None:
        """Remove the cache with all files."""
        shutil.rmtree(self.root, ignore_errors=True)


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and verified.

    The first `prefetch` starts a thread.
    """

    tries = TRIES

    def __init__(self, url: str, cache: Cache) -> None:
        self.store = Store(url)
        self.cache = cache
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        self.shards = cache.root / f"{short_hash(self.store.url)}-{last}"
        self.folder = self.shards  # of small files
        self.infos: dict[str, FileInfo] = {}
        self.current: set[str] = set()  # small files that this process downloaded
        self.wanted: list[str] = []  # shards, in the order of need
        self.thread: threading.Thread | None = None
        self.changed = threading.Event()
        self.closed = False

    @property
    def description(self) -> str:
        """Return what the first lines of a run call the folder."""
        return self.store.url

    def expect(self, name: str, size: int, sha256: str | None) -> None:
        """Take what a shard must be from an index that was checked."""
        self.infos[name] = FileInfo(size, sha256)

    def list(self) -> dict[str, FileInfo]:
        """List the files of the folder; raises `UserError` if it cannot be listed."""
        self.infos.update(self.retry(self.store.list))
        return self.infos

    def path(self, name: str) -> Path:
        """Return the path of a shard in the cache."""
        info = self.infos[name]
        version = info.sha256 or info.tag or info.changed
        return self.shards / f"{short_hash(f'{info.size} {version}')}-{name}"

    def room_needed(self, name: str) -> int:
        """Return the bytes that a shard needs in the cache."""
        return self.infos[name].size

    def fetch(self, name: str) -> Path:
        """Return the local copy of a file, which is downloaded if the cache does not hold it.

        Raises `DataError` if there is no such file or it cannot be downloaded, `UserError` if it
        may not be read or finds no room.
        """
        assert is_shard_name(name), name
        if name.endswith(TOKEN_ENDINGS):
            return self.fetch_shard(name)
        return self.fetch_small_file(name)

    def fetch_small_file(self, name: str) -> Path:
        """Return the local copy of a file, which is downloaded once per launch."""
        path = self.folder / name
        if name not in self.current:
            self.shards.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{name}.{os.getpid()}")
            self.retry(lambda: self.download(name, part), name)
            part.replace(path)
            self.current.add(name)
        return path

    def fetch_shard(self, name: str, need: int = 0) -> Path:
        """Return the local copy of a shard. `need`: its place in the order of need."""
        if name not in self.infos:
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        path = self.path(name)
        if path.is_file():
            return path
        self.shards.mkdir(parents=True, exist_ok=True)
        with locked_file(self.cache.root / ".lock"):
            if not path.is_file():  # no other process has downloaded it meanwhile
                self.cache.make_room(self.infos[name].size, need)
                part = path.with_name(f"{path.name}.part")
                self.retry(lambda: self.download_verified(name, part), name)
                part.rename(path)
        return path

    def download_verified(self, name: str, part: Path) -> None:
        """Download a shard to `part`; raises `Unreachable` if its content is wrong."""
        self.download(name, part)
        info = self.infos[name]
        size = part.stat().st_size
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        if size != info.size or info.sha256 not in (None, digest):
            part.unlink()
            raise Unreachable(
                f"it came with {size} bytes of SHA-256 {digest}, expected {info.size} of "
                f"{info.sha256}"
            )

    def download(self, name: str, target: Path) -> None:
        """Download a file."""
        self.store.download(name, target)

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

    # ----------------------------------------------------------------------- prefetching

    def prefetch(self, now: Sequence[str], then: Sequence[str] = ()) -> None:
        """Download shards in the background: all of `now`, and of `then` while there is room.

        Other shards may be removed. Raises `UserError` if the cache cannot hold all of `now`.
        """
        self.cache.check_room(sum(self.room_needed(name) for name in set(now)))
        wanted = list(dict.fromkeys([*now, *then]))
        for name in self.wanted:
            self.cache.needs.pop(self.path(name), None)
        for place, name in enumerate(wanted):
            self.cache.needs[self.path(name)] = 0 if name in now else place
        changed = set(wanted) != set(self.wanted)
        self.wanted = wanted
        if not changed:
            return
        self.changed.set()
        if self.thread is None:
            self.thread = threading.Thread(target=self.download_wanted, name="remote", daemon=True)
            self.thread.start()

    def download_wanted(self) -> None:
        """Download the wanted shards until closed."""
        while not self.closed:
            self.changed.clear()
            for place, name in enumerate(self.wanted):
                if self.changed.is_set():
                    break
                with contextlib.suppress(UserError, OSError):  # raised when the shard is needed
                    self.fetch_shard(name, need=place)
            self.changed.wait()

    def close(self) -> None:
        """End the thread after the shard that it is downloading; the cache stays."""
        self.closed = True
        self.changed.set()


def short_hash(text: str) -> str:
    """Return the first 16 digits of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
