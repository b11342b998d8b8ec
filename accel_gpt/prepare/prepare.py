"""Text -> a data folder of token shards, made once, completely or not at all.

Reads what `text/documents.py` finds; writes shards, dataset.json and tokenizer.json into
`<out>.partial`, which gets the name `<out>` once it is complete. A journal there, written whenever
a shard is full, lets the same command resume after any interruption, with the same bytes.

Memory, with w workers: of text at most 2w + 1 batches of about 1 MB wait here and one in each
worker. With the interpreter, its libraries and the
vocabulary (100 to 150 MB a process, partly shared) that is at most about 0.5 GB for 2 workers
(15 MB of JSON lines took 0.11 GB, half a million documents of one letter 0.15 GB), and stays below
2 GiB on any input that can be cut (see `Tokenizer.cuts_at_lines`: for tokenizer.json files of
others the longest document is added about ten times). Training a bpe comes before and takes what
its `sample_bytes` need.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.console import Progress, write_err
from accel_gpt.data.index import INDEX, Index, read_index
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.files import locked_file, read_json, sync, write_file
from accel_gpt.prepare.bpe import make_tokenizer
from accel_gpt.prepare.recipe import check_same, is_ready, recipe, source_fingerprint
from accel_gpt.prepare.shard_writer import ShardWriter, write_index
from accel_gpt.prepare.workers import Tokenized, child_processes, encode_all, worker_count
from accel_gpt.text.documents import (
    SPLITS,
    documents,
    expected_bytes,
    sample_texts,
    split_pieces,
)
from accel_gpt.text.files import guess_source, select
from accel_gpt.text.readers import Skipped

JOURNAL = "progress.json"
JOURNAL_VERSION = 1
TOKENIZER_NAMES = ("bytes", "chars", "bpe", "gpt2")  # tokenizers that are no file of the user's
# What may be in an unfinished folder. Earlier versions added .part to the names of shards, and kept
# a database of the documents seen.
OURS = (
    r"((train|val)_\d+\.npy(\.part)?|tokenizer(_config)?\.json|seen\.sqlite3|"
    rf"{INDEX}|{JOURNAL})"
)
RESUMES = "run the same command again: it resumes"


def prepare(config: PrepareConfig, out: Path) -> bool:
    """Make the data folder `out`, unless it was already made with the same settings.

    Of several processes one prepares and the others wait. Returns whether this one did. Raises
    `UserError` for other settings, a folder in the way, too little text, a full disk; `DataError`
    for text that cannot be read.
    """
    out = Path(out).resolve()
    config = with_source(config, out)
    if is_ready(config, out):
        return False
    source = source_fingerprint(config)  # fails before anything is made
    folder, start = out.with_name(f"{out.name}.partial"), time.monotonic()
    try:
        with writing(out, "" if config.path == "-" else f"; {RESUMES}"):
            if is_ready(config, out):
                return False
            describe_selection(config)
            fill(config, folder, source)
            publish(folder, out)
    except KeyboardInterrupt:
        if folder.exists() and config.path != "-":
            sys.stderr.write(f"{folder} is kept; {RESUMES}\n")
        raise
    seconds = time.monotonic() - start
    sys.stdout.write(f"prepared {out}: {summary(read_index(out))}, {seconds:.1f} s\n")
    return True


def with_source(config: PrepareConfig, out: Path) -> PrepareConfig:
    """`config` with the kind of its source if that is auto: as `out` has it if it was made, else
    the kind of the files with the most bytes.
    """
    if config.source != "auto":
        return config
    made = read_index(out).prepared.get("source") if (out / INDEX).exists() else None
    return replace(config, source=made or guess_source(str(config.path)))


def describe_selection(config: PrepareConfig) -> None:
    """Print which files are read and which are left out, if the source is files."""
    if config.source in ("text", "jsonl", "parquet", "arrow") and config.path != "-":
        for line in select(config).lines():
            write_err(line)


@contextmanager
def writing(out: Path, advice: str) -> Iterator[None]:
    """Hold the lock of a data folder; what the disk refuses is a `UserError` ending in `advice`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process prepares {out}; waiting for it\n"
        with locked_file(out.with_name(f"{out.name}.lock"), notice=notice):
            yield
    except OSError as error:
        raise UserError(f"data folder {out} could not be written: {error}{advice}") from None


