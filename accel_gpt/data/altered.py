"""Find token files that were altered since the previous launch of a run.

Reads and writes data_files.json in the run's folder: size and modification time of each local token
file. At a resume, a file with another size or time is hashed and must have the SHA-256 in its
dataset.json. Files of other projects have no SHA-256: a new size is an error, a new time a warning.
The caches compare shards at the download (`remote.py`, `hub_folder.py`).
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from accel_gpt.data.index import INDEX
from accel_gpt.data.shards import Shard, Split
from accel_gpt.errors import DataError
from accel_gpt.files import sha256, write_file
from accel_gpt.json_files import Count, load_json_or_none

FILE_TIMES = "data_files.json"


@dataclass(frozen=True)
class FileTime:
    """A file as data_files.json lists it."""

    path: str
    size: Count
    mtime_ns: int


def check_unaltered(
    splits: Sequence[Split],
    run: Path,
    resuming: bool,
    accept_changes: bool,
    log: Callable[[str], None],
) -> None:
    """Raise `DataError` if a local file of `splits` was altered since the previous launch of `run`.

    Records the size and time of all files. A run that is not `resuming` has trained on no file yet.
    `accept_changes`: accept other files of other projects.
    """
    listed = load_json_or_none(list[FileTime], run / FILE_TIMES) or []
    recorded = {file.path: file for file in listed}
    seen = []
    rewritten = []  # shards to hash
    for path, shard in local_files(splits).items():
        stat = path.stat()
        now = FileTime(path=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)
        before = recorded.get(now.path, now)
        seen.append(now)
        if before == now or not resuming:
            continue
        if shard.sha256 is not None:
            rewritten.append((path, shard))
        elif accept_changes:
            continue
        elif before.size != now.size:
            raise DataError(
                f"{path} was altered: it has {now.size:,} bytes, but had {before.size:,} at "
                "the previous launch; restore it, or accept it with --checkpoint.allow_change "
                "data.train"
            )
        else:
            log(
                f"WARNING: {path} was written after the previous launch; only its size and a "
                "sample of its tokens were compared"
            )
    check_hashes(rewritten, log)
    if seen != listed:
        content = json.dumps([asdict(file) for file in seen], indent=1)
        write_file(run / FILE_TIMES, [content.encode()])


def local_files(splits: Sequence[Split]) -> dict[Path, Shard]:
    """Return the shards that are neither remote nor in arrays, by absolute path."""
    found = {}
    for split in splits:
        if split.remote is None and split.arrays is None:
            for shard in split.shards:
                found[(split.folder / shard.name).resolve()] = shard
    return found


def check_hashes(files: Sequence[tuple[Path, Shard]], log: Callable[[str], None]) -> None:
    """Raise `DataError` for the first file whose SHA-256 is not the one in dataset.json."""
    if files:
        log(f"comparing {len(files):,} data files that were written after the previous launch")
    with ThreadPoolExecutor() as pool:
        digests = pool.map(sha256, [path for path, _ in files])
        for (path, shard), found in zip(files, digests, strict=True):
            if found != shard.sha256:
                raise DataError(
                    f"{path} was altered: its SHA-256 begins with {found[:12]}, but {INDEX} says "
                    f"{str(shard.sha256)[:12]}; restore the file or prepare the data again"
                )
