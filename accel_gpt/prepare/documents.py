"""Read the documents of a source in order, and assign them to the splits train and val.

Sources: files of text, files with rows, data sets of the Hub. Each is read in bounded memory, in a
fixed order, from any `Position` on.

Splits: a source that has splits keeps them. Otherwise, a hash of each document decides its split,
so equal documents are in the same split, and documents stay where they are if others are added. Of
a text above `LONG_TEXT` characters, and of a source that is one text, the end is val, as in
nanoGPT.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.errors import DataError, UserError, did_you_mean, one_line
from accel_gpt.prepare.pieces import pieces
from accel_gpt.prepare.rows import as_text, is_chat, open_hub, read_rows
from accel_gpt.prepare.sources import HUB, STDLIB, TEXT, TextSource, splits_in
from accel_gpt.prepare.text_files import COMPRESSIONS, Text, examine, read_text, text_hash

BATCH_CHARACTERS = 1_000_000  # characters of text that are tokenized at once
LONG_TEXT = 100_000  # characters of a text file; assumption: a tenth of it is a useful sample
EXPANSION = 3  # bytes of text per byte of a compressed file; assumption for prose and code
SPLITS = ("train", "val")

# Write the turns of a chat as text
WriteChat = Callable[[list[dict[str, Any]]], str]


class Position(NamedTuple):
    """The position after a piece, as values that JSON can hold; later pieces have larger ones."""

    source: int = 0
    file: int = 0
    """Index of the text file, or of the shard of rows, which is a file too."""
    row: int = 0
    """Number of the row in its shard. A text that is cut has two: its train and its val part."""
    piece: int = 0
    """Number of pieces of this row that were read."""


BEGINNING = Position()


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    split: str
    first: bool
    last: bool
    after: Position
    key: bytes
    """Hash of the document's text; empty for the second part of a text."""
    is_chat: bool = False
    """The text spells special tokens, which are read as such."""
    detected: Text | None = None
    """The file that begins here, if it is not UTF-8."""


def read_pieces(
    config: PrepareConfig,
    sources: Sequence[TextSource],
    write_chat: WriteChat,
    start: Position = BEGINNING,
) -> Iterator[Piece]:
    """Yield the documents from position `start` on, in pieces of about `BATCH_CHARACTERS`.

    A document without text is one empty piece.
    """
    for number in range(start.source, len(sources)):
        source = sources[number]
        file = start.file if number == start.source else 0
        if source.kind in (TEXT, STDLIB):
            found = text_pieces(config, source, number, file)
        else:
            found = row_pieces(config, source, number, file, write_chat)
        for piece in found:
            if piece.after > start:
                yield piece


def text_pieces(
    config: PrepareConfig, source: TextSource, number: int, first: int
) -> Iterator[Piece]:
    """Yield the text files of source `number` from file `first` on."""
    is_one = len(source.files) == 1 and not os.path.isdir(source.name)
    for file in range(first, len(source.files)):
        text = examine(source.files[file])
        if is_one and not text.encoding:
            raise DataError(f"{text.path} is no text in an encoding that is known")
        detected = None if text.encoding in ("utf-8", "utf-16", "utf-32") else text
        for row, (split, key, chunks) in enumerate(text_parts(config, source, text, is_one)):
            for count, (part, begins, ends) in enumerate(cut_document(chunks), 1):
                after = Position(number, file, row, count)
                yield Piece(part, split, begins, ends, after, key, False, detected)
                detected = None


def text_parts(
    config: PrepareConfig, source: TextSource, text: Text, is_one: bool
) -> Iterator[tuple[str, bytes, Iterable[str]]]:
    """Yield the documents of a text file: split, hash, and chunks of the text."""
    chunks = partial(read_text, text.path, text.encoding)
    if not text.encoding:
        yield "train", b"", [""]
    elif source.split is None and source.kind != STDLIB and (is_one or text.characters > LONG_TEXT):
        cut = int(text.characters * (1 - config.val_fraction))
        yield "train", text.key, part_of(chunks(), 0, cut)
        yield "val", b"", part_of(chunks(), cut, text.characters)
    else:
        yield source.split or split_by_hash(text.key, config.val_fraction), text.key, chunks()


