"""Which text is trained on: the documents of a source in order, and their splits.

Sources: Python's own library, files of text, JSON lines, Parquet or Arrow, a Hub data set, standard
input. All are read in bounded memory, in the same order every time, and from any `Position` on.

Splits: of fewer than `FEW_TEXTS` text files the end of each is val, as in nanoGPT; otherwise a hash
of a document holds it out whole, so that equal documents stay together.
Standard input (path "-") can be read once. As jsonl it is one object a line; as text every piece of
about a megabyte is a text of its own, whose end is val, with end-of-text after each part.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import DataError, require
from accel_gpt.text.files import check_source, files
from accel_gpt.text.hub import hub_rows
from accel_gpt.text.pieces import pieces
from accel_gpt.text.readers import (
    Rows,
    Skipped,
    decoded,
    json_lines,
    read_rows,
    text_chunks,
    text_start,
)

BATCH_CHARACTERS = 1_000_000  # of text given to a process at once
FEW_TEXTS = 100  # fewer texts are cut near their end instead of held out whole
COMPRESSED = (".gz", ".zst", ".parquet")
EXPANSION = 3  # bytes of text for one of a compressed file; assumption: prose and code
STDIN = "standard input"
SPLITS = ("train", "val")

Position = tuple[int, int, int]
"""Where to resume reading: number of the file (0 for a data set and standard input); offset in its
UTF-8 text, or number of the row in it; pieces of that row already given. JSON-able, in order."""


class Piece(NamedTuple):
    """A document or a part of one, with the split that it belongs to."""

    split: str
    text: str
    first: bool
    last: bool
    key: bytes
    """Hash of the whole document (`split_hash`): equal for equal documents."""
    after: Position


def split_pieces(
    config: PrepareConfig,
    cut_long: bool,
    start: Position = (0, 0, 0),
    skipped: Skipped | None = None,
) -> Iterator[Piece]:
    """Pieces of the documents after position `start`.

    `cut_long`: documents in pieces of about `BATCH_CHARACTERS` (see `pieces`), otherwise whole.
    `skipped` counts what is skipped where config.skip_invalid is set.
    Raises `UserError` when there is nothing to read, `DataError` when a file cannot be decoded.
    """
    check_source(config)
    read_pieces = text_pieces if is_text(config) else row_pieces
    return read_pieces(config, cut_long, start, skipped or Skipped(config.skip_invalid))


def documents(config: PrepareConfig, size: int = BATCH_CHARACTERS) -> Iterator[str]:
    """The texts of the source in order, long ones in pieces of about `size` characters.

    Raises as `split_pieces`, and `UserError` for standard input, which could not be read again.
    """
    require(
        config.path != "-",
        f"data.prepare.path is -, but {STDIN} can be read only once and the tokenizer "
        f"{config.tokenizer} is made from the text first; give a file, or another "
        "data.prepare.tokenizer such as gpt2 or the path of a tokenizer.json",
    )
    check_source(config)
    return all_texts(config, size)


def sample_texts(config: PrepareConfig, size: int) -> Iterator[str]:
    """About `size` UTF-8 bytes of documents and pieces of long ones, by a hash of their number.

    They are spread evenly over the source, all of which is read; where its amount is not known
    beforehand (a data set) they are its beginning. Raises as `documents`.
    """
    texts, total = documents(config, min(BATCH_CHARACTERS, max(1, size // 16))), size
    if config.source != "dataset":
        sizes = ((path.name.lower(), path.stat().st_size) for path in files(config))
        total = sum(EXPANSION * n if name.endswith(COMPRESSED) else n for name, n in sizes)
    keep = min(1.0, size / max(total, 1))
    limit = size if keep == 1 else 2 * size  # the total of compressed files is a guess
    given, owed = 0, 0.0
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


def expected_bytes(config: PrepareConfig) -> int | None:
    """Bytes of text that will be read, None where that is not known beforehand.

    Raises `UserError` when the source does not exist.
    """
    check_source(config)
    if config.source == "dataset" or config.path == "-":
        return None
    paths = files(config)
    if not is_text(config):
        return None
    return sum(path.stat().st_size for path in paths)


def is_text(config: PrepareConfig) -> bool:
    """Whether each file of the source is one text."""
    return config.source in ("stdlib", "text") and config.path != "-"


def line_ends(config: PrepareConfig, text: str) -> str:
    """`text` with line ends of Windows as those of Unix, unless they are to be kept."""
    return text if config.keep_crlf else text.replace("\r\n", "\n")


# --------------------------------------------------------------------------- text files


class Part(NamedTuple):
    """A document in a text file: its split, the bytes where it begins and ends, its hash."""

    split: str
    start: int
    end: int
    key: bytes


def text_pieces(
    config: PrepareConfig, cut_long: bool, start: Position, skipped: Skipped
) -> Iterator[Piece]:
    """Pieces of text files. Each file is read twice: first to find its splits."""
    paths = files(config)
    for unit, path in enumerate(paths):
        if unit < start[0]:
            continue
        try:
            parts = text_parts(path, config, len(paths) < FEW_TEXTS)
        except DataError as error:
            skipped.add(str(error))
            continue
        for part in parts:
            begin = max(part.start, start[1] if unit == start[0] else 0)
            if begin >= part.end:
                continue
            chunks = text_chunks(path, begin, part.end)
            long = pieces(chunks, BATCH_CHARACTERS, path) if cut_long else None
            for text in long or ["".join(chunks)]:
                first, begin = begin == part.start, begin + len(text.encode())
                last = begin == part.end
                after = (unit, begin, 0)
                yield Piece(part.split, line_ends(config, text), first, last, part.key, after)
            require(begin == part.end, f"{path} changed while it was read; start again")


def text_parts(path: Path, config: PrepareConfig, few: bool) -> list[Part]:
    """The documents in a text file that are not empty: the file, or of `few` its train and val."""
    begin, cut, val_fraction = text_start(path), sys.maxsize, config.val_fraction
    if few:
        cut = int(sum(map(len, text_chunks(path, begin))) * (1 - val_fraction))
    hashes, sizes = (split_hash(), split_hash()), [0, 0]
    for chunk in text_chunks(path, begin):
        cut -= chunk[max(0, cut - 1) : cut + 1] == "\r\n"
        for i, text in enumerate((chunk[:cut], chunk[cut:])):
            hashes[i].update(line_ends(config, text).encode())
            sizes[i] += len(text.encode())
        cut = max(0, cut - len(chunk))
    train, val = (one.digest() for one in hashes)
    middle = begin + sizes[0]
    parts = [
        Part("train" if few else split_by_hash(train, val_fraction), begin, middle, train),
        Part("val", middle, middle + sizes[1], val),
    ]
    return [part for part in parts if part.start < part.end]


# --------------------------------------------------------------------------- rows


def row_pieces(
    config: PrepareConfig, cut_long: bool, start: Position, skipped: Skipped
) -> Iterator[Piece]:
    """Pieces of the rows of files, a data set or standard input."""
    for unit, rows in row_units(config, start, skipped):
        for row, text in rows:
            text = line_ends(config, clean(text))
            found = document_pieces(config, cut_long, unit, row, text)
            yield from found[start[2] if (unit, row) == start[:2] else 0 :]


def row_units(
    config: PrepareConfig, start: Position, skipped: Skipped
) -> Iterator[tuple[int, Rows]]:
    """(number, rows) of each file from `start` on; a data set and standard input are one file."""
    if config.source == "dataset":
        yield 0, hub_rows(config, start[1], skipped.add)
    elif config.path == "-":
        yield 0, stdin_rows(config, start[1], skipped)
    else:
        for unit, path in enumerate(files(config)):
            if unit >= start[0]:
                first = start[1] if unit == start[0] else 0
                yield (
                    unit,
                    read_rows(
                        source=str(config.source),
                        path=path,
                        field=config.text_field,
                        first=first,
                        skip=skipped.add,
                    ),
                )


def stdin_rows(config: PrepareConfig, first: int, skipped: Skipped) -> Rows:
    """Lines of JSON from number `first` on, or pieces of about `BATCH_CHARACTERS` of a text."""
    if config.source == "jsonl":
        yield from json_lines(sys.stdin.buffer, STDIN, config.text_field, first, skipped.add)
        return
    chunks = decoded(sys.stdin.buffer, STDIN, 0)
    try:
        for row, text in enumerate(pieces(chunks, BATCH_CHARACTERS, STDIN)):
            if row >= first:
                yield row, text.removeprefix("\ufeff") if row == 0 else text
    except DataError as error:
        skipped.add(f"{error}; what follows cannot be read either")


def document_pieces(
    config: PrepareConfig, cut_long: bool, unit: int, row: int, text: str
) -> list[Piece]:
    """The pieces of a row; a piece of standard input is cut near its end, as a text file is."""
    parts = [("", text)]
    if config.source == "text":
        cut = int(len(text) * (1 - config.val_fraction))
        parts, cut_long = [("train", text[:cut]), ("val", text[cut:])], False
    found: list[Piece] = []
    for split, part in parts:
        if part:
            key = split_hash(part.encode()).digest()
            named = split or split_by_hash(key, config.val_fraction)
            texts = list(pieces([part], BATCH_CHARACTERS)) if cut_long else [part]
            for i, one in enumerate(texts):
                after = (unit, row, len(found) + 1)
                found.append(Piece(named, one, i == 0, i == len(texts) - 1, key, after))
    if found:
        found[-1] = found[-1]._replace(after=(unit, row + 1, 0))
    return found


def all_texts(config: PrepareConfig, size: int) -> Iterator[str]:
    """The texts of the source, in pieces of about `size` characters."""
    skipped = Skipped(config.skip_invalid, count=1)  # reported when the text is tokenized
    if not is_text(config):
        for _, rows in row_units(config, (0, 0, 0), skipped):
            for _, text in rows:
                yield from pieces([line_ends(config, clean(text))], size) if text else ()
        return
    for path in files(config):
        try:
            begin = text_start(path)
            if config.skip_invalid:  # nothing of a file that is skipped
                sum(map(len, text_chunks(path, begin)))
        except DataError as error:
            skipped.add(str(error))
            continue
        found = filter(None, pieces(text_chunks(path, begin), size, path))
        yield from (line_ends(config, text) for text in found)


# --------------------------------------------------------------------------- splits


def split_hash(data: bytes = b"") -> "hashlib.blake2b":
    """The hash, of 8 bytes, of a document given as UTF-8, which decides about its split."""
    return hashlib.blake2b(data, digest_size=8, key=b"accel_gpt val")


def as_fraction(key: bytes) -> float:
    """A hash of 8 bytes as a number from 0 to 1."""
    return int.from_bytes(key, "big") / 2**64


def split_by_hash(key: bytes, val_fraction: float) -> str:
    """val for a share `val_fraction` of all documents, decided by the hash alone."""
    return "val" if as_fraction(key) < val_fraction else "train"
