"""Which text is trained on: the documents of a source in order, and their splits.

Sources: Python's own library, files of text, JSON lines, Parquet or Arrow, a Hub data set, standard
input. All are read in bounded memory, in the same order every time, and from any `Position` on.
`files` are those that `select()` of `sources.py` chose; none for a data set and standard input.

Splits: fewer than `FEW_TEXTS` text files are cut, and the end of each is val, as in nanoGPT.
Otherwise a hash of a document holds it out whole, so that equal documents stay together.
Standard input (path "-") can be read once. As jsonl it is one object a line; as text every piece of
about a megabyte is a text, whose end is val, with end-of-text after each part.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import DataError, require
from accel_gpt.prepare.pieces import pieces
from accel_gpt.prepare.readers import (
    Row,
    Skipped,
    State,
    decode_chunks,
    hub_rows,
    json_lines,
    read_rows,
    text_chunks,
    text_start,
)
from accel_gpt.prepare.sources import COMPRESSIONS

BATCH_CHARACTERS = 1_000_000  # of text given to a process at once
FEW_TEXTS = 100  # fewer texts are cut near their end instead of held out whole
COMPRESSED = (*COMPRESSIONS, ".parquet")
EXPANSION = 3  # bytes of text for one of a compressed file; assumption: prose and code
STDIN = "standard input"
SPLITS = ("train", "val")


class Position(NamedTuple):
    """Where to resume reading. JSON can hold it."""

    file: int = 0
    """Number of the file; 0 for a data set and standard input."""
    offset: int = 0
    """Offset in the UTF-8 of a text file, or number of the row in other sources."""
    piece: int = 0
    """Pieces of that row that were read."""
    state: State | None = None
    """Of a data set: its own state at that row or before."""


class Piece(NamedTuple):
    """A document or a part of one, with its split."""

    split: str
    text: str
    first: bool
    last: bool
    key: bytes
    """Hash of the whole document (`split_hash`): equal for equal documents."""
    after: Position


def split_pieces(
    config: PrepareConfig,
    files: Sequence[Path],
    cut_long: bool,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Read the documents after position `start` in pieces.

    `cut_long`: documents in pieces of about `BATCH_CHARACTERS` (see `pieces`), otherwise whole.
    `skipped` counts invalid documents if config.skip_invalid is set.
    Raises `DataError` if a file cannot be decoded.
    """
    read_pieces = text_pieces if is_text(config) else row_pieces
    return read_pieces(config, files, cut_long, start, skipped)


def documents(
    config: PrepareConfig, files: Sequence[Path], size: int = BATCH_CHARACTERS
) -> Iterator[str]:
    """Read the texts of the source in order, long ones in pieces of about `size` characters.

    Raises as `split_pieces`, and `UserError` for standard input, which cannot be read again.
    """
    require(
        config.path != "-",
        f"data.prepare.path is -, but {STDIN} can be read only once and the tokenizer "
        f"{config.tokenizer} is made from the text first; give a file, or another "
        "data.prepare.tokenizer such as gpt2 or the path of a tokenizer.json",
    )
    return all_texts(config, files, size)


