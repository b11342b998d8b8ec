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

Who needs a file downloads it, or waits for whoever does, at most `train.step_timeout`, and repeats
this while the store cannot be reached. A thread downloads what is needed next.

Other files (index, tokenizer) are small and downloaded at each launch.
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
from functools import partial
from pathlib import Path

from accel_gpt.data.index import is_shard_name
from accel_gpt.data.remote import FileInfo, Store, Unreachable, short_hash
from accel_gpt.errors import DataError, UserError
from accel_gpt.files import TOKEN_ENDINGS, cache_folder, locked_file

START_SECONDS = 30.0  # to read the index of a folder; a longer wait hides a typo; assumption
PAUSE_SECONDS = 1.0  # before the second try; doubled after each
LONGEST_PAUSE_SECONDS = 30.0
LOOK_SECONDS = 0.1  # between two looks at the room in the cache, or at another's download
PART = ".part"
NOT_SOON = 1 << 30  # the place in the order of need of a shard that is not needed soon


class Cache:
    """The cache of a run on this machine: a folder that holds at most `gb` GB of shards.

    `run`: the folder of the run; None for a cache that this process alone uses and removes when it
    ends. `timeout`: the longest wait for a shard, in seconds.
    """

    def __init__(self, gb: float, run: str | None, timeout: float) -> None:
        self.timeout = timeout
        base = cache_folder() / "shards"
        self.limit = int(gb * 1e9)
        self.needs: dict[Path, int] = {}  # 0: needed now; otherwise the place in the order of need
        base.mkdir(parents=True, exist_ok=True)
        if run is None:
            self.root = Path(tempfile.mkdtemp(dir=base))
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        else:
            self.root = base / short_hash(f"{Path(run).resolve()} {socket.gethostname()}")

    def make_room(self, path: Path, part: Path, size: int) -> bool:
        """Remove shards until `size` bytes fit at `path`, but none that is needed as early.

        Returns whether they fit; raises `UserError` if what is needed now does not. The caller
        holds the lock of the cache and of `part`.
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
        if need == 0:
            self.check_room(needed)
        return needed + reserved <= self.limit

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
        """Raise `UserError` if the cache cannot hold `needed` bytes at once."""
        if needed > self.limit:
            raise UserError(
                f"data.cache_gb is {self.limit / 1e9:g}, but {needed / 1e9:g} GB are needed at "
                f"once in {self.root}; set it above that"
            )

    def remove(self) -> None:
        """Remove the cache with all files."""
        shutil.rmtree(self.root, ignore_errors=True)


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and verified.

    The first `prefetch` starts a thread.
    """

    def __init__(self, url: str, cache: Cache) -> None:
        # `repeat` repeats a request: botocore would do so for up to a minute, without a word
        is_s3 = url.startswith(("s3://", "s3a://"))
        self.store = Store(
            url, {"config_kwargs": {"retries": {"max_attempts": 0}}} if is_s3 else {}
        )
        self.cache = cache
        last = re.sub(r"[^A-Za-z0-9._-]", "_", self.store.url.rpartition("/")[2])[:80]
        self.folder = cache.root / f"{short_hash(self.store.url)}-{last}"
        self.infos: dict[str, FileInfo] = {}
        self.current: set[str] = set()  # small files that this process downloaded
        self.wanted: list[str] = []  # shards, in the order of need
        self.waits_for = ""  # the shard that a reader waits for, and why; "": none
        self.thread: threading.Thread | None = None
        self.changed = threading.Event()
        self.closed = False

    def expect(self, name: str, size: int, sha256: str | None) -> None:
        """Take what a shard must be from an index that was checked."""
        self.infos[name] = FileInfo(size, sha256)

    def list(self) -> dict[str, FileInfo]:
        """List the files of the folder; raises `UserError` if it cannot be listed."""

        def attempt() -> bool:
            self.infos.update(self.store.list())
            return True

        self.repeat(attempt, self.store.url, min(START_SECONDS, self.cache.timeout))
        return self.infos

    def path(self, name: str) -> Path:
        """Return the path of a shard in the cache."""
        info = self.infos[name]
        version = info.sha256 or info.tag or info.changed
        return self.folder / f"{short_hash(f'{info.size} {version}')}-{name}"

    def fetch(self, name: str) -> Path:
        """Return the local copy of a file, which is downloaded if the cache does not hold it.

        Raises `DataError` if there is no such file or it cannot be downloaded, `UserError` if it
        may not be read or finds no room.
        """
        assert is_shard_name(name), name
        where = f"{self.store.url}/{name}"
        if not name.endswith(TOKEN_ENDINGS):
            if name not in self.current:
                attempt = partial(self.download_small_file, name)
                self.repeat(attempt, where, min(START_SECONDS, self.cache.timeout))
                self.current.add(name)
            return self.folder / name
        path = self.path(name)
        if not path.is_file():
            attempt = partial(self.download_shard, name)
            self.repeat(attempt, where, self.cache.timeout, " (train.step_timeout)")
        return path

    def repeat(
        self, attempt: Callable[[], bool], where: str, seconds: float, option: str = ""
    ) -> None:
        """Repeat `attempt` until it returns True; raise `DataError` after `seconds`.

        `where`: what it fetches, in messages. `option`: what sets `seconds`.
        """
        end = time.monotonic() + seconds
        pause = PAUSE_SECONDS
        problem = "neither an answer nor room in the cache yet"
        try:
            while True:
                self.waits_for = f"{where} ({problem})"
                try:
                    if attempt():
                        return
                    time.sleep(LOOK_SECONDS)
                except Unreachable as error:
                    problem = str(error)
                    time.sleep(pause * random.uniform(0.5, 1))  # not all processes at once
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                if time.monotonic() > end:
                    raise DataError(
                        f"{where} could not be fetched within {seconds:g} s{option}: {problem}; "
                        "check the network and launch again"
                    )
        finally:
            self.waits_for = ""

    def download_small_file(self, name: str) -> bool:
        """Download a file, which no process of the run sees before it is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{name}.{os.getpid()}"
        self.store.download(name, part)
        part.replace(self.folder / name)
        return True

    def download_shard(self, name: str) -> bool:
        """Download a shard, unless another thread does or the cache has no room; return whether."""
        path = self.path(name)
        size = self.infos[name].size
        part = path.with_name(f"{path.name}.{size}{PART}")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locked_file(part, wait=False):
                if path.is_file():
                    return True
                with locked_file(self.cache.root / ".lock"):
                    has_room = self.cache.make_room(path, part, size)
                if has_room:
                    self.store.download(name, part)
                    self.verify(name, part)
                    part.rename(path)
                return has_room
        except BlockingIOError:
            return False

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

    def prefetch(self, now: Sequence[str], then: Sequence[str] = ()) -> None:
        """Download shards in the background: all of `now`, and of `then` while there is room.

        Other shards may be removed. Raises `UserError` if the cache cannot hold all of `now`.
        """
        self.cache.check_room(sum(self.infos[name].size for name in set(now)))
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
            missing = [name for name in self.wanted if not self.path(name).is_file()]
            for name in missing:
                try:
                    self.download_shard(name)
                except Exception:  # who needs the shard repeats it, and tells
                    break
                if self.changed.is_set():
                    break
            self.changed.wait(PAUSE_SECONDS if missing else None)

    def close(self) -> None:
        """End the thread; a download in progress ends with the process. The cache stays."""
        self.closed = True
        self.changed.set()
