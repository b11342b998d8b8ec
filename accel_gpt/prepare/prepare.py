"""Text -> a data folder of token shards, made once, completely or not at all.

Reads the documents of a source; writes shards, dataset.json and tokenizer.json into
`<out>.partial`, which gets the name `<out>` once it is complete. A journal there, written whenever
a shard is full, lets the same command resume after any interruption, with the same bytes.

Memory, with w workers: at most 2w + 1 batches of about 1 MB of text wait here, and one in each
worker. With the interpreter, its libraries and the vocabulary a process takes 100 to 150 MB, partly
shared; a process that streams a data set takes about 250 MB. Other people's tokenizer.json files
may not allow cutting (see `Tokenizer.cuts_at_lines`): then about ten times the longest document is
added. Training a bpe comes before and takes what its `sample_bytes` need.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import Progress, write_err
from accel_gpt.data.index import INDEX, Index, read_index
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.files import locked_file, read_json, sync, write_file
from accel_gpt.prepare.bpe import make_tokenizer
from accel_gpt.prepare.documents import (
    SPLITS,
    Position,
    documents,
    expected_bytes,
    sample_texts,
    split_pieces,
)
from accel_gpt.prepare.readers import Skipped
from accel_gpt.prepare.recipe import check_same, is_ready, recipe
from accel_gpt.prepare.shard_writer import ShardWriter, write_index
from accel_gpt.prepare.sources import Selection, guess_source, select, source_fingerprint
from accel_gpt.prepare.workers import Tokenized, child_processes, encode_all, worker_count

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
    selection = select(config)  # fails before anything is made
    folder = out.with_name(f"{out.name}.partial")
    start = time.monotonic()
    try:
        with lock_folder(out, "" if config.path == "-" else f"; {RESUMES}"):
            if is_ready(config, out):
                return False
            describe_selection(selection)
            write_folder(config, selection.files, folder)
            publish(folder, out)
    except KeyboardInterrupt:
        if folder.exists() and config.path != "-":
            sys.stderr.write(f"{folder} is kept; {RESUMES}\n")
        raise
    seconds = time.monotonic() - start
    sys.stdout.write(f"prepared {out}: {summary(read_index(out))}, {seconds:.1f} s\n")
    return True


def with_source(config: PrepareConfig, out: Path) -> PrepareConfig:
    """Replace the source auto by the kind that `out` was made from, or that its files have."""
    if config.source != "auto":
        return config
    made = read_index(out).prepared.get("source") if (out / INDEX).exists() else None
    return replace(config, source=made or guess_source(str(config.path)))


def describe_selection(selection: Selection) -> None:
    """Print which files are read and which are left out, if the source is files of the user's."""
    if selection.files and selection.source != "stdlib":
        for line in selection.lines():
            write_err(line)


@contextmanager
def lock_folder(out: Path, advice: str) -> Iterator[None]:
    """Hold the lock of a data folder. An error of the disk is a `UserError` ending in `advice`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process prepares {out}; waiting for it\n"
        with locked_file(out.with_name(f"{out.name}.lock"), notice=notice):
            yield
    except OSError as error:
        raise UserError(f"data folder {out} could not be written: {error}{advice}") from None


def write_folder(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Write the whole content of the data folder into `folder`, or what is missing there."""
    copied = source_fingerprint(config, files, times=False)
    requested = recipe(config) | {"source_fingerprint": copied}
    if copied and (folder / INDEX).exists():  # stopped between its completion and its new name
        check_same(folder, read_index(folder).prepared, requested)
        return
    work = resume_or_start(config, files, folder, requested)
    work.write_shards()
    fill_empty_split(work.writers, config.val_fraction, work.tokenizer.eot_id)
    splits = {name: writer.finish() for name, writer in work.writers.items()}
    tokens = {name: sum(shard.tokens for shard in splits[name]) for name in SPLITS}
    if min(tokens.values()) < 2:
        shutil.rmtree(folder)
        raise UserError(
            f"there is too little text to train on: {plural(tokens['train'], 'token')} "
            f"for train and {tokens['val']} for val, expected at least 2 each; give more text, "
            f"or another data.prepare.val_fraction than {config.val_fraction}"
        )
    sync(folder)
    counts = work.counts() if config.skip_invalid else {}
    write_index(folder, work.tokenizer, splits, requested | counts)


def fill_empty_split(
    writers: Mapping[str, ShardWriter], val_fraction: float, eot_id: int | None
) -> None:
    """If every one of a few documents lies in one split, make its end the other split."""
    for full, empty, share in (("train", "val", val_fraction), ("val", "train", 1 - val_fraction)):
        lacking = writers[empty]
        source = writers[full]
        if not lacking.shards and lacking.tokens < 2 and source.tokens > 3:
            count = min(max(2, int(source.tokens * share)), source.tokens - 2)
            tokens, document_count, utf8_bytes = source.cut_end(count, eot_id)
            lacking.add(tokens, document_count, utf8_bytes)


