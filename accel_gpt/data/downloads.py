"""Data folders behind a URL. Their token shards are downloaded before use into a cache on disk.

Each run has its own cache on each machine, with a size limit for shards. To make room, it removes
shards that the run does not need soon, then those that it needs last. The processes of a run on one
machine share the cache, and one of them downloads a shard. A shard appears under its name when it
is complete and verified. The name begins with a hash of size and content, so a shard that changes
at its address gets another name. At the end of the run the cache is removed.

    {cache}/{folder}/{key}-{name}               a shard
    {cache}/{folder}/{key}-{name}.{size}.part   a shard that is being downloaded; locked by the
                                                thread that downloads it
    {cache}/.lock                               locked while a process makes room

Each download is a thread. It is repeated while the store cannot be reached. Who needs the file
waits for the thread, at most `data.timeout`, and holds no lock meanwhile.

Other files (index, tokenizer) are small and downloaded at each launch; from a repository of the
Hub, into the Hub's cache (HF_HUB_CACHE). Shards that `hf download` put there are read in place.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Generic, TypeVar

from accel_gpt.data.index import INDEX, is_shard_name
from accel_gpt.data.remote import FileInfo, Missing, Store, Unreachable, short_hash
from accel_gpt.errors import DataError, UserError
from accel_gpt.files import TOKEN_ENDINGS, cache_folder, locked_file
from accel_gpt.hub import UnreachableError, download_snapshot, hub_errors, parse_url

T = TypeVar("T")
START_SECONDS = 30.0  # to read the index of a folder; a longer wait hides a typo; assumption
PAUSE_SECONDS = 1.0  # before the second try; doubled after each
LONGEST_PAUSE_SECONDS = 30.0
LOOK_SECONDS = 0.1  # between two looks at a shard that another process downloads
PART = ".part"
NOT_SOON = 1 << 30  # the place in the order of need of a shard that is not needed soon
SMALL_FILES = (INDEX, "tokenizer.json", "tokenizer_config.json")


class Busy(Unreachable):
    """Another download has the shard, or takes the room for it; looked at again soon."""


class NoRoom(UserError):
    """The cache has no room for a shard."""


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

    def make_room(self, path: Path, part: Path, size: int) -> None:
        """Remove shards until `size` bytes fit at `path`, but none that is needed as early.

        The caller holds the lock of the cache and of `part`. Raises `NoRoom` if the shards that
        stay leave no room, `Busy` if only downloads in progress take it.
        """
        need = self.needs.get(path, 0)
        reserved = self.reserved(except_for=part)
        cached = [path for path in self.root.glob("*/*") if path.name.endswith(TOKEN_ENDINGS)]
        cached.sort(key=lambda path: self.needs.get(path, NOT_SOON), reverse=True)
        needed = size + sum(path.stat().st_size for path in cached)
        for shard in cached:
            if needed + reserved <= self.limit or self.needs.get(shard, NOT_SOON) <= need:
                break
            needed -= shard.stat().st_size
            shard.unlink()
        self.check_room(needed)
        if needed + reserved > self.limit:
            raise Busy(f"other downloads take the room in {self.root}; raise data.cache_gb")

    def reserved(self, except_for: Path) -> int:
        """Return the bytes of the downloads in progress; remove what killed processes left."""
        total = 0
        for part in self.root.glob(f"*/*{PART}"):
            if part == except_for:
                continue
            try:
                with locked_file(part, wait=False):  # removes it
                    pass
            except BlockingIOError:
                total += int(part.suffixes[-2][1:])
        return total

    def check_room(self, needed: int) -> None:
        """Raise `NoRoom` if the cache has no room for `needed` bytes."""
        if needed > self.limit:
            raise NoRoom(
                f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at "
                f"once in {self.root}; set it above that"
            )

    def remove(self) -> None:
        """Remove the cache with all files."""
        shutil.rmtree(self.root, ignore_errors=True)


class Download(Generic[T]):
    """A call in a thread, repeated while it is `Unreachable` and somebody waits.

    `where`: what it fetches, in messages.
    """

    def __init__(self, call: Callable[[], T], where: str) -> None:
        self.call = call
        self.where = where
        self.until = 0.0  # the last moment at which somebody waits
        self.done = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None
        self.problem = "no answer yet"
        self.thread = threading.Thread(target=self.run, name="download", daemon=True)

    def want(self, seconds: float) -> None:
        """Go on for `seconds` from now on; start the thread at the first call."""
        self.until = max(self.until, time.monotonic() + seconds)
        if self.thread.ident is None:
            self.thread.start()

    def run(self) -> None:
        """Call until it succeeds or nobody waits; run by the thread."""
        pause = PAUSE_SECONDS
        while True:
            try:
                self.result = self.call()
                break
            except Unreachable as error:
                problem = error
                self.problem = str(error)
            except Exception as error:  # who waits raises it
                self.error = error
                break
            if time.monotonic() > self.until:
                break
            if isinstance(problem, Busy):
                time.sleep(LOOK_SECONDS)
            else:  # at random, so that many processes do not come at once
                time.sleep(min(pause, LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1))
                pause *= 2
        self.done.set()

    def wait(self, seconds: float, option: str = "") -> T:
        """Return the result; raise its error, or `DataError` after `seconds`, set by `option`."""
        self.want(seconds)
        if self.done.wait(seconds) and self.error is not None:
            raise self.error
        if self.result is None:
            raise DataError(
                f"{self.where} could not be fetched within {seconds:g} s{option}: {self.problem}; "
                "check the network and launch again"
            )
        return self.result


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and verified.

    `timeout`: the longest wait for a shard, in seconds. The first `prefetch` starts a thread.
    """

    def __init__(self, url: str, cache: Cache, timeout: float) -> None:
        # `Download` repeats a request: botocore would do so for up to a minute, without a word
        is_s3 = url.startswith(("s3://", "s3a://"))
        self.store = Store(
            url, {"config_kwargs": {"retries": {"max_attempts": 0}}} if is_s3 else {}
        )
        self.cache = cache
        self.timeout = timeout
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        self.shards = cache.root / f"{short_hash(self.store.url)}-{last}"
        self.folder = self.shards  # of small files
        self.infos: dict[str, FileInfo] = {}
        self.current: set[str] = set()  # small files that this process downloaded
        self.wanted: list[str] = []  # shards, in the order of need
        self.downloads: dict[str, Download[Path]] = {}  # of shards
        self.starting = threading.Lock()  # held while `downloads` changes
        self.waiting: Download[Path] | None = None  # that a reader waits for
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
        self.infos.update(self.at_start(self.store.list))
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

    def at_start(self, call: Callable[[], T], name: str = "") -> T:
        """Return the result of a call that the start of a run waits for."""
        where = f"{self.store.url}/{name}".rstrip("/")
        return Download(call, where).wait(min(START_SECONDS, self.timeout))

    def fetch_small_file(self, name: str) -> Path:
        """Return the local copy of a file, which is downloaded once per launch."""
        path = self.folder / name
        if name in self.current:
            return path
        self.shards.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.{os.getpid()}")

        def call() -> Path:
            self.store.download(name, part)
            return part.replace(path)

        self.at_start(call, name)
        self.current.add(name)
        return path

    def fetch_shard(self, name: str) -> Path:
        """Return the local copy of a shard."""
        if name not in self.infos:
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        path = self.path(name)
        if path.is_file():
            return path
        try:
            return self.wait_for_shard(name)
        except NoRoom:  # the download began before the shard was needed this soon
            return self.wait_for_shard(name)

    @property
    def waits_for(self) -> str:
        """Return the shard that a reader waits for, and why; "" if it waits for none."""
        download = self.waiting
        return f"{download.where} ({download.problem})" if download else ""

    def wait_for_shard(self, name: str) -> Path:
        """Return the path of a shard when it has been downloaded."""
        self.waiting = self.start_download(name)
        try:
            return self.waiting.wait(self.timeout, " (data.timeout)")
        finally:
            self.waiting = None

    def start_download(self, name: str) -> Download[Path]:
        """Start the download of a shard unless it is in progress."""
        with self.starting:
            download = self.downloads.get(name)
            if download is None or download.done.is_set():
                where = f"{self.store.url}/{name}"
                download = Download(partial(self.download_shard, name), where)
                self.downloads[name] = download
            download.want(self.timeout)
        return download

    def download_shard(self, name: str) -> Path:
        """Download a shard; return its path. Raises `Busy` while another process downloads it."""
        path = self.path(name)
        size = self.infos[name].size
        part = path.with_name(f"{path.name}.{size}{PART}")
        self.shards.mkdir(parents=True, exist_ok=True)
        try:
            with locked_file(part, wait=False):
                if not path.is_file():  # no other process has downloaded it meanwhile
                    with locked_file(self.cache.root / ".lock"):
                        self.cache.make_room(path, part, size)
                    self.store.download(name, part)
                    self.verify(name, part)
                    part.rename(path)
        except BlockingIOError:
            raise Busy("another process of the run downloads it") from None
        return path

    def verify(self, name: str, part: Path) -> None:
        """Raise `Unreachable` if a download has another size or content than expected."""
        info = self.infos[name]
        size = part.stat().st_size
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        if size != info.size or info.sha256 not in (None, digest):
            raise Unreachable(
                f"it came with {size} bytes of SHA-256 {digest}, expected {info.size} of "
                f"{info.sha256}"
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
            for name in self.wanted:
                if self.changed.is_set():
                    break
                if not self.path(name).is_file():
                    # an error is raised when the shard is needed
                    self.start_download(name).done.wait(self.timeout)
            self.changed.wait()

    def close(self) -> None:
        """End the thread; a download in progress ends with the process. The cache stays."""
        self.closed = True
        self.changed.set()


class HubFolder(RemoteFolder):
    """A data folder in a repository of the Hub, at one commit.

    `commit`: None for the newest commit of the revision in `url`; if the Hub cannot be reached, the
    newest commit in the Hub's cache. Raises `UserError` if the repository or the revision does not
    exist.
    """

    def __init__(self, url: str, cache: Cache, timeout: float, commit: str | None = None) -> None:
        super().__init__(url, cache, timeout)
        self.place = parse_url(url)
        snapshot = self.at_start(partial(self.download_small, SMALL_FILES, commit))
        self.commit = snapshot.name
        self.folder = snapshot / self.place.folder
        self.place = replace(self.place, revision=self.commit)
        self.store = Store(self.place.url)

    def download_small(self, names: Sequence[str], commit: str | None = None) -> Path:
        """Download files into the Hub's cache, if they exist; return the folder of the commit."""
        place = self.place if commit is None else replace(self.place, revision=commit)
        try:
            with hub_errors(place.url, "read"):
                return download_snapshot(
                    repo=place.repo,
                    patterns=[escape(place.path(name)) for name in names],
                    revision=place.revision,
                    repo_type=place.repo_type,
                    quiet=True,
                )
        except UnreachableError as error:
            raise Unreachable(str(error)) from None

    def fetch_small_file(self, name: str) -> Path:
        """Return the path of a file in the Hub's cache, after downloading it if needed."""
        path = self.folder / name
        if not path.exists() and name not in SMALL_FILES:
            self.at_start(partial(self.download_small, [name]), name)
        if not path.exists():
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        return path

    def path(self, name: str) -> Path:
        """Return the path of a shard: in the Hub's cache if it is there, else in the run's."""
        path = self.folder / name
        return path if path.exists() else super().path(name)

    def room_needed(self, name: str) -> int:
        """Return the bytes that a shard needs in the cache of the run."""
        return 0 if (self.folder / name).exists() else super().room_needed(name)