def row_pieces(
    config: PrepareConfig,
    source: TextSource,
    number: int,
    first: int,
    write_chat: WriteChat,
) -> Iterator[Piece]:
    """Yield the rows of source `number` from shard `first` on."""
    for shard, row, value in read_rows(source, config.text_field, first):
        chat = is_chat(value)
        try:
            text = write_chat(value) if chat else as_text(value)
        except UserError:
            raise
        except Exception as error:  # ValueError, errors of Jinja, and those a template raises
            where = f"column {config.text_field} in row {row} of shard {shard} of {source.name}"
            raise DataError(f"{where} is not text: {one_line(error)}") from None
        key = text_hash(text)
        split = source.split or split_by_hash(key, config.val_fraction)
        is_short = chat or len(text) <= 2 * BATCH_CHARACTERS
        cut = ((text, True, True),) if is_short else cut_document([text])
        for count, (piece, begins, ends) in enumerate(cut, 1):
            after = Position(number, shard, row, count)
            yield Piece(piece, split, begins, ends, after, key, chat)


def cut_document(chunks: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield the pieces of a document, each with whether it begins and whether it ends it.

    A document without text has one empty piece.
    """
    texts = pieces(chunks, BATCH_CHARACTERS)
    text = next(texts)
    begins = True
    for following in texts:
        if following:
            yield text, begins, False
            text = following
            begins = False
    yield text, begins, True


def split_by_hash(key: bytes, val_fraction: float) -> str:
    """Return the split of a document from its hash: val for a share `val_fraction` of hashes."""
    return "val" if int.from_bytes(key, "big") / 2**64 < val_fraction else "train"


def part_of(chunks: Iterable[str], start: int, end: int) -> Iterator[str]:
    """Yield characters `start` to `end` of a text, as chunks."""
    for chunk in chunks:
        if part := chunk[max(0, start) : max(0, end)]:
            yield part
        start -= len(chunk)
        end -= len(chunk)


# --------------------------------------------------------------------------- the Hub


def open_data_sets(
    config: PrepareConfig, sources: Sequence[TextSource]
) -> tuple[list[TextSource], list[str]]:
    """Open the data sets of the Hub among `sources`; return all, with lines on their splits."""
    opened: list[TextSource] = []
    lines: list[str] = []
    for source in sources:
        if source.kind != HUB:
            opened.append(source)
            continue
        splits = open_hub(source.name, config.subset)
        chosen = hub_splits(config, source, list(splits))
        for name, split in chosen.items():
            where = f"split {name} of data set {source.name}"
            opened.append(replace(source, name=where, split=split, data=splits[name]))
            lines.append(f"reading {where}")
        if left_out := [name for name in splits if name not in chosen]:
            lines.append(f"left out of {source.name}: split {', '.join(left_out)}")
    return opened, lines


def hub_splits(
    config: PrepareConfig, source: TextSource, names: list[str]
) -> dict[str, str | None]:
    """Return the splits of a data set that are read, and what they are used for.

    Raises `UserError` if it has no split `data.prepare.split`.
    """
    val = [name for name in names if splits_in(name) == ["val"] and name != config.split]
    if source.split == "val" and (val or len(names) == 1):
        return {(val or names)[0]: "val"}
    if config.split not in names:
        near = did_you_mean(config.split, names, f"it has {', '.join(names)}")
        raise UserError(
            f"data.prepare.split is {config.split}, but the data set {source.name} has no such "
            f"split; {near}"
        )
    if source.split is not None or not val:
        return {config.split: source.split}
    return {config.split: "train", val[0]: "val"}


def expected_bytes(sources: Sequence[TextSource]) -> int | None:
    """Estimate the bytes of text in all sources; None for a data set of the Hub."""
    found = 0
    for source in sources:
        if source.data is not None:
            return None
        for file in source.files:
            is_smaller = file.suffix.lower() in COMPRESSIONS or source.kind == "parquet"
            found += file.stat().st_size * (EXPANSION if is_smaller else 1)
    return found
