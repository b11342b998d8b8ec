"""Prepare a data folder of token shards from text; the folder is complete or does not exist.

Reads the documents of a source. Writes shards, dataset.json and tokenizer.json into
`<out>.partial`, and renames it to `<out>` when it is complete. A journal there is written whenever
a shard is full. With it, the same command resumes after any interruption and writes the same bytes.

Memory, with n cores: at most 2n + 1 batches of about 1 MB of text. The interpreter, its libraries
and the vocabulary take 100 to 150 MB, `datasets` another 150 MB, and each thread 12 MB for GPT-2's
vocabulary. Of a Parquet file, Arrow decodes up to 1 GiB ahead (measured with pyarrow 26;
`batch_readahead=0` does not change it). The end of a preparation takes 8 bytes per document. With a
`tokenizer.json`, a text that allows no cut (`pieces.py`) also needs about a hundred times its size.
A bpe is trained before, on at most `BPE_BYTES`; its memory depends on them.
"""

import json
import shutil
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import write_err
from accel_gpt.data.index import INDEX, Index, read_index
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
from accel_gpt.files import append_all_or_nothing, is_url, locked_file, read_json, sync, write_file
from accel_gpt.launcher import available_cores
from accel_gpt.prepare.bpe import make_tokenizer
from accel_gpt.prepare.counts import Counts, count_duplicates
from accel_gpt.prepare.documents import (
    BEGINNING,
    SPLITS,
    Position,
    WriteChat,
    expected_bytes,
    open_data_sets,
    read_pieces,
)
from accel_gpt.prepare.encoding import Encoder, encode_all
from accel_gpt.prepare.shards import ShardWriter, write_index
from accel_gpt.prepare.sources import TextSource, select, source_fingerprint
from accel_gpt.training.display import Progress

JOURNAL = "progress.json"
HASHES = "hashes.bin"  # of the documents, until the end
FINGERPRINT = "source_fingerprint"
BPE_BYTES = 1_000_000_000  # bytes of UTF-8 text, from the beginning, on which a bpe is trained
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
    sources, lines = select(config)  # raises before anything is written
    folder = out.with_name(f"{out.name}.partial")
    start = time.monotonic()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process is preparing {out}; waiting for it\n"
        with locked_file(out.with_name(f"{out.name}.lock"), notice=notice):
            if is_ready(config, out, keep_changed):
                return False
            for line in lines:
                write_err(line)
            write_folder(config, sources, folder)
            for name in (JOURNAL, HASHES):
                (folder / name).unlink(missing_ok=True)
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


def write_folder(config: PrepareConfig, sources: list[TextSource], folder: Path) -> None:
    """Write the content of the data folder into `folder`, resuming if it is unfinished."""
    requested = settings(config) | {FINGERPRINT: source_fingerprint(config, sources)}
    if (folder / INDEX).exists() and read_index(folder).prepared == requested:
        return  # stopped before the folder was renamed
    sources, lines = open_data_sets(config, sources)
    for line in lines:
        write_err(line)
    work = resume_or_start(config, sources, folder, requested)
    work.write_shards()
    if all(source.split is None for source in sources):
        fill_empty_split(work.writers, config.val_fraction, work.tokenizer)
    splits = {name: writer.finish() for name, writer in work.writers.items()}
    tokens = {name: sum(shard.tokens for shard in splits[name]) for name in SPLITS}
    if min(tokens.values()) < 2:
        shutil.rmtree(folder)
        empty = f"; {work.counts.empty:,} rows or files without text" if work.counts.empty else ""
        raise UserError(
            f"there is too little text: {plural(tokens['train'], 'token')} for train and "
            f"{tokens['val']} for val, expected at least 2 each{empty}"
        )
    sync(folder)
    for line in work.counts.lines(work.tokenizer, count_duplicates(folder / HASHES)):
        write_err(line)
    if work.tokenizer.eot_id is None and work.counts.documents > len(SPLITS):
        write_err(
            f"WARNING: the {work.tokenizer.kind} tokenizer has no end-of-text token, so nothing "
            "lies between the documents"
        )
    write_index(folder, work.tokenizer, splits, requested)


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
    for key in ("source", "val"):
        if is_url(str(found[key])):
            parts = urllib.parse.urlsplit(found[key])
            netloc = parts.netloc.rpartition("@")[2]
            found[key] = parts._replace(netloc=netloc, query="").geturl()
    return found


