"""Prepare a data folder of token shards from text; the folder is complete or does not exist.

Reads the documents of a source. Writes shards, dataset.json and tokenizer.json into
`<out>.partial`, and renames it to `<out>` when it is complete. A journal there is written whenever
a shard is full. With it, the same command resumes after any interruption and writes the same bytes.

Memory, with w workers: this process holds at most 2w + 1 batches of about 1 MB of text, and each
worker holds one. The interpreter, its libraries and the vocabulary take 100 to 150 MB per process,
partly shared. A process that streams a data set takes about 250 MB. A `tokenizer.json` that allows
no cut (`data/cuts.py`) also needs about a hundred times the longest document. A bpe is trained
before; its memory depends on `sample_bytes`.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import write_err
from accel_gpt.data.index import INDEX, Index, read_index
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
from accel_gpt.files import locked_file, read_json, sync, write_file
from accel_gpt.prepare.bpe import make_tokenizer
from accel_gpt.prepare.documents import (
    SPLITS,
    Position,
    documents,
    expected_bytes,
    line_ends,
    sample_texts,
    split_pieces,
)
from accel_gpt.prepare.lost_text import LostText
from accel_gpt.prepare.pieces import FindCut, checked_cuts, find_cut
from accel_gpt.prepare.readers import Skipped
from accel_gpt.prepare.recipe import check_same, is_ready, recipe
from accel_gpt.prepare.shard_writer import ShardWriter, write_index
from accel_gpt.prepare.sources import Selection, guess_source, select, source_fingerprint
from accel_gpt.prepare.workers import Tokenized, child_processes, encode_all, worker_count
from accel_gpt.training.display import Progress

JOURNAL = "progress.json"
JOURNAL_VERSION = 1
TOKENIZER_NAMES = ("bytes", "chars", "bpe", "gpt2")  # names that are not a path or Hub id
# Names of the files in an unfinished folder
OWN_FILES = rf"((train|val)_\d+\.npy|tokenizer(_config)?\.json|{INDEX}|{JOURNAL})"
RESUMES = "run the same command again to resume"


def prepare(config: PrepareConfig, out: Path) -> bool:
    """Prepare the data folder `out`, unless it was already prepared with the same settings.

    If several processes call this, one prepares and the others wait. Returns whether this process
    prepared the folder. Raises `UserError` if `out` has other settings or other content, if there
    is too little text or if the disk is full. Raises `DataError` if the text cannot be read.
    """
    out = Path(out).resolve()
    config = with_source(config, out)
    if is_ready(config, out):
        return False
    selection = select(config)  # raises before anything is written
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
    """Replace the source auto by the kind that `out` was prepared from, else by a guess."""
    if config.source != "auto":
        return config
    made = read_index(out).prepared.get("source") if (out / INDEX).exists() else None
    return replace(config, source=made or guess_source(str(config.path)))


def describe_selection(selection: Selection) -> None:
    """Print which of the user's files are read and which are left out."""
    if selection.files and selection.source != "stdlib":
        for line in selection.lines():
            write_err(line)


