"""Text -> a data folder of token shards, made once, completely or not at all.

Reads what `sources.py` finds; writes shards, dataset.json and tokenizer.json.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel_gpt.config import PrepareConfig
from accel_gpt.data.shards import (
    INDEX,
    Shard,
    ShardWriter,
    Tokens,
    locked,
    read_index,
    sync,
    token_dtype,
    write_index,
)
from accel_gpt.data.sources import BATCH_CHARACTERS, Piece, documents, expected_bytes, split_pieces
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from accel_gpt.errors import UserError

if TYPE_CHECKING:
    import rich.progress

SPLITS = ("train", "val")


class Encoded(NamedTuple):
    """Tokens of a `Piece`, end-of-text included where it ends a document."""

    split: str
    tokens: Tokens
    documents: int
    utf8_bytes: int


def prepare(config: PrepareConfig, out: Path) -> None:
    """Make the data folder `out`, unless it was already made with the same settings.

    Of several processes one builds and the others wait. Raises `UserError` for other settings, a
    folder in the way, too little text, a full disk; `DataError` for text that cannot be read.
    """
    out = Path(out).resolve()
    if is_ready(config, out):
        return
    expected_bytes(config)  # a source that is not there fails before anything is made
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out.with_name(f"{out.name}.lock")):
            if is_ready(config, out):
                return
            remove_leftovers(out)
            temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
            try:
                temporary.mkdir()
                line = build(config, temporary)
                temporary.rename(out)
                sync(out.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"data folder {out} could not be written: {error}; make room, or choose another "
            "data.train"
        ) from None
    sys.stdout.write(f"prepared {out}: {line}\n")


def build(config: PrepareConfig, folder: Path) -> str:
    """Write the content of a data folder; a line that tells what was made."""
    start = time.monotonic()
    workers, total = worker_count(config), expected_bytes(config)
    sys.stderr.write(f"making the {config.tokenizer} tokenizer\n")
    with child_processes(1) as pool:  # keeps the trainer's threads out of the process that forks
        pool.submit(save_tokenizer, config, folder).result()
    tokenizer = load_tokenizer(folder)
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {name: ShardWriter(folder, name, dtype, config.shard_tokens) for name in SPLITS}
    with child_processes(workers) as pool, Progress(total) as progress:
        for one in encode_all(
            pool, 2 * workers, folder, split_pieces(config, tokenizer.cuts_at_lines)
        ):
            writers[one.split].add(one.tokens, one.documents, one.utf8_bytes)
            progress.add(one.utf8_bytes)
    splits = {name: writer.finish() for name, writer in writers.items()}
    check_splits(config, splits)
    write_index(
        folder,
        kind=tokenizer.kind,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        splits=splits,
        prepared=record(config),
    )
    sync(folder)
    return summary(splits, time.monotonic() - start)


def summary(splits: dict[str, list[Shard]], seconds: float) -> str:
    """Shards, tokens, bytes per token and seconds."""
    shards = [shard for part in splits.values() for shard in part]
    tokens, utf8_bytes = sum(s.tokens for s in shards), sum(s.bytes for s in shards)
    each = ", ".join(f"{name} {sum(s.tokens for s in p):,}" for name, p in splits.items())
    return (
        f"{len(shards)} shards, {tokens:,} tokens ({each}), {utf8_bytes / tokens:.2f} bytes per "
        f"token, {seconds:.1f} s"
    )


def check_splits(config: PrepareConfig, splits: dict[str, list[Shard]]) -> None:
    """Each split must hold a token and its successor."""
    tokens = {name: sum(shard.tokens for shard in shards) for name, shards in splits.items()}
    if min(tokens.values()) < 2:
        raise UserError(
            f"there is too little text to train on: {tokens['train']} tokens for train and "
            f"{tokens['val']} for val, expected at least 2 each; give more text, or another "
            f"data.prepare.val_fraction than {config.val_fraction}"
        )


# --------------------------------------------------------------------------- the folder


def record(config: PrepareConfig) -> dict[str, Any]:
    """What the index remembers of the config: all that the content depends on."""
    return {key: value for key, value in asdict(config).items() if key != "workers"}


def is_ready(config: PrepareConfig, out: Path) -> bool:
    """Whether `out` was made with these settings; `UserError` when with others, or by others."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if config.source is None:
            read_index(out)  # raises
        return False
    if not (out / INDEX).exists():
        raise UserError(
            f"{out} exists and has no {INDEX}, so it is not a data folder; it is left as it is: "
            "choose another data.train"
        )
    prepared = read_index(out).get("prepared") or {}
    if config.source is None:
        return True
    default = {field.name: field.default for field in fields(PrepareConfig)}
    asked = record(config)
    if asked["tokenizer"] != "bpe":
        del asked["vocab_size"]  # it says nothing about the others
    differ = [
        f"{key}: prepared {prepared.get(key, default[key])}, asked {value}"
        for key, value in asked.items()
        if prepared.get(key, default[key]) != value
    ]
    if differ:
        raise UserError(
            f"data folder {out} was prepared with other settings ({'; '.join(differ)}); delete the "
            "folder or choose another data.train"
        )
    return True


