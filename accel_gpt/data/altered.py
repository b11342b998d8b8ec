"""Find token files that other programs altered: between two launches of a run, or while it trains.

Reads and writes data_files.json in the run's folder: sizes and times of each local token file. A
file that was written since is compared with its SHA-256 in dataset.json. Files of other projects
have none: their size and the blocks of their fingerprint are compared, and a warning says so.
Remote shards are compared when they are downloaded (`downloads.py`).
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.shards import Shard, Split, sampled_digest
from accel_gpt.errors import DataError, MachineError
from accel_gpt.files import write_file
from accel_gpt.json_files import Count, load_json_or_none

FILE_TIMES = "data_files.json"
ACCEPT = "restore it, or accept it with --checkpoint.allow_change data.train"
NOT_SAVED = "the steps after the newest checkpoint may have read it and are not saved; restore it"


@dataclass(frozen=True)
class FileTime:
    """A file as data_files.json lists it."""

    path: str
    size: Count
    mtime_ns: int
    ctime_ns: int
    """No program can set it: it also changes if `cp -p` writes other content."""
    inode: int

    def may_differ(self, other: "FileTime") -> bool:
        """Return whether the content may be another; on another disk the ctime says nothing."""
        if (self.size, self.mtime_ns) != (other.size, other.mtime_ns):
            return True
        return self.inode == other.inode and self.ctime_ns != other.ctime_ns


def file_time(path: Path) -> FileTime:
    """Return size and times of a file."""
    stat = path.stat()
    return FileTime(
        path=str(path),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
        inode=stat.st_ino,
    )


class DataFiles:
    """The local token files of `splits`, with their times when they were last as expected."""

    def __init__(self, splits: Sequence[Split], log: Callable[[str], None]) -> None:
        self.shards: dict[Path, Shard] = {}  # by absolute path
        for split in splits:
            if split.remote is None and split.arrays is None:
                for shard in split.shards:
                    self.shards[(split.folder / shard.name).resolve()] = shard
        self.times = {path: file_time(path) for path in self.shards}
        self.log = log

    def check_since_last_launch(self, run: Path, resuming: bool, accept_changes: bool) -> None:
        """Raise `DataError` if a file was altered since the previous launch of `run`.

        Records the times of all files. A run that is not `resuming` has trained on no file yet.
        `accept_changes`: accept other files of other projects.
        """
        listed = load_json_or_none(list[FileTime], run / FILE_TIMES) or []
        recorded = {file.path: file for file in listed}
        written = {}
        for path, now in self.times.items():
            before = recorded.get(now.path, now)
            accepted = accept_changes and self.shards[path].sha256 is None
            if resuming and not accepted and before.may_differ(now):
                written[path] = before
        self.compare(written, "after the previous launch", ACCEPT)
        if list(self.times.values()) != listed:
            content = json.dumps([asdict(time) for time in self.times.values()], indent=1)
            write_file(run / FILE_TIMES, [content.encode()])

    def check_now(self) -> None:
        """Raise `DataError` if a file was altered since this launch opened it.

        A file that is missing or cannot be read is no matter here: the next read tells it.
        """
        now = {}
        for path in self.shards:
            with contextlib.suppress(OSError):
                now[path] = file_time(path)
        written = {path: self.times[path] for path in now if self.times[path].may_differ(now[path])}
        try:
            self.compare(written, "while the run trained", NOT_SAVED)
        except MachineError as error:
            self.log(f"WARNING: {error}")
            return
        self.times |= now

    def compare(self, written: Mapping[Path, FileTime], when: str, advice: str) -> None:
        """Raise `DataError` if one of the files that were `written` is altered, else log them."""
        if not written:
            return
        self.log(f"comparing {len(written):,} data files that were written {when}")
        expected = []
        for path, before in written.items():
            shard = self.shards[path]
            if shard.sha256 is not None:
                expected.append(Expected(path, before.size, shard.sha256))
            else:
                sampled = partial(sampled_digest, offset=shard.offset)
                expected.append(Expected(path, before.size, shard.sample, sampled))
        damage = find_damage(expected)
        if damage:
            raise DataError(f"{damage}; {advice}")
        for path in written:
            if self.shards[path].sha256 is None:
                self.log(f"WARNING: of {path}, only the size and a sample of tokens were compared")