def sample_texts(config: PrepareConfig, files: Sequence[Path], size: int) -> Iterator[str]:
    """Sample about `size` UTF-8 bytes of documents, and of pieces of long ones.

    A hash of their number decides, so that they are spread evenly over the whole source. The
    size of a data set is not known beforehand: its beginning is taken. Raises as `documents`.
    """
    texts = documents(config, files, min(BATCH_CHARACTERS, max(1, size // 16)))
    total = size
    if config.source != "dataset":
        total = 0
        for path in files:
            total += path.stat().st_size * (EXPANSION if is_compressed(path) else 1)
    keep = min(1.0, size / max(total, 1))
    limit = size if keep == 1 else 2 * size  # the total of compressed files is a guess
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
    """Return the bytes of text that will be read; None if that is not known beforehand."""
    if not is_text(config) or any(is_compressed(path) for path in files):
        return None
    return sum(path.stat().st_size for path in files)


def is_compressed(path: Path) -> bool:
    """Whether a file holds more bytes of text than its size."""
    return path.name.lower().endswith(COMPRESSED)


def is_text(config: PrepareConfig) -> bool:
    """Whether each file of the source is one text."""
    return config.source in ("stdlib", "text") and config.path != "-"


def line_ends(config: PrepareConfig, text: str) -> str:
    """Replace Windows line ends by Unix line ends, unless `keep_crlf` is set."""
    return text if config.keep_crlf else text.replace("\r\n", "\n")


# --------------------------------------------------------------------------- text files


class Part(NamedTuple):
    """A document in a text file."""

    split: str
    start: int  # bytes
    end: int
    key: bytes


def text_pieces(
    config: PrepareConfig,
    files: Sequence[Path],
    cut_long: bool,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Read the pieces of text files. Each file is read twice: first to decide its splits."""
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
            texts = pieces(chunks, BATCH_CHARACTERS, path) if cut_long else ["".join(chunks)]
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
            require(offset == part.end, f"{path} changed while it was read; start again")


def text_parts(path: Path, config: PrepareConfig, few: bool) -> list[Part]:
    """Return the documents in a text file: the whole file, or of `few` files its train and val."""
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
    cut_long: bool,
    start: Position,
    skipped: Skipped,
) -> Iterator[Piece]:
    """Read the pieces of the rows of files, a data set or standard input."""
    for file, rows in row_sources(config, files, start, skipped):
        for row in rows:
            found = document_pieces(config, cut_long, file, row)
            resumed = (file, row.number) == (start.file, start.offset)
            yield from found[start.piece :] if resumed else found


def row_sources(
    config: PrepareConfig, files: Sequence[Path], start: Position, skipped: Skipped
) -> Iterator[tuple[int, Iterator[Row]]]:
    """Number each file from `start` on, with its rows. Data set, standard input: one file."""
    if config.source == "dataset":
        yield 0, hub_rows(config, start.offset, start.state, skipped.add)
    elif config.path == "-":
        yield 0, stdin_rows(config, start.offset, skipped)
    else:
        for number, path in enumerate(files):
            if number >= start.file:
                rows = read_rows(
                    source=str(config.source),
                    path=path,
                    field=config.text_field,
                    first=start.offset if number == start.file else 0,
                    skip=skipped.add,
                )
                yield number, rows


def stdin_rows(config: PrepareConfig, first: int, skipped: Skipped) -> Iterator[Row]:
    """Read lines of JSON from number `first` on, or pieces of about `BATCH_CHARACTERS` of text."""
    if config.source == "jsonl":
        yield from json_lines(sys.stdin.buffer, STDIN, config.text_field, first, skipped.add)
        return
    chunks = decode_chunks(sys.stdin.buffer, STDIN, 0)
    try:
        for number, text in enumerate(pieces(chunks, BATCH_CHARACTERS, STDIN)):
            if number >= first:
                yield Row(number, text.removeprefix("\ufeff") if number == 0 else text)
    except DataError as error:
        skipped.add(f"{error}; what follows cannot be read either")


def document_pieces(config: PrepareConfig, cut_long: bool, file: int, row: Row) -> list[Piece]:
    """Cut a row into pieces. A piece of standard input is cut near its end, as a text file is."""
    text = line_ends(config, clean(row.text))
    parts: list[tuple[str | None, str]]
    if config.source == "text":
        cut = int(len(text) * (1 - config.val_fraction))
        parts = [("train", text[:cut]), ("val", text[cut:])]
        cut_long = False
    else:
        parts = [(None, text)]  # the hash decides
    found: list[Piece] = []
    for split, part in parts:
        if not part:
            continue
        key = split_hash(part.encode()).digest()
        texts = list(pieces([part], BATCH_CHARACTERS)) if cut_long else [part]
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


def all_texts(config: PrepareConfig, files: Sequence[Path], size: int) -> Iterator[str]:
    """Read the texts of the source, in pieces of about `size` characters."""
    skipped = Skipped(config.skip_invalid, count=1)  # reported when the text is tokenized
    if not is_text(config):
        for _, rows in row_sources(config, files, Position(), skipped):
            for row in rows:
                if row.text:
                    yield from pieces([line_ends(config, clean(row.text))], size)
        return
    for path in files:
        try:
            start = text_start(path)
            if config.skip_invalid:
                for _ in text_chunks(path, start):
                    pass  # raises before any of a file that is skipped is used
        except DataError as error:
            skipped.add(str(error))
            continue
        for text in pieces(text_chunks(path, start), size, path):
            if text:
                yield line_ends(config, text)


# --------------------------------------------------------------------------- splits


def split_hash(data: bytes = b"") -> "hashlib.blake2b":
    """Start the hash, of 8 bytes, that decides about the split of a document given as UTF-8."""
    return hashlib.blake2b(data, digest_size=8, key=b"accel_gpt val")


def as_fraction(key: bytes) -> float:
    """Convert a hash of 8 bytes to a number from 0 to 1."""
    return int.from_bytes(key, "big") / 2**64


def split_by_hash(key: bytes, val_fraction: float) -> str:
    """Return val for a share `val_fraction` of all documents, decided by the hash alone."""
    return "val" if as_fraction(key) < val_fraction else "train"
