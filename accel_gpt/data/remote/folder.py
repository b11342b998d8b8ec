"""A data folder behind a URL, whose shards are fetched into the local cache ahead of need."""

import errno
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from accel_gpt.data.remote.cache import (
    NAME,
    PART,
    Cache,
    NoRoom,
    intact,
    locked,
    record,
    touch,
    write_record,
)
from accel_gpt.data.remote.download import Patience, download, insist
from accel_gpt.data.remote.need import Closed, Request, fitting
from accel_gpt.data.remote.stores import About, Missing, Refused, explained, open_remote_folder
from accel_gpt.data.shards import INDEX, Shard, read_index, token_dtype
from accel_gpt.errors import DataError, UserError
from accel_gpt.files import LARGEST_TEXT, sync
from accel_gpt.redact import redact_url

POLL = 0.2  # seconds between two looks for room that others hold


def is_url(place: str) -> bool:
    """Whether `place` is a URL (scheme://...) and not a folder of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place) is not None


class RemoteFolder:
    """A data folder behind `url`, whose files appear in `folder`, complete and checked.

    `cache_dir`: None for ~/.cache/accel_gpt/shards; `cache_gb`: its limit in 1e9 bytes. A thread
    fetches what `prefetch` and `locate` ask for; it starts with the first of them.
    """

    def __init__(
        self, url: str, cache_dir: str | None, cache_gb: float, patience: Patience | None = None
    ) -> None:
        self.patience = patience or Patience()
        self.remote = open_remote_folder(url, self.patience.timeout)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(cache_dir).expanduser() if cache_dir else home / "accel_gpt" / "shards"
        shown = redact_url(url)
        last = re.sub(r"[^A-Za-z0-9._-]", "_", shown.rpartition("/")[2])[:80]
        self.folder = root / f"{hashlib.sha256(shown.encode()).hexdigest()[:16]}-{last}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache {root} cannot be made: {error.strerror}; set data.cache_dir"
            ) from None
        self.cache = Cache(root, int(cache_gb * 1e9))
        self.known: dict[str, About | None] = {}
        self.listed: dict[str, int] = {}
        self.tags: dict[str, str] = {}  # of the files listed; they change with the content
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None
        self.wanted: dict[str, Shard] = {}  # by name, in the order of need
        self.told: tuple[list[Shard], list[Shard]] | None = None  # to `prefetch`, the last time
        self.all_next = False  # whether what is wanted is just what was told to be next
        self.urgent: dict[str, Request] = {}
        self.latest = ""  # located last, and about to be mapped
        self.here: set[str] = set()  # of those needed
        self.failed: dict[str, float] = {}  # when it was tried ahead of need in vain
        self.news = False  # whether what is needed has changed

    # ----------------------------------------------------------------------- small files

    def has(self, name: str) -> bool:
        """Whether the folder has a file; one in the cache counts while the store is out of reach.

        Raises `UserError` where the folder may not be read, `DataError` where it is out of reach.
        """
        return self.about(name) is not None

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the folder; `UserError` where it cannot be listed."""

        def ask() -> dict[str, About]:
            with explained(self.remote, ""):
                return self.remote.list()

        found = insist(ask, self.remote.shown, self.patience, self.wait)
        found = {name: about for name, about in found.items() if re.fullmatch(NAME, name)}
        self.listed = {name: about.size or 0 for name, about in found.items()}
        self.tags = {name: about.sha256 or about.version for name, about in found.items()}
        return dict(self.listed)

    def fetch(self, name: str) -> Path:
        """The local copy of a file, fetched if the cache has none or another version of it."""
        about = self.about(name)
        if about is None:
            raise Missing(f"{self.remote.shown}/{name} does not exist; check the address")
        if name.endswith(".json") and (about.size or 0) > LARGEST_TEXT:
            raise DataError(
                f"{self.remote.shown}/{name} has {about.size:,} bytes, expected at most "
                f"{LARGEST_TEXT:,}; it is not an index or a tokenizer"
            )
        return self.get(name, about, shard=False)

    def about(self, name: str) -> About | None:
        """What the store tells of a file, asked once; None where it has no such file."""
        if name not in self.known:
            self.known[name] = self.ask(name)
        return self.known[name]

    def ask(self, name: str) -> About | None:
        """The same, asked anew; from the record of the cached copy if there is no answer."""

        def ask() -> About:
            with explained(self.remote, name):
                return self.remote.about(name)

        where, shown = self.path(name), f"{self.remote.shown}/{name}"
        cached = record(where.with_name(f".{name}.lock")) if where.exists() else {}
        patience = self.patience._replace(tries=1) if cached else self.patience
        try:
            return insist(ask, shown, patience, self.wait)
        except Missing:
            return None
        except Refused:
            if name == INDEX:
                raise
            return None  # S3 answers so for a file that does not exist, unless it may be listed
        except Closed:
            raise
        except DataError as error:
            if not cached:
                raise
            sys.stderr.write(f"{error}; going on with the copy in {self.folder}\n")
            return About(cached.get("size"), cached.get("sha256"))

    # ----------------------------------------------------------------------- shards

    def locate(self, shard: Shard) -> Path:
        """The file of a shard, waiting until it is here; `DataError` when it cannot be had."""
        with self.changed:
            if shard.name not in self.here:
                request = self.urgent.setdefault(shard.name, Request(shard))
                self.here &= self.wanted.keys()
                self.news = True
                self.start()
                while not request.done:
                    self.changed.wait()
                if request.error:
                    raise request.error
        return self.path(shard.name)

    def prefetch(self, now: Sequence[Shard], then: Sequence[Shard] = ()) -> None:
        """Fetch in the background what is needed now, then of the next what there is room for.

        Other shards may be removed. Raises `UserError` when the cache cannot hold those of `now`.
        """
        if self.asked(now, then):
            return
        wanted = fitting(now, then, self.size, self.cache.limit, self.remote.shown)
        with self.changed:
            self.news |= wanted.keys() != self.wanted.keys()
            self.news |= self.latest not in ("", *wanted)  # held until now
            self.wanted, self.told = wanted, (list(now), list(then))
            self.all_next = wanted.keys() == {shard.name for shard in then}
            self.here &= wanted.keys()
            self.latest = ""
            if self.news:
                self.start()

    def asked(self, now: Sequence[Shard], then: Sequence[Shard]) -> bool:
        """Whether `prefetch` was told the same last, or what comes to the same set of shards."""
        if self.told is None or self.latest not in ("", *self.wanted) or self.told[1] != [*then]:
            return False
        within = self.all_next and all(shard.name in self.wanted for shard in now)
        return within or self.told[0] == [*now]

    def close(self) -> None:
        """End the thread, and whatever it fetches; the cache stays."""
        self.closing.set()
        with self.changed:
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(1.0)  # a read in progress ends with its time-out
        self.cache.release()

    # ----------------------------------------------------------------------- thread

    def start(self) -> None:
        """Wake the thread, which is started by the first to need it."""
        if self.closing.is_set():
            raise Closed(f"{self.remote.shown} was closed")
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="remote", daemon=True)
            self.thread.start()
        self.changed.notify_all()

    def work(self) -> None:
        """Fetch what is needed until closed."""
        while True:
            with self.changed:
                while not (self.news or self.next() or self.closing.is_set()):
                    self.changed.wait(self.patience.longest_pause if self.failed else None)
                if self.closing.is_set():
                    break
                self.news = False
                shard = self.next()
                needed = {*self.wanted, *(self.urgent or [self.latest])} - {""}
            error = self.attempt(shard, needed)
            with self.changed:
                if shard is not None:
                    self.settle(shard.name, error)
        with self.changed:
            for name in list(self.urgent):
                self.settle(name, Closed(f"{self.remote.shown} was closed"))

    def next(self) -> Shard | None:
        """What to fetch first: what somebody waits for, then what is wanted ahead of need."""
        waiting = (request.shard for request in self.urgent.values())
        again = time.monotonic() - self.patience.longest_pause
        for shard in chain(waiting, self.wanted.values()):
            soon = shard.name not in self.urgent and self.failed.get(shard.name, again) > again
            if shard.name not in self.here and not soon:
                return shard
        return None

    def attempt(self, shard: Shard | None, needed: set[str]) -> UserError | None:
        """Hold what is needed, and fetch `shard`; why it could not be had."""
        try:
            self.cache.hold([f"{self.folder.name}/{name}" for name in needed])
            if shard is not None:
                self.get(shard.name, self.expected(shard), shard=True)
        except UserError as error:
            return error
        except Exception as error:  # whatever it is, those who wait must hear of it
            return DataError(
                f"shard {shard and shard.name} cannot be kept in {self.folder}: {error}"
            )
        return None

    def settle(self, name: str, error: UserError | None) -> None:
        """Note how the fetching of a shard ended, and tell those who wait for it."""
        request = self.urgent.get(name)
        if isinstance(error, NoRoom) and not (request and self.overdue(request)):
            self.changed.wait(POLL)
            return
        if error is not None:
            self.failed[name] = time.monotonic()
        else:
            self.failed.pop(name, None)
            if request or name in self.wanted:
                self.here.add(name)
        if request:
            if error is None:
                self.here &= self.wanted.keys() | {name}
                self.latest = name
            request.done, request.error = True, error
            del self.urgent[name]
            self.changed.notify_all()

    def overdue(self, request: Request) -> bool:
        """Whether there will be no room for a shard, however long it is waited for."""
        alone = sum(map(self.size, {**self.wanted, request.shard.name: request.shard}.values()))
        waited = time.monotonic() - request.since
        return alone > self.cache.limit or waited > self.patience.room

    def wait(self, seconds: float) -> None:
        """Sleep; `Closed` once the folder is closed."""
        if self.closing.wait(seconds):
            raise Closed(f"{self.remote.shown} was closed")

    # ----------------------------------------------------------------------- one file

    def path(self, name: str) -> Path:
        """Where a file of the folder is kept; `DataError` for a name that could lead elsewhere."""
        if not re.fullmatch(NAME, name):
            raise DataError(
                f"{self.remote.shown} names a file {name!r}; expected letters, digits, '.', '_' "
                "and '-'"
            )
        return self.folder / name

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a token in shards of ours."""
        return token_dtype(int(read_index(self.folder)["vocab_size"])).itemsize

    def size(self, shard: Shard) -> int:
        """Bytes of the file of a shard; those of ours are told by their index."""
        if shard.sha256 is not None and (self.folder / INDEX).exists():
            return shard.offset + shard.tokens * self.itemsize
        if shard.name not in self.listed:
            about = self.about(shard.name)
            self.listed[shard.name] = (about and about.size) or 0
        return self.listed[shard.name]

    def expected(self, shard: Shard) -> About:
        """What a shard must be: by its index, or else what the store tells."""
        if shard.sha256 is not None:
            return About(self.size(shard), shard.sha256)
        about = self.about(shard.name)
        if about is None:
            raise Missing(f"{self.remote.shown}/{shard.name} does not exist; check the address")
        return about

    def get(self, name: str, about: About, shard: bool) -> Path:
        """A file as `about` tells; one process fetches it, and others wait."""
        path = self.path(name)
        tag = hashlib.sha256(f"{about.sha256}{about.version}".encode()).hexdigest()[:8]
        part = self.folder / f".{name}.{about.size or 0}-{tag}.part"
        with locked(self.folder / f".{name}.lock") as lock:
            assert lock is not None
            if not intact(path, about, lock, shard):
                for old in self.folder.glob(f".{name}.*.part"):
                    found = re.fullmatch(PART, old.name)
                    if old != part and found and found[1] == name:
                        old.unlink()
                self.cache.make_room(part, about.size or 0)
                got = self.receive(name, part, about)
                sync(part)
                write_record(lock, part, got, about.version, shard)
                part.rename(path)
                sync(self.folder)
        touch(path)
        return path

    def receive(self, name: str, part: Path, about: About) -> str:
        """Fetch a file into `part`; on a full disk once more, when all that can go is gone."""
        try:
            return download(self.remote, name, part, about, self.patience, self.wait)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.cache.evict_all():
                raise
            return download(self.remote, name, part, about, self.patience, self.wait)
