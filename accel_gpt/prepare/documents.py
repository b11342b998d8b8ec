"""Read the documents of a source in order, and assign them to the splits train and val.

Sources: Python's own library, files of text, JSON lines, Parquet or Arrow, a Hub data set, standard
input. Each is read in bounded memory, in a fixed order, from any `Position` on. `files` are the
files that `select()` of `sources.py` chose; a data set and standard input have none.

Splits: if there are fewer than `FEW_TEXTS` text files, the end of each is val, as in nanoGPT.
Otherwise a hash of each document decides its split, so equal documents are in the same split.
With a `separator`, each text between two separators is a document, and a hash decides its split.

Standard input (path "-") can be read only once. As jsonl, each line is one object. As text, it is
cut into pieces of about a megabyte. The end of each piece is val, and end-of-text follows both
parts.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import DataError, require
from accel_gpt.prepare.pieces import FindCut, pieces
from accel_gpt.prepare.readers import (
    Row,
    Skipped,
    State,
    decode_chunks,
    hub_rows,
    json_lines,
    read_rows,
    separated_rows,
    text_chunks,
    text_start,
    whole_text,
)
from accel_gpt.prepare.sources import COMPRESSIONS

BATCH_CHARACTERS = 1_000_000  # characters of text that a process tokenizes at once
FEW_TEXTS = 100  # with fewer text files, the end of each file is val
COMPRESSED = (*COMPRESSIONS, ".parquet")
EXPANSION = 3  # bytes of text per byte of a compressed file; assumption for prose and code
STDIN = "standard input"
LINE_END = re.compile(r"\A\r?\n|\r?\n\Z")  # beside a separator
SPLITS = ("train", "val")


class Position(NamedTuple):
    """The position at which to resume reading, as values that JSON can hold."""

    file: int = 0
    """Index of the file; 0 for a data set and standard input."""
    offset: int = 0
    """Byte offset in a text file; in other sources the number of the row."""
    piece: int = 0
    """Number of pieces of this row that were already read."""
    state: State | None = None
    """State of a data set at this row or an earlier row."""


class Piece(NamedTuple):
    """A document or part of a document, with its split."""

    split: str
    text: str
    first: bool
    last: bool
    key: bytes
    """Hash of the whole document (`split_hash()`), equal for equal documents."""
    after: Position
    """The position after this piece."""


def split_pieces(
    config: PrepareConfig,
    files: Sequence[Path],
    find_cut: FindCut | None,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Yield the documents from position `start` on, as pieces.

    `find_cut`: where `pieces()` cuts documents into pieces of about `BATCH_CHARACTERS`; None: each
    document is one piece. `skipped` counts invalid documents if `config.skip_invalid` is set;
    otherwise they raise `DataError`.
    """
    read_pieces = text_pieces if is_text(config) else row_pieces
    return read_pieces(config, files, find_cut, start, skipped)


def documents(
    config: PrepareConfig, files: Sequence[Path], size: int = BATCH_CHARACTERS
) -> Iterator[str]:
    """Yield the texts of the source in order, cut into pieces of about `size` characters.

    Raises the errors of `split_pieces()`, and `UserError` for standard input, which can be read
    only once.
    """
    require(
        config.path != "-",
        f"data.prepare.path is -, but {STDIN} can be read only once, and the tokenizer "
        f"{config.tokenizer} needs to read the text first; give a file, or set "
        "data.prepare.tokenizer to gpt2 or the path of a tokenizer.json",
    )
    return all_texts(config, files, size)