def remove_leftovers(out: Path) -> None:
    """Remove what killed builders left; only called under the lock."""
    for path in out.parent.iterdir():
        if re.fullmatch(re.escape(out.name) + r"\.tmp-\d+", path.name):
            shutil.rmtree(path)


# --------------------------------------------------------------------------- documents


def batches(all_parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about `BATCH_CHARACTERS`."""
    batch: list[Piece] = []
    size = 0
    for part in all_parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --------------------------------------------------------------------------- processes


def worker_count(config: PrepareConfig) -> int:
    """Processes that tokenize: as asked, or one a core, but no more than there are batches."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    total = expected_bytes(config)
    useful = cores if total is None else 1 + total // BATCH_CHARACTERS
    return config.workers or max(1, min(cores, useful))


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes have started, and end with this one however it ends."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, start_child)
    try:
        pool.submit(os.getpid).result()
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, perhaps for lack of memory; try fewer "
            f"data.prepare.workers than {count}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_child() -> None:
    """Leave Ctrl-C to the parent, and end when the parent is killed: no lock outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel
    threading.Thread(target=end_with, args=(sentinel,), daemon=True).start()


def end_with(sentinel: int) -> None:
    """Wait for the parent's end, then end this process at once."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def save_tokenizer(config: PrepareConfig, folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    make_tokenizer(config.tokenizer, config.vocab_size, lambda: documents(config)).save(folder)


def encode_all(
    pool: ProcessPoolExecutor, ahead: int, folder: Path, all_parts: Iterable[Piece]
) -> Iterator[Encoded]:
    """The pieces encoded, in their order, with at most `ahead` batches on their way."""
    waiting: deque[Future[list[Encoded]]] = deque()
    for batch in batches(all_parts):
        waiting.append(pool.submit(encode_batch, folder, batch))
        if len(waiting) >= ahead:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()


def encode_batch(folder: Path, batch: list[Piece]) -> list[Encoded]:
    """The work of a tokenizing process."""
    tokenizer = cached_tokenizer(folder)
    encoded: list[Encoded] = []
    all_tokens = tokenizer.encode_batch([piece.text for piece in batch])
    for piece, tokens in zip(batch, all_tokens, strict=True):
        if piece.last and tokenizer.eot_id is not None:
            tokens = np.append(tokens, tokens.dtype.type(tokenizer.eot_id))
        size = len(piece.text.encode())
        encoded.append(Encoded(piece.split, tokens, int(piece.first), size))
    return encoded


@functools.cache
def cached_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, loaded once in each tokenizing process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return load_tokenizer(folder)


# --------------------------------------------------------------------------- progress


class Progress:
    """Bytes done, on stderr: a bar on a terminal, elsewhere a line at most every 5 s."""

    def __init__(self, total: int | None) -> None:
        self.total, self.done = total, 0
        self.start = self.shown = time.monotonic()
        self.bar: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            self.bar = byte_bar()
            self.bar.add_task("tokenizing", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.refresh()
            self.bar.stop()

    def add(self, amount: int) -> None:
        """Count `amount` bytes, and show them when it is time."""
        self.done += amount
        now = time.monotonic()
        if now - self.shown < (5.0 if self.bar is None else 0.1):
            return
        self.shown = now
        if self.bar is None:
            sys.stderr.write(f"tokenizing: {self.line(now - self.start)}\n")
        else:
            self.bar.update(self.bar.task_ids[0], completed=self.done, refresh=True)

    def line(self, seconds: float) -> str:
        """MB, MB/s and time left, as far as known."""
        speed = self.done / seconds
        if self.total is None:
            return f"{self.done / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s"
        left = max(0, self.total - self.done) / max(speed, 1.0)
        mb = f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        return f"{mb}, {speed / 1e6:.1f} MB/s, {left:.0f} s left"


def byte_bar() -> "rich.progress.Progress":
    """A bar that draws only when told to: it starts no thread beside the processes."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False)