def fill(config: PrepareConfig, folder: Path, source: str) -> None:
    """Write everything that the data folder will hold into `folder`, or what is missing there."""
    copied = source_fingerprint(config, times=False)
    requested = recipe(config) | {"source_fingerprint": copied}
    if source and (folder / INDEX).exists():  # stopped between its completion and its new name
        check_same(folder, read_index(folder).prepared, requested)
        return
    work = begin(config, folder, requested, source)
    work.write_shards()
    hold_out(work.writers, config.val_fraction, work.tokenizer.eot_id)
    splits = {name: writer.finish() for name, writer in work.writers.items()}
    try:
        tokens = {name: sum(shard.tokens for shard in splits[name]) for name in SPLITS}
        check_enough_text(tokens, config.val_fraction)
    except UserError:
        shutil.rmtree(folder)
        raise
    sync(folder)
    counts = work.counts() if config.skip_invalid else {}
    write_index(folder, work.tokenizer, splits, requested | counts)


def hold_out(writers: Mapping[str, ShardWriter], val_fraction: float, eot_id: int | None) -> None:
    """Cut the last shard where all of the few documents fell to one split: its end is the other."""
    for full, empty, share in (("train", "val", val_fraction), ("val", "train", 1 - val_fraction)):
        lacking, source = writers[empty], writers[full]
        if not lacking.shards and lacking.tokens < 2 and source.tokens > 3:
            count = min(max(2, int(source.tokens * share)), source.tokens - 2)
            lacking.add(*source.take(count, eot_id))


def check_enough_text(tokens: Mapping[str, int], val_fraction: float) -> None:
    """`UserError` unless each split holds a token and its successor."""
    if min(tokens.values()) < 2:
        raise UserError(
            f"there is too little text to train on: {tokens['train']} tokens for train and "
            f"{tokens['val']} for val, expected at least 2 each; give more text, or another "
            f"data.prepare.val_fraction than {val_fraction}"
        )


def publish(folder: Path, out: Path) -> None:
    """Remove what is no part of the complete folder, and give it its name."""
    splits = read_index(folder).splits
    shards = {shard.name for split in splits.values() for shard in split}
    kept = {INDEX, "tokenizer.json", "tokenizer_config.json", *shards}
    for path in folder.iterdir():
        if re.match(OURS, path.name) and path.name not in kept:
            path.unlink()
    sync(folder)
    folder.rename(out)
    sync(out.parent)


def summary(index: Index) -> str:
    """Shards, tokens, bytes per token, and how much was left out."""
    shards = [shard for part in index.splits.values() for shard in part]
    tokens = sum(shard.tokens for shard in shards)
    utf8_bytes = sum(shard.bytes for shard in shards)
    each = ", ".join(f"{name} {sum(s.tokens for s in p):,}" for name, p in index.splits.items())
    skipped = index.prepared.get("skipped")
    left_out = "" if skipped is None else f", {skipped:,} invalid skipped"
    return (
        f"{len(shards)} shards, {tokens:,} tokens ({each}), {utf8_bytes / max(1, tokens):.2f} "
        f"bytes per token{left_out}"
    )


