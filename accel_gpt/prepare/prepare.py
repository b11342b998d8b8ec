"""Prepare a data folder of token shards from text; the folder is complete or does not exist.

Reads the documents of a source. Writes shards, dataset.json and tokenizer.json into
`<out>.partial`, and renames it to `<out>` when it is complete. A journal there is written whenever
a shard is full. With it, the same command resumes after any interruption and writes the same bytes.

Memory, with w workers: this process holds at most 2w + 1 batches of about 1 MB of text, and each
worker holds one. The interpreter, its libraries and the vocabulary take 100 to 150 MB per process,
partly shared. A process that streams a data set takes about 250 MB. A `tokenizer.json` that allows
no cut (`pieces.py`) also needs about a hundred times the longest document. A bpe is trained before,
on at most `BPE_BYTES`; its memory depends on them.
"""

import json
import re
import shutil
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import write_err
from accel_gpt.data.index import INDEX, Index, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
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
from accel_gpt.prepare.lost_text import LostText
from accel_gpt.prepare.pieces import cut_finder
from accel_gpt.prepare.shards import ShardWriter, write_index
from accel_gpt.prepare.sources import select, source_fingerprint
from accel_gpt.prepare.workers import child_processes, encode_all, worker_count
from accel_gpt.training.display import Progress

JOURNAL = "progress.json"
FINGERPRINT = "source_fingerprint"
TOKENIZER_NAMES = ("bytes", "chars", "bpe", "gpt2")  # names that are not a path or Hub id
BPE_BYTES = 1_000_000_000  # bytes of UTF-8 text on which a bpe is trained, spread over the source
# Names of the files in an unfinished folder
OWN_FILES = rf"((train|val)_\d+\.npy|tokenizer(_config)?\.json|{INDEX}|{JOURNAL})(\.tmp.*)?"
ROW_SOURCES = ("jsonl", "parquet", "dataset")
RESUMES = "run the same command again to resume"


def prepare(config: PrepareConfig, out: Path, keep_changed: bool = False) -> bool:
    """Prepare the data folder `out`, unless it was already prepared with the same settings.

    If several processes call this, one prepares and the others wait. Returns whether this process
    prepared the folder. `keep_changed` only warns if the text has changed since. Raises `UserError`
    if `out` has other settings, content or text, or if there is too little text. Raises `DataError`
    if the text cannot be read.
    """
    out = Path(out).resolve()
    if is_ready(config, out, keep_changed):
        return False
    selection = select(config)  # raises before anything is written
    config = replace(config, source=selection.source)
    folder = out.with_name(f"{out.name}.partial")
    start = time.monotonic()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process is preparing {out}; waiting for it\n"
        with locked_file(out.with_name(f"{out.name}.lock"), notice=notice):
            if is_ready(config, out, keep_changed):
                return False
            if config.source not in ("dataset", "stdlib"):
                for line in selection.lines():
                    write_err(line)
            write_folder(config, selection.files, folder)
            (folder / JOURNAL).unlink(missing_ok=True)
            sync(folder)
            folder.rename(out)
            sync(out.parent)
    except KeyboardInterrupt:
        if folder.exists():
            sys.stderr.write(f"{folder} is kept; {RESUMES}\n")
        raise
    seconds = time.monotonic() - start
    sys.stdout.write(f"prepared {out}: {summary(read_index(out))}, {seconds:.1f} s\n")
    return True