@contextmanager
def lock_folder(out: Path, advice: str) -> Iterator[None]:
    """Hold the lock of a data folder, and turn an `OSError` into a `UserError` with `advice`."""
    for parent in out.parents:
        require(
            parent.is_dir() or not parent.exists(),
            f"data folder {out} cannot be made: {parent} is a file; choose another folder",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process is preparing {out}; waiting for it\n"
        with locked_file(out.with_name(f"{out.name}.lock"), notice=notice):
            yield
    except OSError as error:
        raise UserError(f"data folder {out} could not be written: {error}{advice}") from None


def write_folder(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Write the content of the data folder into `folder`, resuming if it is unfinished."""
    fingerprint = source_fingerprint(config, files, times=False)
    requested = recipe(config) | {"source_fingerprint": fingerprint}
    if fingerprint and (folder / INDEX).exists():  # interrupted before the folder was renamed
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
            f"there is too little text: {plural(tokens['train'], 'token')} for train and "
            f"{tokens['val']} for val, expected at least 2 each; give more text, or change "
            f"data.prepare.val_fraction ({config.val_fraction})"
        )
    if work.lost.is_all_lost:
        shutil.rmtree(folder)
        named = ", ".join(map(repr, work.lost.examples))
        raise UserError(
            f"the tokenizer {config.tokenizer} has no token for any visible character of the text, "
            f"such as {named}; set data.prepare.tokenizer to one "
            "with a token for each byte: bpe, bytes or gpt2"
        )
    sync(folder)
    counts = work.counts() if config.skip_invalid else {}
    write_index(folder, work.tokenizer, splits, requested | counts)
    for line in work.lost.warnings(work.tokenizer):
        write_err(f"WARNING: {line}")


def fill_empty_split(
    writers: Mapping[str, ShardWriter], val_fraction: float, eot_id: int | None
) -> None:
    """If every document lands in one split, move the end of that split to the other split."""
    for full, empty, share in (("train", "val", val_fraction), ("val", "train", 1 - val_fraction)):
        target = writers[empty]
        source = writers[full]
        if not target.shards and target.tokens < 2 and source.tokens > 3:
            count = min(max(2, int(source.tokens * share)), source.tokens - 2)
            tokens, document_count, utf8_bytes = source.cut_end(count, eot_id)
            target.add(tokens, document_count, utf8_bytes)


def publish(folder: Path, out: Path) -> None:
    """Remove temporary files from the complete folder, and rename it to `out`."""
    splits = read_index(folder).splits
    shards = {shard.name for split in splits.values() for shard in split}
    kept = {INDEX, "tokenizer.json", "tokenizer_config.json", *shards}
    for path in folder.iterdir():
        if re.match(OWN_FILES, path.name) and path.name not in kept:
            path.unlink()
    sync(folder)
    folder.rename(out)
    sync(out.parent)


def summary(index: Index) -> str:
    """Describe shards, tokens, bytes per token, and the number of skipped documents."""
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
    """An unfinished data folder whose shards are written from the position in its journal on.

    The journal holds the settings (key "asked"), the position in the source, the state of the
    shard writers, the `counts()`, and what the tokens do not hold. Raises `DataError` if the folder
    holds less than the journal says.
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
        self.lost = LostText(**journal["lost"])
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
        """Tokenize the documents from the journal's position on, and append them to the shards."""
        total = expected_bytes(self.config, self.files)
        done = sum(writer.total_bytes for writer in self.writers.values())
        with (
            closing(self.batches(total)) as batches,
            Progress("tokenizing", "bytes", total=total, done=done) as progress,
        ):
            for batch in batches:
                self.lost.add(batch.lost)
                full = False
                for piece in batch.encoded:
                    writer = self.writers[piece.split]
                    if writer.add(piece.tokens, piece.documents, piece.utf8_bytes):
                        full = True
                    progress.advance(piece.utf8_bytes)
                if full:
                    self.save(batch.journal)

    def batches(self, total: int | None) -> Generator[Tokenized, None, None]:
        """Yield tokenized batches from the journal's position on, in order."""
        pieces = split_pieces(
            config=self.config,
            files=self.files,
            find_cut=self.find_cut(),
            start=Position(*self.journal["position"]),
            skipped=self.skipped,
        )
        workers = worker_count(self.config.workers, total)
        return encode_all(pieces, self.counts, self.folder, workers)

    def find_cut(self) -> FindCut | None:
        """Return where long documents may be cut for the tokenizer; None: nowhere."""
        cuts = self.tokenizer.cuts
        if cuts is None:
            return find_cut if self.tokenizer.cuts_at_lines else None

        def keeps_ids(left: str, right: str) -> bool:
            return cuts.keeps_ids(line_ends(self.config, left), line_ends(self.config, right))

        return checked_cuts(keeps_ids)

    def counts(self) -> dict[str, int]:
        """Return the number of invalid documents that were skipped so far."""
        return {"skipped": self.skipped.count}

    def save(self, changes: Mapping[str, Any]) -> None:
        """Sync all added tokens to disk, then write the journal with `changes`."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        sync(self.folder)
        self.journal |= {
            "tokenizer": self.tokenizer.fingerprint,
            "splits": splits,
            "lost": asdict(self.lost),
            **changes,
        }
        write_file(self.folder / JOURNAL, [json.dumps(self.journal).encode()])


# --------------------------------------------------------------------------- start or resume


def resume_or_start(
    config: PrepareConfig, files: Sequence[Path], folder: Path, requested: Mapping[str, Any]
) -> Preparation:
    """Resume in `folder` if possible; otherwise print the reason and start over."""
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
        if config.tokenizer == "bpe":  # in a child: its threads must not exist when workers fork
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
            "lost": {},
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

    Raises `DataError` if it cannot be resumed and may be discarded, and another `UserError` if it
    must be kept.
    """
    if not source:
        raise DataError("standard input cannot be read again")
    fingerprint = None
    if config.tokenizer not in TOKENIZER_NAMES:
        fingerprint = named_tokenizer(config.tokenizer).fingerprint
    try:
        journal = read_json(folder / JOURNAL)
        if journal["version"] != JOURNAL_VERSION:
            raise DataError("another version of accel_gpt wrote it")
        begun = {**journal["asked"], "skip_invalid": config.skip_invalid or journal["skipped"] > 0}
        if journal["source"] != source:
            begun["source_fingerprint"] = journal["source"]
        try:
            check_same(folder, begun, {**requested, "skip_invalid": config.skip_invalid})
        except UserError:
            if holds_tokens(journal):
                raise
            raise DataError(
                "the settings or the text have changed since it was begun, and it holds no tokens"
            ) from None
        if fingerprint not in (None, journal["tokenizer"]):
            raise DataError("the tokenizer has changed")
        work = Preparation(config, files, folder, journal)
    except AccelGPTError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"its {JOURNAL} is missing or damaged ({error!r:.80})") from None
    tokens = sum(writer.total_tokens for writer in work.writers.values())
    sys.stderr.write(f"resuming from {tokens:,} tokens in {folder}\n")
    return work


def holds_tokens(journal: Mapping[str, Any]) -> bool:
    """Return whether tokens were saved with the journal."""
    return any(state["shards"] or state["tokens"] for state in journal["splits"].values())


def create_tokenizer(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    texts = partial(documents, config, files)
    if config.tokenizer == "bpe":
        texts = partial(sample_texts, config, files, config.sample_bytes)
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, texts)
    tokenizer.save(folder)


def discard(folder: Path) -> None:
    """Remove an unfinished folder. Raises `UserError` if it holds a file of another origin."""
    unknown = [path.name for path in folder.iterdir() if not re.match(OWN_FILES, path.name)]
    if unknown:
        raise UserError(
            f"{folder} is the temporary folder of the data, but holds {unknown[0]}; remove that "
            "file, or choose another data folder"
        )
    shutil.rmtree(folder)
