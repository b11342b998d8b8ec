"""The making of one data folder: begun, or continued where a journal says, and finished.

Memory, with w workers: of text at most 2w + 1 batches of about 1 MB wait here and one in each
worker; 1 million tokens wait in each of two writers; the dedupe database keeps 128 MiB of pages.
With the interpreter, its libraries and the vocabulary (100 to 150 MB a process, partly shared) that
is at most about 0.6 GB for 2 workers (15 MB of JSON lines took 0.11 GB, half a million documents of
one letter 0.15 GB), and stays below 2 GiB on any input that can be cut (see
`Tokenizer.cuts_at_lines`: for tokenizer.json files of others the longest document is added about
ten times). Training a bpe comes before and takes what its `sample_bytes` need.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import INDEX, token_dtype
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from accel_gpt.errors import DataError, UserError
from accel_gpt.files import sync
from accel_gpt.prepare.dedupe import DATABASE, Seen, open_seen
from accel_gpt.prepare.from_shards import copied, describe_place, place_tokenizer
from accel_gpt.prepare.journal import JOURNAL, Journal, read_journal
from accel_gpt.prepare.progress import Progress
from accel_gpt.prepare.shard_writer import ShardWriter, Stale
from accel_gpt.prepare.workers import (
    Encoded,
    Read,
    cached_tokenizer,
    child_processes,
    encode_all,
    worker_count,
)
from accel_gpt.text.documents import (
    Piece,
    Skipped,
    describe_source,
    documents,
    expected_bytes,
    sample_texts,
    split_pieces,
)

SPLITS = ("train", "val")
# Of text between two journals: about a minute of work at 5 MB/s is lost at most, and a journal
# costs a few syncs.
JOURNAL_BYTES = 256_000_000
NAMED = ("bytes", "chars", "bpe", "gpt2")  # tokenizers that are no file of the user's
OURS = rf"((train|val)_\d+\.npy(\.part)?|tokenizer(_config)?\.json|{INDEX}|{JOURNAL}|{DATABASE})"


@dataclass
class Work:
    """A folder that is being made: what is written into it, and how far that has come."""

    folder: Path
    tokenizer: Tokenizer
    journal: Journal
    writers: dict[str, ShardWriter]
    seen: Seen | None
    skipped: Skipped

    def unique(self, found: Iterable[Piece]) -> Iterator[Read]:
        """The pieces of documents that were not seen before; all without `seen`."""
        keep = True
        for piece in found:
            if self.seen is not None and piece.first:
                keep = self.seen.is_new(piece.key, piece.split)
            if keep:
                yield Read(piece, self.counts())

    def counts(self) -> tuple[int, int, int]:
        """Documents in the database, dropped; things skipped: as far as it was read."""
        if self.seen is None:
            return 0, 0, self.skipped.count
        return self.seen.documents, self.seen.dropped, self.skipped.count

    def add(self, one: Encoded) -> None:
        """Append tokens; they count once `save` was called."""
        self.writers[one.split].add(one.tokens, one.documents, one.utf8_bytes)
        self.journal.position = one.after
        self.journal.documents, self.journal.dropped, self.journal.skipped = one.counts

    def shards(self) -> int:
        """Shards that are full."""
        return sum(len(writer.shards) for writer in self.writers.values())

    def save(self) -> None:
        """Make all that was added safe, then say so in the journal."""
        self.journal.splits = {name: writer.save() for name, writer in self.writers.items()}
        if self.seen is not None:
            self.seen.commit()
        self.journal.write(self.folder)

    def close(self) -> None:
        """Close the dedupe database."""
        if self.seen is not None:
            self.seen.close()


def fingerprint(config: PrepareConfig, rank: int = 0, world: int = 1, *, times: bool = True) -> str:
    """What tells whether the source is still the same; empty where it cannot be read again.

    Without `times` a copy of the files counts as the same, too.

    Raises `UserError` when it is not there, or cannot be parted so.
    """
    if config.source == "shards":
        return describe_place(config)
    expected_bytes(config, rank, world)
    return describe_source(config, times)


# --------------------------------------------------------------------------- begin or continue


def begin(config: PrepareConfig, folder: Path, asked: Mapping[str, Any], source: str) -> Work:
    """Continue in `folder` where that is possible; else start over, saying why."""
    if folder.exists():
        try:
            return resume(config, folder, asked, source)
        except Stale as why:
            discard(folder)
            sys.stderr.write(f"{folder} cannot be continued: {why}; starting over\n")
    folder.mkdir()
    sys.stderr.write(f"making the {config.tokenizer} tokenizer\n")
    try:
        if config.tokenizer == "bpe":  # its trainer's threads stay out of the process that forks
            with child_processes(1) as pool:
                pool.submit(save_tokenizer, config, folder).result()
        else:
            save_tokenizer(config, folder)
        tokenizer = load_tokenizer(folder)
        for path in folder.iterdir():
            sync(path)
        journal = Journal(asked, source, tokenizer.fingerprint)
        work = open_work(config, folder, tokenizer, journal)
        work.save()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return work


def resume(config: PrepareConfig, folder: Path, asked: Mapping[str, Any], source: str) -> Work:
    """The work as its journal tells it; `Stale` where it cannot be continued."""
    journal = read_journal(folder)
    if not source:
        raise Stale("standard input cannot be read again")
    begun = {**journal.asked, "skip_invalid": config.skip_invalid or journal.skipped > 0}
    check_begun(folder, begun, {**asked, "skip_invalid": config.skip_invalid})
    if journal.source != source:
        raise other_text(folder)
    if not any(folder.glob("tokenizer*.json")):
        raise Stale("it has no tokenizer")
    try:
        tokenizer = load_tokenizer(folder)
        same = tokenizer.fingerprint == journal.tokenizer
    except DataError as error:
        raise Stale(str(error)) from None
    if config.tokenizer not in NAMED and config.source != "shards":
        same = same and load_tokenizer(config.tokenizer).fingerprint == journal.tokenizer
    if not same:
        raise Stale("the tokenizer has changed")
    work = open_work(config, folder, tokenizer, journal)
    sys.stderr.write(f"continuing from {journal.tokens:,} tokens in {folder}\n")
    return work


def check_begun(folder: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """`UserError` when `folder` was begun with other settings: its work is not thrown away.

    The path may be spelled otherwise: what it holds is compared by `Journal.source`.
    """
    settings = {k: v for k, v in asked.items() if k not in ("path", "source_fingerprint")}
    if differ := differences(begun, settings, "begun with"):
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(differ)}); repeat the command "
            f"with those, or remove {folder} to start over"
        )


def other_text(folder: Path) -> UserError:
    """The error for a source that is not what it was."""
    return UserError(
        f"{folder} was begun with another text: names, sizes or times of its files have changed; "
        f"repeat the command with that text, or remove {folder} to start over"
    )


def open_work(config: PrepareConfig, folder: Path, tokenizer: Tokenizer, journal: Journal) -> Work:
    """Writers and database brought back to the journal."""
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        writers = {
            name: ShardWriter(folder, name, dtype, config.shard_tokens, journal.splits.get(name))
            for name in SPLITS
        }
    except (KeyError, TypeError, ValueError) as error:
        raise Stale(f"its {JOURNAL} is damaged ({error!r:.80})") from None
    seen = open_seen(folder, journal.documents, journal.dropped) if config.dedupe else None
    return Work(folder, tokenizer, journal, writers, seen, Skipped(journal.skipped))


def save_tokenizer(config: PrepareConfig, folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    if config.source == "shards":
        place_tokenizer(config).save(folder)
        return

    def texts() -> Iterator[str]:
        if config.tokenizer == "bpe":
            return sample_texts(config, config.sample_bytes)
        return documents(config)

    make_tokenizer(config.tokenizer, config.vocab_size, texts).save(folder)


def differences(made: Mapping[str, Any], asked: Mapping[str, Any], verb: str) -> list[str]:
    """The settings in which `made` is not what is asked; some say something about a bpe only."""
    return [
        f"{key}: {verb} {made.get(key)}, asked {value}"
        for key, value in asked.items()
        if made.get(key) != value
        and not (key in ("vocab_size", "sample_bytes") and asked.get("tokenizer") != "bpe")
    ]


def discard(folder: Path) -> None:
    """Remove a folder of this module; `UserError` when something else is in it."""
    strange = [p.name for p in folder.iterdir() if not re.match(OURS, p.name)]
    if strange:
        raise UserError(
            f"{folder}, where the data folder is to be made, holds {strange[0]}; it is left as it "
            "is: remove it, or choose another folder"
        )
    shutil.rmtree(folder)


# --------------------------------------------------------------------------- write


def write_shards(config: PrepareConfig, work: Work, rank: int, world: int) -> None:
    """Append what the source holds from the journal's position on."""
    total = None if config.source == "shards" else expected_bytes(config, rank, world)
    shards, unsaved = work.shards(), 0
    with (
        encoded(config, work, rank, world, total) as found,
        Progress(total, work.journal.bytes) as progress,
    ):
        for one in found:
            work.add(one)
            progress.add(one.utf8_bytes)
            unsaved += one.utf8_bytes
            if unsaved >= JOURNAL_BYTES or work.shards() > shards:
                work.save()
                shards, unsaved = work.shards(), 0
    work.save()


@contextmanager
def encoded(
    config: PrepareConfig, work: Work, rank: int, world: int, total: int | None
) -> Iterator[Iterator[Encoded]]:
    """What is to be appended, in order."""
    start = work.journal.position
    if config.source == "shards":
        yield copied(config, start)
        return
    workers = worker_count(config.workers, total)
    cut_long = work.tokenizer.cuts_at_lines
    found = split_pieces(config, cut_long, start, rank, world, work.skipped)
    cached_tokenizer.cache_clear()
    cached_tokenizer(work.folder)  # here, so that the processes are born with it
    with child_processes(workers) as pool:
        yield encode_all(pool, 2 * workers, work.folder, work.unique(found))