class Work:
    """A folder that is being filled, from where its `journal` says: its settings under "asked", the
    position in the source, how full the shards are, and the `counts`.

    Raises `DataError` for a folder that holds less than the journal says.
    """

    def __init__(self, config: PrepareConfig, folder: Path, journal: dict[str, Any]) -> None:
        self.config, self.folder, self.journal = config, folder, journal
        self.tokenizer = load_tokenizer(folder)
        dtype = token_dtype(self.tokenizer.vocab_size)
        states = journal["splits"]
        self.writers = {
            name: ShardWriter(
                folder=folder,
                split=name,
                dtype=dtype,
                shard_tokens=config.shard_tokens,
                state=states.get(name),
            )
            for name in SPLITS
        }
        self.skipped = Skipped(config.skip_invalid, journal["skipped"])

    def write_shards(self) -> None:
        """Append what the source holds from the position of the journal on."""
        total = expected_bytes(self.config)
        done = sum(w.bytes + sum(s.bytes or 0 for s in w.shards) for w in self.writers.values())
        with (
            closing(self.batches(total)) as batches,
            Progress("tokenizing", "bytes", total=total, done=done) as progress,
        ):
            for batch in batches:
                full = False
                for split, tokens, begun, utf8_bytes in batch.encoded:
                    full |= self.writers[split].add(tokens, begun, utf8_bytes)
                    progress.advance(utf8_bytes)
                if full:
                    self.save(batch.journal)

    def batches(self, total: int | None) -> Generator[Tokenized, None, None]:
        """What is to be appended, in order."""
        first, second, third = self.journal["position"]
        start = (first, second, third)
        cut_long = self.tokenizer.cuts_at_lines
        pieces = split_pieces(self.config, cut_long, start, skipped=self.skipped)
        workers = worker_count(self.config.workers, total)
        return encode_all(pieces, self.counts, self.folder, workers)

    def counts(self) -> dict[str, int]:
        """How many invalid documents were skipped, as far as the source was read."""
        return {"skipped": self.skipped.count}

    def save(self, changes: Mapping[str, Any]) -> None:
        """Make all that was added safe on disk, then write the journal with `changes`."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        sync(self.folder)
        self.journal |= {"tokenizer": self.tokenizer.fingerprint, "splits": splits, **changes}
        write_file(self.folder / JOURNAL, [json.dumps(self.journal).encode()])


# --------------------------------------------------------------------------- begin or resume


def begin(config: PrepareConfig, folder: Path, requested: Mapping[str, Any], source: str) -> Work:
    """Resume in `folder` where that is possible; else start over and report why."""
    if folder.exists():
        try:
            return resume(config, folder, requested, source)
        except DataError as why:
            discard(folder)
            sys.stderr.write(f"{folder} cannot be resumed: {why}; starting over\n")
    folder.mkdir()
    sys.stderr.write(f"making the {config.tokenizer} tokenizer\n")
    try:
        if config.tokenizer == "bpe":  # its trainer's threads stay out of the process that forks
            with child_processes(1) as pool:
                pool.submit(create_tokenizer, config, folder).result()
        else:
            create_tokenizer(config, folder)
        for path in folder.iterdir():
            sync(path)
        journal = {"version": JOURNAL_VERSION, "asked": requested, "source": source, "splits": {}}
        journal |= {"position": (0, 0, 0), "skipped": 0}
        work = Work(config, folder, journal)
        work.save({})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return work


def resume(config: PrepareConfig, folder: Path, requested: Mapping[str, Any], source: str) -> Work:
    """The work from where its journal says.

    Raises `DataError` where it cannot be resumed, another `UserError` where it must not be
    discarded.
    """
    if not source:
        raise DataError("standard input cannot be read again")
    given = None
    if config.tokenizer not in TOKENIZER_NAMES:
        given = named_tokenizer(config.tokenizer).fingerprint
    try:
        journal = read_json(folder / JOURNAL)
        if journal["version"] != JOURNAL_VERSION:
            raise DataError("another version of accel_gpt made it")
        begun = {**journal["asked"], "skip_invalid": config.skip_invalid or journal["skipped"] > 0}
        if journal["source"] != source:
            begun["source_fingerprint"] = journal["source"]
        check_same(folder, begun, {**requested, "skip_invalid": config.skip_invalid})
        if given not in (None, journal["tokenizer"]):
            raise DataError("the tokenizer has changed")
        work = Work(config, folder, journal)
    except AccelGPTError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"its {JOURNAL} is missing or damaged ({error!r:.80})") from None
    tokens = sum(w.tokens + sum(s.tokens for s in w.shards) for w in work.writers.values())
    sys.stderr.write(f"resuming from {tokens:,} tokens in {folder}\n")
    return work


def create_tokenizer(config: PrepareConfig, folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    texts = partial(documents, config)
    if config.tokenizer == "bpe":
        texts = partial(sample_texts, config, config.sample_bytes)
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, texts)
    tokenizer.save(folder)


def discard(folder: Path) -> None:
    """Remove an unfinished folder; `UserError` when it holds a file that is not of this module."""
    strange = [path.name for path in folder.iterdir() if not re.match(OURS, path.name)]
    if strange:
        raise UserError(
            f"{folder}, where the data folder is to be made, holds {strange[0]}; it is left "
            "unchanged: remove it, or choose another folder"
        )
    shutil.rmtree(folder)
