"""What a data folder (of any project) or a URL holds, and whether it is whole. Changes nothing.

`inspect_data` gives the object that `accel-gpt inspect PLACE --json` prints; null: not known.

    kind "data", place, problems [one sentence each]
    tokenizer {kind, fingerprint}, vocab_size, eot_id, dtype (of the stored ids)
    prepared {...}             how it was made, as dataset.json says
    splits {name: {fingerprint, shards, tokens, documents, bytes, bytes_per_token,
        windows [decoded text], read}}
    read                       what reading every shard found; null with --quick:
        {tokens, documents (end-of-text tokens), bytes, bytes_per_token, largest_id,
         most_frequent {id, text, share (0 to 1)}, longest_run {id, text, length, shard, position},
         sha256 {equal, different, unknown} (shards), file_bytes, seconds}
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.commands.inspect_scan import ScanResult, scan, total
from accel_gpt.config.data import DataConfig
from accel_gpt.data.foreign import ENDINGS, of_split
from accel_gpt.data.remote.folder import RemoteFolder, is_url
from accel_gpt.data.shards import HEADER, INDEX, Shard, Split, check_size, open_split, read_index
from accel_gpt.data.sources import open_data, open_remote
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.prepare.progress import Progress


def inspect_data(
    place: str, data: DataConfig, quick: bool, windows: int, block_size: int
) -> dict[str, Any]:
    """The report on `place`, as the module tells; `quick`: no shard is read.

    `windows` of `block_size` tokens are decoded from the start of each split. Raises `UserError`
    when there is no such place or its tokenizer is not known, `DataError` when nothing of it can
    be opened.
    """
    opened = open_all(place, data, quick)
    first, tokenizer, problems = opened.splits[0], opened.tokenizer, list(opened.problems)
    splits = {split.name: describe(split) for split in opened.splits}
    size = sum(split.tokens * split.dtype.itemsize for split in opened.splits)
    if not quick:
        with Progress("reading", size) as progress:
            for split in opened.splits:
                splits[split.name]["windows"] = first_windows(split, tokenizer, windows, block_size)
                start = time.monotonic()
                result = scan(split, tokenizer, progress.add)
                found = findings(split, tokenizer, result)
                splits[split.name]["read"] = found | {"seconds": time.monotonic() - start}
                problems += result.problems
    if opened.remote is not None:
        opened.remote.close()
    return {
        "kind": "data",
        "place": place,
        "tokenizer": {"kind": first.tokenizer_kind, "fingerprint": first.tokenizer_fingerprint},
        "vocab_size": first.vocab_size,
        "eot_id": first.eot_id,
        "dtype": first.dtype.name,
        "prepared": opened.prepared,
        "splits": splits,
        "problems": problems,
    }


def describe(split: Split) -> dict[str, Any]:
    """What is known of a split without reading it."""
    utf8_bytes = total([shard.bytes for shard in split.shards])
    return {
        "fingerprint": split.fingerprint,
        "shards": len(split.shards),
        "tokens": split.tokens,
        "documents": total([shard.documents for shard in split.shards]),
        "bytes": utf8_bytes,
        "bytes_per_token": ratio(utf8_bytes, split.tokens),
        "windows": [],
        "read": None,
    }


def ratio(part: int | None, whole: int) -> float | None:
    """Their quotient, where there is one."""
    return None if part is None or not whole else part / whole


def first_windows(
    split: Split, tokenizer: Tokenizer | None, windows: int, block_size: int
) -> list[str]:
    """Text of the first windows of the first shard; none where it cannot be read."""
    if tokenizer is None:
        return []
    try:
        tokens = split.read(0, 0, min(windows * block_size, split.shards[0].tokens))
    except UserError:  # `scan` tells it
        return []
    starts = range(0, len(tokens), block_size)
    return [spell(tokenizer, tokens[i : i + block_size].tolist()) for i in starts]


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of `ids`, U+FFFD for those beyond the vocabulary."""
    if all(i < tokenizer.vocab_size for i in ids):
        return tokenizer.decode(ids)
    return "".join(tokenizer.decode([i]) if i < tokenizer.vocab_size else "\ufffd" for i in ids)


def findings(split: Split, tokenizer: Tokenizer | None, result: ScanResult) -> dict[str, Any]:
    """The `read` of a split in the report."""

    def token(i: int) -> dict[str, Any]:
        return {"id": i, "text": spell(tokenizer, [i]) if tokenizer else None}

    frequent, run = int(result.counts[:-1].argmax()), result.run.best
    ends = np.cumsum(split.lengths)
    shard = int(np.searchsorted(ends, run.start, side="right"))
    return {
        "tokens": result.tokens,
        "documents": result.documents,
        "bytes": result.bytes,
        "bytes_per_token": ratio(result.bytes, result.tokens),
        "largest_id": result.largest_id if result.tokens else None,
        "most_frequent": token(frequent)
        | {"share": ratio(int(result.counts[frequent]), result.tokens)}
        if result.tokens
        else None,
        "longest_run": token(run.token)
        | {
            "length": run.length,
            "shard": split.shards[shard].name,
            "position": run.start - int(ends[shard] - split.lengths[shard]),
        }
        if result.tokens
        else None,
        "sha256": result.hashes,
        "file_bytes": result.file_bytes,
    }


