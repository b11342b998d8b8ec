"""Read the documents of a source in order, and assign them to the splits train and val.

Sources: files of text, files with rows, data sets of the Hub. Each is read in bounded memory, in a
fixed order, from any `Position` on.

Splits: a source that has splits keeps them. Otherwise, a hash of each document decides its split,
so equal documents are in the same split, and documents stay where they are if others are added. Of
a text above `LONG_TEXT` characters, and of a source that is one text, the end is val, as in
nanoGPT. With a `separator`, each text between two separators is a document, and a hash decides its
split.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.errors import DataError, UserError, did_you_mean, one_line
from accel_gpt.prepare.pieces import FindCut, pieces
from accel_gpt.prepare.rows import State, as_text, is_chat, open_files, open_hub, read_rows
from accel_gpt.prepare.sources import HUB, STDLIB, TEXT, Selected, splits_in
from accel_gpt.prepare.text_files import (
    Text,
    examine,
    is_packed,
    read_text,
    separated_texts,
    text_hash,
)

BATCH_CHARACTERS = 1_000_000  # characters of text that are tokenized at once
LONG_TEXT = 100_000  # characters of a text file; assumption: a tenth of it is a useful sample
EXPANSION = 3  # bytes of text per byte of a compressed file; assumption for prose and code
SPLITS = ("train", "val")

# Write the turns of a chat as text
WriteChat = Callable[[list[dict[str, Any]]], str]


class Position(NamedTuple):
    """The position at which to resume reading, as values that JSON can hold."""

    source: int = 0
    file: int = 0
    """Index of the text file; 0 for rows."""
    row: int = 0
    """Number of the row. A text file has two: its text or train part, and its val part."""
    piece: int = 0
    """Number of pieces of this row that were already read."""
    state: State | None = None
    """State of `datasets` at this row or an earlier row."""


class Document(NamedTuple):
    """A document."""

    file: int
    row: int
    split: str
    text: str | Iterable[str]
    """All of it, or chunks."""
    key: bytes
    """Hash of its text; empty for the second part of a text."""
    state: State | None = None
    is_chat: bool = False
    """The text spells special tokens, which are read as such."""
    detected: Text | None = None
    """A text file that is not UTF-8."""


class Piece(NamedTuple):
    """A document or part of a document."""

    text: str
    first: bool
    last: bool
    document: Document
    after: Position
    """The position after this piece."""


# --------------------------------------------------------------------------- sources


class TextSource:
    """Files of text: one document a file, or the documents between separators."""

    def __init__(self, config: PrepareConfig, source: Selected, whole: bool) -> None:
        self.config = config
        self.files = source.files
        self.split = source.split
        self.is_one = len(self.files) == 1 and not os.path.isdir(source.name)
        self.is_cut = source.split is None and source.kind != STDLIB and not whole
        self.total: int | None = None
        """Bytes of text, None if they are not known in advance."""
        if not any(is_packed(file) for file in self.files):
            self.total = sum(file.stat().st_size for file in self.files)
        self.estimate = sum(
            file.stat().st_size * (EXPANSION if is_packed(file) else 1) for file in self.files
        )

    def documents(self, start: Position) -> Iterator[Document]:
        """Yield the documents from a position on."""
        for number in range(start.file, len(self.files)):
            first = start.row if number == start.file else 0
            text = examine(self.files[number])
            if self.is_one and not text.encoding:
                raise DataError(f"{text.path} is no text in an encoding that is known")
            for document in self.documents_of(text, number, first):
                if document.row >= first:
                    yield document

    def documents_of(self, text: Text, number: int, first: int) -> Iterator[Document]:
        """Yield the documents in a text file; the first ones may have no chunks."""
        detected = text if text.is_detected else None
        if not text.encoding or (detected and self.config.encoding == "utf-8"):
            yield Document(number, 0, "train", "", b"", detected=text._replace(encoding=""))
            return
        chunks = partial(read_text, text.path, text.encoding)
        if self.config.separator is not None:
            for row, part in enumerate(separated_texts(chunks(), self.config.separator)):
                key = text_hash(part)
                yield Document(number, row, self.split_of(key), part, key, detected=detected)
        elif self.is_cut and (self.is_one or text.characters > LONG_TEXT):
            cut = int(text.characters * (1 - self.config.val_fraction))
            train = part_of(chunks(), 0, cut)
            yield Document(number, 0, "train", train, text.key, detected=detected)
            yield Document(number, 1, "val", part_of(chunks(), cut, text.characters), b"")
        else:
            split = self.split_of(text.key)
            yield Document(number, 0, split, chunks(), text.key, detected=detected)

    def split_of(self, key: bytes) -> str:
        """Return the split of a document with a hash."""
        return self.split or split_by_hash(key, self.config.val_fraction)


class RowSource:
    """A column of files with rows, or of a data set of the Hub."""

    def __init__(
        self,
        config: PrepareConfig,
        where: str,
        open_data: Callable[[], Any],
        split: str | None,
        write_chat: WriteChat,
    ) -> None:
        self.config = config
        self.where = where
        self.open_data = open_data
        self.split = split
        self.write_chat = write_chat
        self.total: int | None = None
        self.estimate: int | None = None
        """Bytes of text, None for a data set of the Hub."""

    def documents(self, start: Position) -> Iterator[Document]:
        """Yield the documents from a position on."""
        field = self.config.text_field
        separator = self.config.separator
        for row in read_rows(self.open_data, self.where, field, start.row, start.state):
            where = f"row {row.number} of {self.where}"
            chat = is_chat(row.value)
            text = self.chat_text(row.value, where) if chat else as_text(row.value, where, field)
            for part in [text] if separator is None else separated_texts([text], separator):
                key = text_hash(part)
                split = self.split or split_by_hash(key, self.config.val_fraction)
                yield Document(0, row.number, split, part, key, row.state, chat)

    def chat_text(self, turns: list[dict[str, Any]], where: str) -> str:
        """Write the turns of a chat as text; an error of the template names the row."""
        try:
            return self.write_chat(turns)
        except UserError:
            raise
        except Exception as error:  # errors of Jinja, also those that the template raises
            raise DataError(f"{where} does not suit the chat template: {one_line(error)}") from None


DocumentSource = TextSource | RowSource


def open_selected(
    config: PrepareConfig, sources: Sequence[Selected], write_chat: WriteChat, whole: bool = False
) -> tuple[list[DocumentSource], list[str]]:
    """Open what was selected; return it with lines on the splits of data sets of the Hub.

    `whole`: the end of a text is not held out, as for the training of a tokenizer.
    """
    found: list[DocumentSource] = []
    lines: list[str] = []
    for source in sources:
        if source.kind == HUB:
            splits = open_hub(source.name, config.subset)
            chosen = hub_splits(config, source, list(splits))
            for name, split in chosen.items():
                where = f"split {name} of data set {source.name}"
                found.append(
                    RowSource(config, where, partial(splits.__getitem__, name), split, write_chat)
                )
                lines.append(f"reading {where}")
            if left_out := [name for name in splits if name not in chosen]:
                lines.append(f"left out of {source.name}: split {', '.join(left_out)}")
        elif source.kind in (TEXT, STDLIB):
            found.append(TextSource(config, source, whole))
        else:
            open_data = partial(open_files, source.kind, source.files)
            rows = RowSource(config, source.name, open_data, source.split, write_chat)
            size = sum(file.stat().st_size for file in source.files)
            is_smaller = source.kind == "parquet" or any(is_packed(file) for file in source.files)
            rows.estimate = size * (EXPANSION if is_smaller else 1)
            found.append(rows)
    return found, lines


def hub_splits(config: PrepareConfig, source: Selected, names: list[str]) -> dict[str, str | None]:
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


def split_by_hash(key: bytes, val_fraction: float) -> str:
    """Return the split of a document from its hash: val for a share `val_fraction` of hashes."""
    return "val" if as_fraction(key) < val_fraction else "train"


def as_fraction(key: bytes) -> float:
    """Convert a hash of 8 bytes to a number between 0 and 1."""
    return int.from_bytes(key, "big") / 2**64


def part_of(chunks: Iterable[str], start: int, end: int) -> Iterator[str]:
    """Yield characters `start` to `end` of a text, as chunks."""
    for chunk in chunks:
        if part := chunk[max(0, start) : max(0, end)]:
            yield part
        start -= len(chunk)
        end -= len(chunk)


# --------------------------------------------------------------------------- pieces


def read_pieces(
    sources: Sequence[DocumentSource], find_cut: FindCut, start: Position
) -> Iterator[Piece]:
    """Yield the documents from position `start` on, in pieces of about `BATCH_CHARACTERS`.

    A document without text is one empty piece.
    """
    for number in range(start.source, len(sources)):
        begin = start if number == start.source else Position(number)
        place = (begin.file, begin.row)
        count = 0  # pieces of the row
        for document in sources[number].documents(begin):
            if (document.file, document.row) != place:
                place = (document.file, document.row)
                count = 0
            skipped = begin.piece if place == (begin.file, begin.row) else 0
            texts = document_pieces(document, find_cut)
            text: str | None = next(texts)
            first = True
            while text is not None:
                following = next(texts, None)
                count += 1
                if count > skipped:
                    after = Position(number, *place, count, document.state)
                    yield Piece(text, first, following is None, document, after)
                first = False
                text = following


def document_pieces(document: Document, find_cut: FindCut) -> Iterator[str]:
    """Yield a document in pieces; the only piece of one without text is empty."""
    text = document.text
    if isinstance(text, str):
        if document.is_chat or len(text) <= 2 * BATCH_CHARACTERS:
            yield text
            return
        text = [text]
    texts = pieces(text, BATCH_CHARACTERS, find_cut)
    yield next(texts)
    for piece in texts:
        if piece:
            yield piece


# --------------------------------------------------------------------------- text for a tokenizer


def all_texts(sources: Sequence[DocumentSource], size: int = BATCH_CHARACTERS) -> Iterator[str]:
    """Yield the texts of all sources in order, cut into pieces of about `size` characters."""
    for source in sources:
        for document in source.documents(Position()):
            text = document.text
            yield from pieces([text] if isinstance(text, str) else text, size)


def sample_texts(sources: Sequence[DocumentSource], size: int) -> Iterator[str]:
    """Yield a sample of about `size` UTF-8 bytes: short documents, and pieces of long ones.

    A hash of each text's number selects it, so the sample is spread evenly over the sources. The
    size of a data set of the Hub is not known in advance, so the sample is its beginning.
    """
    texts = all_texts(sources, min(BATCH_CHARACTERS, max(1, size // 16)))
    estimates = [source.estimate for source in sources]
    total = size if None in estimates else sum(filter(None, estimates))
    keep = min(1.0, size / max(total, 1))
    limit = size if keep == 1 else 2 * size  # the total of compressed files is an estimate
    given = 0
    owed = 0.0
    for number, text in enumerate(text for text in texts if text):
        length = len(text.encode())
        owed += keep * length
        if keep < 1 and owed < length * as_fraction(text_hash(str(number))):
            continue
        owed -= length
        given += length
        yield text
        if given >= limit:
            return