def sample_texts(config: PrepareConfig, files: Sequence[Path], size: int) -> Iterator[str]:
    """Yield a sample of about `size` UTF-8 bytes: short documents, and pieces of long ones.

    A hash of each text's number selects it, so the sample is spread evenly over the source. The
    size of a data set is not known in advance, so the sample is its beginning. Raises the errors
    of `documents()`.
    """
    texts = documents(config, files, min(BATCH_CHARACTERS, max(1, size // 16)))
    total = size
    if config.source != "dataset":
        total = 0
        for path in files:
            total += path.stat().st_size * (EXPANSION if is_compressed(path) else 1)
    keep = min(1.0, size / max(total, 1))
    limit = size if keep == 1 else 2 * size  # the total of compressed files is an estimate
    given = 0
    owed = 0.0
    for number, text in enumerate(texts):
        length = len(text.encode())
        owed += keep * length
        if keep < 1 and owed < length * as_fraction(split_hash(str(number).encode()).digest()):
            continue
        owed -= length
        given += length
        yield text
        if given >= limit:
            return


def expected_bytes(config: PrepareConfig, files: Sequence[Path]) -> int | None:
    """Return the bytes of text in the source; None if they are not known in advance."""
    if not reads_text(config) or any(is_compressed(path) for path in files):
        return None
    return sum(path.stat().st_size for path in files)


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed, so that its size is not the size of its text."""
    return path.name.lower().endswith(COMPRESSED)


def reads_text(config: PrepareConfig) -> bool:
    """Return whether the source is files of text."""
    return config.source in ("stdlib", "text") and config.path != "-"


def is_text(config: PrepareConfig) -> bool:
    """Return whether each file of the source is one text."""
    return reads_text(config) and config.separator is None


def line_ends(config: PrepareConfig, text: str) -> str:
    """Replace Windows line ends by Unix line ends, unless `keep_crlf` is set."""
    return text if config.keep_crlf else text.replace("\r\n", "\n")


# --------------------------------------------------------------------------- text files


class Part(NamedTuple):
    """A document in a text file."""

    split: str
    start: int  # byte offset
    end: int  # byte offset
    key: bytes


def text_pieces(
    config: PrepareConfig,
    files: Sequence[Path],
    find_cut: FindCut | None,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Yield the pieces of text files. Each file is read in full before, to decide its splits."""
    for number, path in enumerate(files):
        if number < start.file:
            continue
        try:
            parts = text_parts(path, config, few=len(files) < FEW_TEXTS)
        except DataError as error:
            skipped.add(str(error))
            continue
        for part in parts:
            offset = part.start
            if number == start.file:
                offset = max(offset, start.offset)
            if offset >= part.end:
                continue
            chunks = text_chunks(path, offset, part.end)
            texts: Iterable[str]
            if find_cut:
                texts = pieces(chunks, BATCH_CHARACTERS, path, find_cut)
            else:
                texts = ["".join(chunks)]
            for text in texts:
                begin = offset
                offset += len(text.encode())
                yield Piece(
                    split=part.split,
                    text=line_ends(config, text),
                    first=begin == part.start,
                    last=offset == part.end,
                    key=part.key,
                    after=Position(number, offset),
                )
            require(offset == part.end, f"{path} changed while it was read; run the command again")


def text_parts(path: Path, config: PrepareConfig, few: bool) -> list[Part]:
    """Return the documents in a text file: the whole file, or with `few` its train and val part."""
    start = text_start(path)
    cut = sys.maxsize  # characters before val
    if few:
        characters = sum(len(chunk) for chunk in text_chunks(path, start))
        cut = int(characters * (1 - config.val_fraction))
    hashes = (split_hash(), split_hash())
    sizes = [0, 0]
    for chunk in text_chunks(path, start):
        if chunk[max(0, cut - 1) : cut + 1] == "\r\n":
            cut -= 1
        for i, text in enumerate((chunk[:cut], chunk[cut:])):
            hashes[i].update(line_ends(config, text).encode())
            sizes[i] += len(text.encode())
        cut = max(0, cut - len(chunk))
    train, val = (one.digest() for one in hashes)
    middle = start + sizes[0]
    split = "train" if few else split_by_hash(train, config.val_fraction)
    parts = [
        Part(split=split, start=start, end=middle, key=train),
        Part(split="val", start=middle, end=middle + sizes[1], key=val),
    ]
    return [part for part in parts if part.start < part.end]


# --------------------------------------------------------------------------- rows


def row_pieces(
    config: PrepareConfig,
    files: Sequence[Path],
    find_cut: FindCut | None,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Yield the pieces of the rows of files, a data set or standard input."""
    for file, rows in row_sources(config, files, start, skipped):
        for row in rows:
            found = document_pieces(config, find_cut, file, row)
            resumed = (file, row.number) == (start.file, start.offset)
            yield from found[start.piece :] if resumed else found


def row_sources(
    config: PrepareConfig, files: Sequence[Path], start: Position, skipped: Skipped
) -> Iterator[tuple[int, Iterator[Row]]]:
    """Yield each file's index and rows, from `start` on.

    A data set and standard input count as one file.
    """
    if config.source == "dataset":
        yield 0, hub_rows(config, start.offset, start.state, skipped.add)
    elif config.path == "-":
        yield 0, stdin_rows(config, start.offset, skipped)
    else:
        for number, path in enumerate(files):
            if number < start.file:
                continue
            first = start.offset if number == start.file else 0
            if config.separator and reads_text(config):
                rows = separated_rows(whole_text(path), path, config.separator, first, skipped.add)
            else:
                rows = read_rows(
                    source=str(config.source),
                    path=path,
                    field=config.text_field,
                    first=first,
                    skip=skipped.add,
                )
            yield number, rows


def stdin_rows(config: PrepareConfig, first: int, skipped: Skipped) -> Iterator[Row]:
    """Yield the rows of standard input from number `first` on.

    A row is a line of JSON, or a piece of text of about `BATCH_CHARACTERS`.
    """
    if config.source == "jsonl":
        yield from json_lines(sys.stdin.buffer, STDIN, config.text_field, first, skipped.add)
        return
    chunks = decode_chunks(sys.stdin.buffer, STDIN, 0)
    if config.separator:
        yield from separated_rows(chunks, STDIN, config.separator, first, skipped.add)
        return
    try:
        for number, text in enumerate(pieces(chunks, BATCH_CHARACTERS, STDIN)):
            if number >= first:
                yield Row(number, text.removeprefix("\ufeff") if number == 0 else text)
    except DataError as error:
        skipped.add(f"{error}; the rest of {STDIN} cannot be read either")


def document_pieces(
    config: PrepareConfig, find_cut: FindCut | None, file: int, row: Row
) -> list[Piece]:
    """Cut a row into pieces. The end of a text from standard input is val, as in a text file."""
    text, *others = row_documents(config, row)
    parts: list[tuple[str | None, str]]
    if config.source == "text" and config.separator is None:
        cut = int(len(text) * (1 - config.val_fraction))
        parts = [("train", text[:cut]), ("val", text[cut:])]
        find_cut = None
    else:
        parts = [(None, one) for one in (text, *others)]  # a hash decides the split
    found: list[Piece] = []
    for split, part in parts:
        if not part:
            continue
        key = split_hash(part.encode()).digest()
        texts = [part]
        if find_cut:
            texts = list(pieces([part], BATCH_CHARACTERS, find_cut=find_cut))
        for i, one in enumerate(texts):
            found.append(
                Piece(
                    split=split or split_by_hash(key, config.val_fraction),
                    text=one,
                    first=i == 0,
                    last=i == len(texts) - 1,
                    key=key,
                    after=Position(file, row.number, len(found) + 1, row.state),
                )
            )
    if found:
        found[-1] = found[-1]._replace(after=Position(file, row.number + 1, 0, row.state))
    return found


def row_documents(config: PrepareConfig, row: Row) -> list[str]:
    """Return the documents in a row: its text, or the texts between its separators."""
    text = line_ends(config, clean(row.text))
    if config.separator is None:
        return [text]
    return [LINE_END.sub("", one) for one in text.split(config.separator)]


def all_texts(config: PrepareConfig, files: Sequence[Path], size: int) -> Iterator[str]:
    """Yield the texts of the source in order, cut into pieces of about `size` characters."""
    # A count of 1 keeps `skipped` silent: invalid documents are reported when they are tokenized.
    skipped = Skipped(config.skip_invalid, count=1)
    if not is_text(config):
        for _, rows in row_sources(config, files, Position(), skipped):
            for row in rows:
                for text in row_documents(config, row):
                    if text:
                        yield from pieces([text], size)
        return
    for path in files:
        try:
            start = text_start(path)
            if config.skip_invalid:
                for _ in text_chunks(path, start):
                    pass  # raises before any text of an invalid file is used
        except DataError as error:
            skipped.add(str(error))
            continue
        for text in pieces(text_chunks(path, start), size, path):
            if text:
                yield line_ends(config, text)


# --------------------------------------------------------------------------- splits


def split_hash(data: bytes = b"") -> "hashlib.blake2b":
    """Start the hash (8 bytes) of a document's UTF-8 that decides its split."""
    return hashlib.blake2b(data, digest_size=8, key=b"accel_gpt val")


def as_fraction(key: bytes) -> float:
    """Convert a hash of 8 bytes to a number between 0 and 1."""
    return int.from_bytes(key, "big") / 2**64


def split_by_hash(key: bytes, val_fraction: float) -> str:
    """Return the split of a document from its hash: val for a share `val_fraction` of hashes."""
    return "val" if as_fraction(key) < val_fraction else "train"