def publish(folder: Path, out: Path) -> None:
    """Remove what is no part of the complete folder, and rename it to `out`."""
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
    """Describe shards, tokens, bytes per token, and how much was left out."""
    tokens: dict[str, int] = {}
    utf8_bytes = 0
    count = 0
    for name, shards in index.splits.items():
        tokens[name] = sum(shard.tokens for shard in shards)
        utf8_bytes += sum(shard.bytes for shard in shards)
        count += len(shards)
    total = sum(tokens.values())
    each = ", ".join(f"{name} {number:,}" for name, number in tokens.items())
    skipped = index.prepared.get("skipped")
    left_out = "" if skipped is None else f", {skipped:,} invalid skipped"
    return (
        f"{plural(count, 'shard')}, {total:,} tokens ({each}), "
        f"{utf8_bytes / max(1, total):.2f} bytes per token{left_out}"
    )


class Preparation:
    """A folder into which shards are written, from the position in its journal on.

    The journal holds its settings under "asked", the position in the source, how full the shards
    are, and the `counts`. Raises `DataError` for a folder that holds less than the journal says.
    """

    def __init__(
        self,
        config: PrepareConfig,
        files: Sequence[Path],
        folder: Path,
        journal: dict[str, Any],
    ) -> None:
        self.config = config
        self.files = files
        self.folder = folder
        self.journal = journal
        self.tokenizer = load_tokenizer(folder)
        self.skipped = Skipped(config.skip_invalid, journal["skipped"])
        self.writers = {
            name: ShardWriter(
                folder=folder,
                split=name,
                dtype=token_dtype(self.tokenizer.vocab_size),
                shard_tokens=config.shard_tokens,
                state=journal["splits"].get(name),
            )
            for name in SPLITS
        }

    def write_shards(self) -> None:
        """Append the documents of the source from the position of the journal on."""
        total = expected_bytes(self.config, self.files)
        done = sum(writer.total_bytes for writer in self.writers.values())
        with (
            closing(self.batches(total)) as batches,
            Progress("tokenizing", "bytes", total=total, done=done) as progress,
        ):
            for batch in batches:
                full = False
                for piece in batch.encoded:
                    writer = self.writers[piece.split]
                    if writer.add(piece.tokens, piece.documents, piece.utf8_bytes):
                        full = True
                    progress.advance(piece.utf8_bytes)
                if full:
                    self.save(batch.journal)

    def batches(self, total: int | None) -> Generator[Tokenized, None, None]:
        """Tokenize what follows the position of the journal, in order."""
        pieces = split_pieces(
            config=self.config,
            files=self.files,
            cut_long=self.tokenizer.cuts_at_lines,
            start=Position(*self.journal["position"]),
            skipped=self.skipped,
        )
        workers = worker_count(self.config.workers, total)
        return encode_all(pieces, self.counts, self.folder, workers)

    def counts(self) -> dict[str, int]:
        """Return how many invalid documents were skipped, as far as the source was read."""
        return {"skipped": self.skipped.count}

    def save(self, changes: Mapping[str, Any]) -> None:
        """Make all that was added safe on disk, then write the journal with `changes`."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        sync(self.folder)
        self.journal |= {"tokenizer": self.tokenizer.fingerprint, "splits": splits, **changes}
        write_file(self.folder / JOURNAL, [json.dumps(self.journal).encode()])


# --------------------------------------------------------------------------- start or resume


def resume_or_start(
    config: PrepareConfig, files: Sequence[Path], folder: Path, requested: Mapping[str, Any]
) -> Preparation:
    """Resume in `folder` if that is possible; otherwise start over and report why."""
    source = source_fingerprint(config, files)
    if folder.exists():
        try:
            return resume(config, files, folder, requested, source)
        except DataError as why:
            discard(folder)
            sys.stderr.write(f"{folder} cannot be resumed: {why}; starting over\n")
    folder.mkdir()
    sys.stderr.write(f"making the {config.tokenizer} tokenizer\n")
    try:
        if config.tokenizer == "bpe":  # its trainer's threads stay out of the process that forks
            with child_processes(1) as pool:
                pool.submit(create_tokenizer, config, files, folder).result()
        else:
            create_tokenizer(config, files, folder)
        for path in folder.iterdir():
            sync(path)
        journal = {
            "version": JOURNAL_VERSION,
            "asked": requested,
            "source": source,
            "splits": {},
            "position": Position(),
            "skipped": 0,
        }
        work = Preparation(config, files, folder, journal)
        work.save({})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return work


def resume(
    config: PrepareConfig,
    files: Sequence[Path],
    folder: Path,
    requested: Mapping[str, Any],
    source: str,
) -> Preparation:
    """Open the preparation that the journal in `folder` describes.

    Raises `DataError` if it cannot be resumed, another `UserError` if it must not be discarded.
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
        work = Preparation(config, files, folder, journal)
    except AccelGPTError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"its {JOURNAL} is missing or damaged ({error!r:.80})") from None
    tokens = sum(writer.total_tokens for writer in work.writers.values())
    sys.stderr.write(f"resuming from {tokens:,} tokens in {folder}\n")
    return work


def create_tokenizer(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    texts = partial(documents, config, files)
    if config.tokenizer == "bpe":
        texts = partial(sample_texts, config, files, config.sample_bytes)
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, texts)
    tokenizer.save(folder)


def discard(folder: Path) -> None:
    """Remove an unfinished folder; `UserError` if it holds a file that this module did not make."""
    strange = [path.name for path in folder.iterdir() if not re.match(OURS, path.name)]
    if strange:
        raise UserError(
            f"{folder}, where the data folder is to be made, holds {strange[0]}; it is left "
            "unchanged: remove it, or choose another folder"
        )
    shutil.rmtree(folder)
