"""Read the documents of a source in order, and assign them to the splits train and val.

Sources: Python's own library, files of text, JSON lines or Parquet, a Hub data set. Each is read in
bounded memory, in a fixed order, from any `Position` on. `files` are the files that `select()` of
`sources.py` chose; a data set has none.

Splits: if the files of a folder are named after splits (`named_splits` of `sources.py`), each file
belongs to its split. Otherwise, if there are fewer than `FEW_TEXTS` text files, the end of each is
val, as in nanoGPT. Otherwise a hash of each document decides its split, so equal documents are in
the same split. With a `separator`, each text between two separators is a document, and a hash
decides its split.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare.pieces import FindCut, pieces
from accel_gpt.prepare.readers import (
    COMPRESSIONS,
    Row,
    State,
    hub_rows,
    json_rows,
    parquet_rows,
    separated_rows,
    text_chunks,
)
from accel_gpt.prepare.sources import named_splits

BATCH_CHARACTERS = 1_000_000  # characters of text that a process tokenizes at once
FEW_TEXTS = 100  # with fewer text files, the end of each file is val
EXPANSION = 3  # bytes of text per byte of a compressed file; assumption for prose and code
LINE_END = re.compile(r"\A\n|\n\Z")  # beside a separator
SPLITS = ("train", "val")


class Position(NamedTuple):
    """The position at which to resume reading, as values that JSON can hold."""

    file: int = 0
    """Index of the file; 0 for a data set."""
    row: int = 0
    """Number of the row. A text file has two: 0 is its text, or its train part, 1 its val part."""
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
    after: Position
    """The position after this piece."""


class Document(NamedTuple):
    """A document, as chunks of text."""

    row: int
    split: str
    chunks: Iterable[str]
    state: State | None = None


def split_pieces(
    config: PrepareConfig, files: Sequence[Path], find_cut: FindCut, start: Position
) -> Iterator[Piece]:
    """Yield the documents from position `start` on, in pieces of about `BATCH_CHARACTERS`."""
    splits = named_splits(config.path, files)
    for file in range(start.file, len(files) or 1):
        begin = start if file == start.file else Position(file)
        row = -1
        count = 0  # pieces of the row
        named = splits[files[file]] if splits else None
        for document in file_documents(config, files, begin, named):
            if document.row != row:
                row = document.row
                count = 0
            first = True
            texts = pieces(document.chunks, BATCH_CHARACTERS, find_cut)
            text = next(texts)
            while text:
                after = next(texts, "")
                count += 1
                if row > begin.row or count > begin.piece:
                    position = Position(file, row, count, document.state)
                    yield Piece(document.split, text, first, not after, position)
                first = False
                text = after


def file_documents(
    config: PrepareConfig, files: Sequence[Path], start: Position, named: str | None = None
) -> Iterator[Document]:
    """Yield the documents of file `start.file`, or of the data set, from `start.row` on.

    `named`: the split of all of them; None: each has its own.
    """
    if is_text(config):
        if named is None:
            few = len(files) < FEW_TEXTS
            yield from text_documents(config, files[start.file], start.row, few)
        elif start.row == 0:
            yield Document(0, named, text_chunks(files[start.file]))
        return
    path = files[start.file] if files else Path()
    for row in rows_of(config, path, start):
        for text in row_documents(config, row):
            split = named or split_by_hash(split_hash(text.encode()).digest(), config.val_fraction)
            yield Document(row.number, split, [text], row.state)


def text_documents(config: PrepareConfig, path: Path, first: int, few: bool) -> Iterator[Document]:
    """Yield the documents in a text file: the whole file, or with `few` its train and val part.

    The file is read in full before, to decide the splits.
    """
    if few:
        characters = sum(len(chunk) for chunk in text_chunks(path))
        cut = int(characters * (1 - config.val_fraction))
        if first == 0:
            yield Document(0, "train", part_of(path, 0, cut))
        yield Document(1, "val", part_of(path, cut, characters))
    elif first == 0:
        key = split_hash()
        for chunk in text_chunks(path):
            key.update(chunk.encode())
        yield Document(0, split_by_hash(key.digest(), config.val_fraction), text_chunks(path))


def part_of(path: Path, start: int, end: int) -> Iterator[str]:
    """Yield characters `start` to `end` of a text file, as chunks."""
    for chunk in text_chunks(path):
        if part := chunk[max(0, start) : max(0, end)]:
            yield part
        start -= len(chunk)
        end -= len(chunk)


def rows_of(config: PrepareConfig, path: Path, start: Position) -> Iterator[Row]:
    """Yield the rows of a file, or of the data set, from `start.row` on."""
    if config.source == "dataset":
        return hub_rows(config, start.row, start.state)
    if config.source == "jsonl":
        return json_rows(path, config.text_field, start.row)
    if config.source == "parquet":
        return parquet_rows(path, config.text_field, start.row)
    assert config.separator is not None
    return separated_rows(path, config.separator, start.row)


def row_documents(config: PrepareConfig, row: Row) -> list[str]:
    """Return the documents in a row: its text, or the texts between its separators."""
    if config.separator is None:
        return [row.text]
    return [LINE_END.sub("", one) for one in row.text.split(config.separator)]


def is_text(config: PrepareConfig) -> bool:
    """Return whether each file of the source is one text."""
    return config.source in ("stdlib", "text") and config.separator is None


# --------------------------------------------------------------------------- text for a tokenizer


def documents(
    config: PrepareConfig, files: Sequence[Path], size: int = BATCH_CHARACTERS
) -> Iterator[str]:
    """Yield the texts of the source in order, cut into pieces of about `size` characters."""
    for file in range(len(files) or 1):
        if is_text(config):
            yield from pieces(text_chunks(files[file]), size)
            continue
        for document in file_documents(config, files, Position(file)):
            yield from pieces(document.chunks, size)


def sample_texts(config: PrepareConfig, files: Sequence[Path], size: int) -> Iterator[str]:
    """Yield a sample of about `size` UTF-8 bytes: short documents, and pieces of long ones.

    A hash of each text's number selects it, so the sample is spread evenly over the source. The
    size of a data set is not known in advance, so the sample is its beginning.
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
    for number, text in enumerate(text for text in texts if text):
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
    if config.source not in ("stdlib", "text") or any(is_compressed(path) for path in files):
        return None
    return sum(path.stat().st_size for path in files)


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed, so that its size is not the size of its text."""
    return path.name.lower().endswith((*COMPRESSIONS, ".parquet"))


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