def write_folder(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Write the content of the data folder into `folder`, resuming if it is unfinished."""
    requested = settings(config) | {FINGERPRINT: source_fingerprint(config, files)}
    if (folder / INDEX).exists() and read_index(folder).prepared == requested:
        return  # stopped before the folder was renamed
    work = resume_or_start(config, files, folder, requested)
    work.write_shards()
    fill_empty_split(work.writers, config.val_fraction, work.tokenizer)
    splits = {name: writer.finish() for name, writer in work.writers.items()}
    tokens = {name: sum(shard.tokens for shard in splits[name]) for name in SPLITS}
    if min(tokens.values()) < 2:
        shutil.rmtree(folder)
        require(
            config.source not in ROW_SOURCES or sum(tokens.values()) > 0,
            f"column {config.text_field} holds no text in any row; set data.prepare.text_field to "
            "the column that holds the text",
        )
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
    write_index(folder, work.tokenizer, splits, requested)
    for line in work.lost.warnings(work.tokenizer):
        write_err(f"WARNING: {line}")
    documents = sum(shard.documents or 0 for name in SPLITS for shard in splits[name])
    if work.tokenizer.eot_id is None and documents > len(SPLITS):
        write_err(
            f"WARNING: the {work.tokenizer.kind} tokenizer has no end-of-text token, so nothing "
            "lies between the documents"
        )


def fill_empty_split(
    writers: Mapping[str, ShardWriter], val_fraction: float, tokenizer: Tokenizer
) -> None:
    """If every document lands in one split, move the end of that split to the other split."""
    for full, empty, share in (("train", "val", val_fraction), ("val", "train", 1 - val_fraction)):
        target = writers[empty]
        source = writers[full]
        if not target.shards and target.tokens < 2 and source.tokens > 3:
            count = min(max(2, int(source.tokens * share)), source.tokens - 2)
            tokens, document_count, utf8_bytes = source.cut_end(count, tokenizer)
            target.add(tokens, document_count, utf8_bytes)


def summary(index: Index) -> str:
    """Describe shards, tokens and bytes per token."""
    tokens: dict[str, int] = {}
    utf8_bytes = 0
    count = 0
    for name, shards in index.splits.items():
        tokens[name] = sum(shard.tokens for shard in shards)
        utf8_bytes += sum(shard.bytes for shard in shards)
        count += len(shards)
    total = sum(tokens.values())
    each = ", ".join(f"{name} {number:,}" for name, number in tokens.items())
    return (
        f"{plural(count, 'shard')}, {total:,} tokens ({each}), "
        f"{utf8_bytes / max(1, total):.2f} bytes per token"
    )


# --------------------------------------------------------------------------- settings


def settings(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings that the content of a data folder depends on, as the index has them.

    A URL loses its user and query, which may hold a password.
    """
    found = asdict(config)
    del found["workers"]
    if config.path is not None and is_url(config.path):
        parts = urllib.parse.urlsplit(config.path)
        netloc = parts.netloc.rpartition("@")[2]
        found["path"] = parts._replace(netloc=netloc, query="").geturl()
    return found


def differing_settings(
    made: Mapping[str, Any], requested: Mapping[str, Any], tokenizer_fingerprint: str
) -> str:
    """Describe the settings that differ from `made`, whose tokenizer has this fingerprint.

    `vocab_size` counts only for a bpe. The same tokenizer.json at another place is no difference. A
    setting that only another version of accel_gpt knows always differs.
    """
    found = []
    for key in made:
        if key not in requested and key != FINGERPRINT:
            found.append(f"{key}: {made[key]}, unknown to this version of accel_gpt")
    for key, value in requested.items():
        if key == FINGERPRINT or (key == "vocab_size" and requested["tokenizer"] != "bpe"):
            continue
        if made.get(key) == value:
            continue
        is_given = key == "tokenizer" and value not in TOKENIZER_NAMES
        if is_given and named_tokenizer(value).fingerprint == tokenizer_fingerprint:
            continue
        found.append(f"{key}: {made.get(key)}, requested {value}")
    return "; ".join(found)


def is_ready(config: PrepareConfig, out: Path, keep_changed: bool) -> bool:
    """Return whether `out` was prepared with these settings; False if it is missing or empty.

    Raises `UserError` if it was prepared with other settings or is not a data folder, and unless
    `keep_changed`, if the text has changed since.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if config.source is None:
            read_index(out)  # raises
        return False
    if not (out / INDEX).exists():
        raise UserError(
            f"{out} exists and has no {INDEX}, so it is not a data folder; choose another folder"
        )
    index = read_index(out)
    made = index.prepared
    if config.source is None:
        return True
    found = config
    if config.source == "auto":
        found = replace(config, source=made.get("source", "auto"))
    if differ := differing_settings(made, settings(found), index.tokenizer.fingerprint):
        advice = "delete it, or choose another folder"
        if keep_changed:  # the start of a run
            advice = (
                "to prepare the text with these settings, set another out_dir and data folder; to "
                "train on the folder as it is, give --data.train on the command line, or remove "
                "data.prepare from the config"
            )
        raise UserError(f"data folder {out} was prepared with other settings ({differ}); {advice}")
    if text_changed(config, made.get(FINGERPRINT)):
        problem = f"the files of {config.path or config.source} have changed since {out} was"
        require(keep_changed, f"{problem} prepared; delete it, or choose another folder")
        sys.stderr.write(
            f"WARNING: {problem} prepared, which is used as it is; to train on the changed files, "
            "start a new run with another out_dir and data folder\n"
        )
    return True


def text_changed(config: PrepareConfig, made: str | None) -> bool:
    """Return whether the files of the source exist here and differ from the prepared files."""
    if is_url(str(config.path)):
        return False
    try:
        selection = select(config)  # of auto: a given kind may read more files, such as tables
        found = replace(config, source=selection.source)
        return source_fingerprint(found, selection.files) != made
    except (AccelGPTError, OSError):
        return False


# --------------------------------------------------------------------------- start or resume


class Preparation:
    """An unfinished data folder whose shards are written from the position in its journal on.

    The journal holds the settings, the fingerprint of the tokenizer, the position in the source,
    the state of the shard writers, and what the tokens do not hold. Raises `DataError` if the
    folder holds less than the journal says.
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
        start = Position(*self.journal["position"])
        pieces = split_pieces(self.config, self.files, cut_finder(self.tokenizer), start)
        workers = worker_count(self.config.workers, total)
        with (
            closing(encode_all(pieces, self.folder, workers)) as batches,
            Progress("tokenizing", "bytes", total=total, done=done) as progress,
        ):
            for batch in batches:
                self.lost.add(batch.lost)
                full = False
                for piece, tokens in zip(batch.pieces, batch.tokens, strict=True):
                    utf8_bytes = len(piece.text.encode())
                    if self.writers[piece.split].add(tokens, int(piece.first), utf8_bytes):
                        full = True
                    progress.advance(utf8_bytes)
                if full:
                    self.save(batch.pieces[-1].after)

    def save(self, position: Position) -> None:
        """Sync all added tokens to disk, then write the journal with the position after them."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        sync(self.folder)
        self.journal |= {
            "tokenizer": self.tokenizer.fingerprint,
            "splits": splits,
            "lost": asdict(self.lost),
            "position": position,
        }
        write_file(self.folder / JOURNAL, [json.dumps(self.journal).encode()])


def resume_or_start(
    config: PrepareConfig, files: Sequence[Path], folder: Path, requested: Mapping[str, Any]
) -> Preparation:
    """Resume in `folder` if possible; otherwise print the reason and start over."""
    if folder.exists():
        try:
            return resume(config, files, folder, requested)
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
        journal = {"settings": dict(requested), "splits": {}, "lost": {}}
        work = Preparation(config, files, folder, journal)
        work.save(Position())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return work


def create_tokenizer(config: PrepareConfig, files: Sequence[Path], folder: Path) -> None:
    """Make the tokenizer of the config and save it in `folder`."""
    texts = partial(documents, config, files)
    if config.tokenizer == "bpe":
        texts = partial(sample_texts, config, files, BPE_BYTES)
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, texts)
    tokenizer.save(folder, vocab_size=tokenizer.vocab_size)


def resume(
    config: PrepareConfig, files: Sequence[Path], folder: Path, requested: Mapping[str, Any]
) -> Preparation:
    """Open the preparation that the journal in `folder` describes.

    Raises `DataError` if it cannot be resumed and may be discarded, and another `UserError` if it
    must be kept.
    """
    fingerprint = None
    if config.tokenizer not in TOKENIZER_NAMES:
        fingerprint = named_tokenizer(config.tokenizer).fingerprint
    if not (folder / JOURNAL).exists():
        raise DataError(f"it has no {JOURNAL}")
    journal = read_json(folder / JOURNAL)
    begun = journal["settings"] | {"path": requested["path"]}  # the fingerprint decides
    differ = differing_settings(begun, requested, journal["tokenizer"])
    if begun[FINGERPRINT] != requested[FINGERPRINT]:
        differ = "other text: names or sizes of the files have changed"
    if differ:
        held = any(state["shards"] for state in journal["splits"].values())
        require_resumable(folder, differ, held)
    if fingerprint not in (None, journal["tokenizer"]):
        raise DataError("the tokenizer has changed")
    work = Preparation(config, files, folder, journal)
    tokens = sum(writer.total_tokens for writer in work.writers.values())
    sys.stderr.write(f"resuming from {tokens:,} tokens in {folder}\n")
    return work


def require_resumable(folder: Path, differ: str, holds_tokens: bool) -> None:
    """Raise the error for a folder that was begun differently; it is kept if it holds tokens."""
    if not holds_tokens:
        raise DataError(f"it was begun with other settings or text ({differ}) and holds no tokens")
    raise UserError(
        f"{folder} was begun with other settings or text ({differ}); run the command with the "
        f"earlier ones, or remove {folder} to start over"
    )


def discard(folder: Path) -> None:
    """Remove an unfinished folder. Raises `UserError` if it holds a file of another origin."""
    for path in folder.iterdir():
        require(
            re.fullmatch(OWN_FILES, path.name) is not None,
            f"{folder} is the temporary folder of the data, but holds {path.name}; remove that "
            "file, or choose another data folder",
        )
    shutil.rmtree(folder)
