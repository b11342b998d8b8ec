"""One pass over the shards of a split: are they whole, and what is in them. Writes nothing."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_gpt.data.shards import Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError

CHUNK = 1 << 18  # tokens looked at together: 5 MB of intermediate arrays stay in the caches
AHEAD = 3  # shards of a URL fetched before they are read
Advance = Callable[[int], None]


class Repeat(NamedTuple):
    """A run of one repeated token; `start`: its place among all tokens of the split."""

    token: int
    length: int
    start: int


class LongestRun:
    """The longest run in tokens that come in chunks, the first of equally long ones."""

    def __init__(self) -> None:
        self.best = self.last = Repeat(-1, 0, 0)  # last: the one that may go on in the next chunk

    def feed(self, tokens: Tokens, start: int) -> None:
        """Take tokens (n,), n > 0, of which the first is at `start`."""
        same = np.flatnonzero(tokens[1:] == tokens[:-1])  # each equal to its successor
        breaks = np.flatnonzero(np.diff(same) > 1)
        first = same[np.concatenate(([0], breaks + 1))] if len(same) else same
        lengths = same[np.append(breaks, -1)] - first + 2 if len(same) else same
        whole = len(tokens)
        head = Repeat(int(tokens[0]), 1, start)
        tail = Repeat(int(tokens[-1]), 1, start + whole - 1)
        if len(first) and first[0] == 0:
            head = head._replace(length=int(lengths[0]))
        if len(first) and first[-1] + lengths[-1] == whole:
            tail = Repeat(tail.token, int(lengths[-1]), start + int(first[-1]))
        alone = head.length == whole
        if self.last.token == head.token and self.last.start + self.last.length == start:
            head = Repeat(head.token, self.last.length + head.length, self.last.start)
        found = [head]
        if len(first):
            longest = int(lengths.argmax())
            place = int(first[longest])
            found.append(Repeat(int(tokens[place]), int(lengths[longest]), start + place))
        self.best = max(self.best, *found, key=lambda run: run.length)
        self.last = head if alone else tail


@dataclass
class ScanResult:
    """What reading the shards of a split found; those that cannot be opened count for nothing."""

    counts: NDArray[np.int64]
    """(V + 1,): how often each token occurs; the last entry: ids beyond the vocabulary."""
    tokens: int = 0
    file_bytes: int = 0
    largest_id: int = -1
    documents: int | None = None
    """End-of-text tokens; None without such a token."""
    bytes: int | None = None
    """UTF-8 bytes of the text; None without a tokenizer whose tokens' bytes add up."""
    run: LongestRun = field(default_factory=LongestRun)
    hashes: dict[str, int] = field(
        default_factory=lambda: {"equal": 0, "different": 0, "unknown": 0}
    )
    problems: list[str] = field(default_factory=list)


def scan(split: Split, tokenizer: Tokenizer | None, progress: Advance) -> ScanResult:
    """Read every shard once; `progress` is told the bytes of each chunk."""
    result = ScanResult(np.zeros(split.vocab_size + 1, np.int64))
    starts = np.cumsum(split.lengths) - split.lengths
    for number in range(len(split.shards)):
        split.prefetch([number], range(number + 1, min(number + AHEAD, len(split.shards))))
        try:
            scan_shard(split, number, int(starts[number]), result, progress)
        except UserError as error:
            result.problems.append(str(error))
    if split.eot_id is not None:
        result.documents = int(result.counts[split.eot_id])
    if tokenizer is not None and tokenizer.bytes_add_up:
        sizes = tokenizer.token_bytes()[: split.vocab_size]
        result.bytes = int(result.counts[: len(sizes)] @ sizes)
    expected = total([shard.documents for shard in split.shards])
    complete = result.tokens == split.tokens
    if complete and None not in (expected, result.documents) and expected != result.documents:
        result.problems.append(
            f"the {split.name} split of {split.folder} has {result.documents:,} end-of-text tokens,"
            f" but its index says {expected:,} documents; prepare the data again"
        )
    return result


def scan_shard(
    split: Split, number: int, start: int, result: ScanResult, progress: Advance
) -> None:
    """Add one shard to `result`; `DataError` where it cannot be read."""
    shard = split.shards[number]
    split.read(number, 0, 0)  # maps the file, which is refused when its size is wrong
    path = split.store.locate(shard) if split.store else split.folder / shard.name
    with path.open("rb") as file:
        hasher = hashlib.sha256(file.read(shard.offset))
    largest = -1
    with ThreadPoolExecutor(1) as beside:  # hashing takes as long as the rest and frees the lock
        for tokens in chunks(split, number):
            hashing = beside.submit(hasher.update, tokens.data) if shard.sha256 else None
            largest = max(largest, int(tokens.max()))
            known = np.minimum(tokens, split.vocab_size) if largest >= split.vocab_size else tokens
            result.counts += np.bincount(known, minlength=len(result.counts))
            result.run.feed(tokens, start)
            start += len(tokens)
            result.tokens += len(tokens)
            result.file_bytes += tokens.nbytes
            progress(tokens.nbytes)
            if hashing:
                hashing.result()
    result.largest_id = max(result.largest_id, largest)
    same = hasher.hexdigest() == shard.sha256
    result.hashes["unknown" if not shard.sha256 else "equal" if same else "different"] += 1
    if shard.sha256 and not same:
        result.problems.append(
            f"shard {path} is damaged: its SHA-256 is not that of the index; restore it, or "
            "prepare the data again"
        )
    elif shard.max_token not in (None, largest):
        result.problems.append(
            f"shard {path} has {largest} as its largest token, but its index says "
            f"{shard.max_token}; prepare the data again"
        )
    if largest >= split.vocab_size:
        result.problems.append(
            f"shard {path} holds token {largest}, expected less than vocab_size "
            f"{split.vocab_size}; it is damaged, or was made with another tokenizer"
        )


def total(values: Sequence[int | None]) -> int | None:
    """Their sum, or None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def chunks(split: Split, number: int) -> Iterator[Tokens]:
    """The tokens of a shard, `CHUNK` at a time, as views of its file."""
    whole = split.shards[number].tokens
    for start in range(0, whole, CHUNK):
        yield split.read(number, start, min(CHUNK, whole - start))