# --------------------------------------------------------------------------- places


@dataclass
class Opened:
    """The splits of a data folder or URL that could be opened, and why others could not."""

    splits: list[Split] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    prepared: dict[str, Any] | None = None
    remote: RemoteFolder | None = None
    problems: list[str] = field(default_factory=list)

    def add(self, opener: Callable[[], tuple[Split, Tokenizer | None]]) -> None:
        """Open one more split, or note why not; a user's mistake that is not the data's ends it."""
        try:
            split, tokenizer = opener()
        except DataError as error:
            self.problems.append(str(error))
        else:
            self.splits.append(split)
            self.tokenizer = self.tokenizer or tokenizer


class Unchecked:
    """A folder whose shards are first looked at when they are read: one damaged hides no other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate(self, shard: Shard) -> Path:
        """The file of a shard."""
        return self.folder / shard.name

    def prefetch(self, now: Sequence[Shard], then: Sequence[Shard] = ()) -> None:
        """Nothing to fetch."""


def open_all(place: str, data: DataConfig, quick: bool) -> Opened:
    """Every split of `place`; `UserError` where there is none."""
    opened = Opened()
    if is_url(place):
        remote = opened.remote = RemoteFolder(place, data.cache_dir, data.cache_gb)
        if remote.has(INDEX):
            remote.fetch(INDEX)
            names = read_names(remote.folder, opened)
        else:
            names = tuple(foreign_splits(remote.sizes()))
        for name in names:
            opened.add(partial(open_remote, remote, name, data))
        return checked(place, opened)
    folder = Path(place)
    require(
        folder.is_dir(),
        f"{place} does not exist; give a data folder or its URL, or the folder of a run or of a "
        "checkpoint",
    )
    if not (folder / INDEX).exists():
        for name in foreign_splits([path.name for path in folder.iterdir()]):
            opened.add(partial(open_data, place, name, data))
        return checked(place, opened)
    for name in read_names(folder, opened):
        opened.add(partial(open_ours, folder, name))
    try:
        opened.tokenizer = load_tokenizer(folder)
    except UserError as error:
        opened.problems.append(str(error))
    if quick:
        opened.problems += wrong_sizes(opened)
    return checked(place, opened)


def foreign_splits(names: Iterable[str]) -> list[str]:
    """Splits that the file names of another project tell; train where they tell none."""
    files = [name for name in names if name.endswith(ENDINGS)]
    return [split for split in ("train", "val", "test") if of_split(files, split)] or ["train"]


def read_names(folder: Path, opened: Opened) -> tuple[str, ...]:
    """Splits that the index lists; how the data was prepared goes into `opened`."""
    index = read_index(folder)
    prepared = index.get("prepared")
    opened.prepared = prepared if isinstance(prepared, dict) else None
    if not isinstance(index.get("splits"), dict):
        raise DataError(f"{folder / INDEX} lists no splits; prepare the data again")
    return tuple(index["splits"])


def open_ours(folder: Path, name: str) -> tuple[Split, None]:
    """A split of a folder of ours whose shards may be damaged."""
    return replace(open_split(folder, name, Unchecked(folder)), store=None), None


def wrong_sizes(opened: Opened) -> Iterator[str]:
    """What the sizes of the shards in a folder of ours tell without reading them."""
    for split in opened.splits:
        for shard in split.shards:
            try:
                check_size(split.folder / shard.name, HEADER + shard.tokens * split.dtype.itemsize)
            except DataError as error:
                yield str(error)


def checked(place: str, opened: Opened) -> Opened:
    """`opened`, with a problem more where the tokenizer is not the one of the shards."""
    if not opened.splits:
        raise DataError("; ".join(opened.problems) or f"{place} has no splits")
    for split in opened.splits:
        tokenizer = opened.tokenizer
        if tokenizer and split.tokenizer_fingerprint != tokenizer.fingerprint:
            opened.problems.append(
                f"the {split.name} shards of {place} were made with another tokenizer "
                f"({split.tokenizer_kind}, {split.tokenizer_fingerprint[:12]}) than the one beside "
                f"them ({tokenizer.kind}, {tokenizer.fingerprint[:12]}); prepare them again"
            )
    return opened