def differing_settings(made: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Describe the settings that differ from `made`."""
    found = []
    for key in {**made, **requested}:
        if made.get(key) == requested.get(key):
            continue
        if key == FINGERPRINT:
            found.append("other names or sizes of the files")
        else:
            found.append(f"{key}: {made.get(key)}, requested {requested.get(key)}")
    return "; ".join(found)


def is_ready(config: PrepareConfig, out: Path, keep_changed: bool) -> bool:
    """Return whether `out` was prepared with these settings; False if it is missing or empty.

    Raises `UserError` if it was prepared with other settings or is not a data folder, and unless
    `keep_changed`, if the text has changed since.
    """
    if config.source is None:
        read_index(out)
        return True
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    require((out / INDEX).exists(), f"{out} exists and has no {INDEX}, so it is not a data folder")
    index = read_index(out)
    fingerprint = index.prepared.get(FINGERPRINT)
    requested = settings(config) | {FINGERPRINT: fingerprint}
    differ = differing_settings(index.prepared, requested)
    require(not differ, f"data folder {out} was prepared with other settings ({differ})")
    if is_url(str(config.source)) or is_url(str(config.val)):
        return True
    try:
        changed = source_fingerprint(config, select(config)[0]) != fingerprint
    except (AccelGPTError, OSError):  # the text is gone
        changed = False
    if changed:
        problem = f"the files of {config.source} have changed since {out} was prepared"
        require(keep_changed, problem)
        write_err(f"WARNING: {problem}, which is used as it is")
    return True


# --------------------------------------------------------------------------- start or resume


class Preparation:
    """An unfinished data folder whose shards are written from the position in its journal on.

    The journal holds the settings, the fingerprint of the tokenizer, the position in the sources,
    the state of the shard writers, and the counts. Raises `DataError` if the folder holds less than
    the journal says.
    """

    def __init__(
        self,
        config: PrepareConfig,
        sources: list[TextSource],
        folder: Path,
        tokenizer: Tokenizer,
        journal: dict[str, Any],
    ) -> None:
        self.config = config
        self.sources = sources
        self.folder = folder
        self.tokenizer = tokenizer
        self.journal = journal
        self.counts = Counts(**journal["counts"])
        self.hashes = bytearray()  # not yet in the file
        self.writers = {
            name: ShardWriter(
                folder=folder,
                split=name,
                dtype=token_dtype(tokenizer.vocab_size),
                shard_tokens=config.shard_tokens,
                state=journal["splits"].get(name),
            )
            for name in SPLITS
        }
        size = journal.get("hashes", 0)
        path = folder / HASHES
        if size and (not path.exists() or path.stat().st_size < size):
            raise DataError(f"{HASHES} is missing, or shorter than the journal says")
        with path.open("ab") as file:
            file.truncate(size)

    def write_shards(self) -> None:
        """Tokenize the documents from the journal's position on, and append them to the shards."""
        pieces = read_pieces(
            self.config,
            self.sources,
            write_chat=chat_writer(self.config.tokenizer, self.folder, self.tokenizer),
            start=Position(*self.journal["position"]),
        )
        encoder = Encoder(self.tokenizer, self.folder)
        total = expected_bytes(self.sources)
        done = sum(writer.total_bytes for writer in self.writers.values())
        with (
            closing(encode_all(pieces, encoder, available_cores())) as batches,
            Progress("tokenizing", "bytes", total=total, done=done) as progress,
        ):
            for batch in batches:
                self.counts.add(batch.counts)
                self.hashes += batch.hashes
                full = [
                    self.writers[split].add_group(group) for split, group in batch.groups.items()
                ]
                progress.advance(sum(sum(group.utf8_bytes) for group in batch.groups.values()))
                if any(full):
                    self.save(batch.after)
        self.write_hashes()

    def save(self, position: Position) -> None:
        """Sync all added tokens to disk, then write the journal with the position after them."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        size = self.write_hashes()
        sync(self.folder)
        self.journal |= {
            "splits": splits,
            "counts": asdict(self.counts),
            "hashes": size,
            "position": position,
        }
        write_file(self.folder / JOURNAL, [json.dumps(self.journal).encode()])

    def write_hashes(self) -> int:
        """Append the hashes of documents to their file and sync it; return its size."""
        path = self.folder / HASHES
        append_all_or_nothing(path, bytes(self.hashes))
        self.hashes.clear()
        sync(path)
        return path.stat().st_size


def resume_or_start(
    config: PrepareConfig, sources: list[TextSource], folder: Path, requested: Mapping[str, Any]
) -> Preparation:
    """Resume in `folder` if possible; otherwise print the reason and start over.

    Raises `UserError` if the folder has another origin, or holds tokens of other settings.
    """
    path = folder / JOURNAL
    if folder.exists():
        require(path.exists(), f"{folder} has no {JOURNAL}; remove it, or choose another folder")
        try:
            if path.stat().st_size == 0:
                raise DataError("it holds no tokens")
            journal = read_json(path)
            if differ := differing_settings(journal["settings"], requested):
                problem = f"it was begun with other settings ({differ})"
                if any(state["shards"] for state in journal["splits"].values()):
                    raise UserError(f"{folder}: {problem}; remove it to start over")
                raise DataError(f"{problem} and holds no tokens")
            work = Preparation(config, sources, folder, load_tokenizer(folder), journal)
            tokens = sum(writer.total_tokens for writer in work.writers.values())
            write_err(f"resuming from {tokens:,} tokens in {folder}")
            return work
        except DataError as why:
            shutil.rmtree(folder)
            write_err(f"{folder} cannot be resumed: {why}; starting over")
    folder.mkdir()
    path.touch()  # from here on, the folder is known as ours
    write_err(f"making the {config.tokenizer} tokenizer")
    try:
        tokenizer = create_tokenizer(config, sources, folder)
        tokenizer.save(folder, vocab_size=tokenizer.vocab_size)
        for file in folder.iterdir():
            sync(file)
        journal = {"settings": dict(requested), "splits": {}, "counts": {}}
        work = Preparation(config, sources, folder, tokenizer, journal)
        work.save(BEGINNING)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return work


def create_tokenizer(config: PrepareConfig, sources: list[TextSource], folder: Path) -> Tokenizer:
    """Make the tokenizer of the config."""
    write_chat = chat_writer(config.tokenizer, folder, None)
    # without a cut between the splits of a text
    whole = [replace(source, split="train") for source in sources]

    def texts() -> Iterator[str]:
        size = 0  # bytes
        for piece in read_pieces(config, whole, write_chat):
            yield piece.text
            size += len(piece.text.encode())
            if config.tokenizer == "bpe" and size >= BPE_BYTES:
                return

    made: Future[Tokenizer] = Future()

    def make() -> None:
        try:
            made.set_result(make_tokenizer(config.tokenizer, config.vocab_size, texts))
        except BaseException as error:
            made.set_exception(error)

    # Ctrl-C does not reach a library that trains for minutes, but this thread, which waits
    threading.Thread(target=make, daemon=True).start()
    return made.result()


def chat_writer(name: str, folder: Path, tokenizer: Tokenizer | None) -> WriteChat:
    """Return the function that writes a chat with the template of the tokenizer in `folder`.

    It raises `UserError` if there is no template. Jinja runs the template in a sandbox.
    """

    @cache
    def load() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    def write(turns: list[dict[str, Any]]) -> str:
        require(
            tokenizer is not None and bool(tokenizer.config.get("chat_template")),
            f"data.prepare.text_field names chats, but the tokenizer {name} has no chat template; "
            "expected a tokenizer that has one",
        )
        return str(load().apply_chat_template(turns, tokenize=False))

    return write
