"""Which text is trained on: documents of a source in order, their splits, and each machine's part.

Sources: Python's own library, files of text, JSON lines, Parquet or Arrow, a Hub data set, standard
input. All are read in bounded memory, in the same order every time, and from any `Position` on.

Splits: of fewer than `FEW_TEXTS` text files the end of each is val, as nanoGPT does; otherwise a
hash of a document holds it out whole, so that equal documents stay together.
Standard input (path "-") can be read once. As jsonl it is one object a line; as text every piece of
about a megabyte is a text of its own, whose end is val, with end-of-text after each part.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.bpe import clean, pieces, stream_pieces
from accel_gpt.errors import DataError, require
from accel_gpt.text.files import (
    check_source,
    describe_source,
    file_share,
    files,
    guess_source,
    text_bytes,
)
from accel_gpt.text.hub import hub_rows
from accel_gpt.text.readers import (
    Bad,
    Rows,
    Share,
    Skipped,
    decoded,
    json_lines,
    read_rows,
    read_text,
    refusal,
    text_start,
)

__all__ = ("Skipped", "describe_source", "guess_source")  # besides what is defined here

BATCH_CHARACTERS = 1_000_000  # of text given to a process at once
FEW_TEXTS = 100  # below this many texts, each is parted at its end instead of held out whole
STDIN = "standard input"
SPLITS = ("train", "val")

Position = tuple[int, int, int]
"""Where reading goes on: number of the file (0 for a data set and standard input); offset in its
UTF-8 text, or number of the row in it; pieces of that row already given. JSON-able, in order."""


class Piece(NamedTuple):
    """A document or a part of one, with the split that it belongs to."""

    split: str
    text: str
    first: bool
    last: bool
    key: bytes
    """`digest` of the whole document: equal for equal documents."""
    after: Position


def split_pieces(
    config: PrepareConfig,
    cut_long: bool,
    start: Position = (0, 0, 0),
    rank: int = 0,
    world: int = 1,
    skipped: Skipped | None = None,
) -> Iterator[Piece]:
    """Pieces of the documents of machine `rank` of `world`, those after position `start`.

    `cut_long`: documents in pieces of about `BATCH_CHARACTERS` (see `bpe.pieces`), otherwise whole.
    `skipped` counts what is left out where config.skip_invalid is set.
    Raises `UserError` when there is nothing to read, `DataError` when a file cannot be decoded.
    """
    bad = refusal(config, Skipped() if skipped is None else skipped)
    if is_text(config):
        return text_pieces(config, cut_long, start, rank, world, bad)
    return row_pieces(config, cut_long, start, rank, world, bad)


def documents(config: PrepareConfig) -> Iterator[str]:
    """The texts of the source in order, long ones in pieces of about `BATCH_CHARACTERS`.

    Raises as `split_pieces`, and `UserError` for standard input, which could not be read again.
    """
    require(
        config.path != "-",
        f"data.prepare.path is -, but {STDIN} can be read only once and the tokenizer "
        f"{config.tokenizer} is made from the text first; give a file, or another "
        "data.prepare.tokenizer such as gpt2 or the path of a tokenizer.json",
    )
    check_source(config)
    return all_texts(config, BATCH_CHARACTERS)


def sample_texts(config: PrepareConfig, size: int) -> Iterator[str]:
    """About `size` UTF-8 bytes of documents and pieces of long ones, by a hash of their number.

    They are spread evenly over the source, all of which is read; where its amount is not known
    beforehand (a data set) they are its beginning. Raises as `documents`.
    """
    documents(config)  # for its errors
    total = None if config.source == "dataset" else sum(map(text_bytes, files(config)))
    keep = 1.0 if total is None else min(1.0, size / max(total, 1))
    limit = size if keep == 1 else 2 * size  # the total of compressed files is a guess
    given, owed = 0, 0.0
    for number, text in enumerate(all_texts(config, min(BATCH_CHARACTERS, max(1, size // 16)))):
        length = len(text.encode())
        owed += keep * length
        if keep < 1 and owed < length * share_of(digest(str(number).encode())):
            continue
        owed -= length
        given += length
        yield text
        if given >= limit:
            return


def expected_bytes(config: PrepareConfig, rank: int = 0, world: int = 1) -> int | None:
    """Bytes of text that machine `rank` will read, None where that is not known beforehand."""
    check_source(config)
    if config.source == "dataset" or config.path == "-":
        return None
    paths = files(config)
    sizes = [path.stat().st_size for path in paths]
    if not is_text(config):
        return None
    enough_files(config, len(paths), world)
    return sum(sizes[unit] for unit in file_share(sizes, rank, world))


def is_text(config: PrepareConfig) -> bool:
    """Whether each file of the source is one text."""
    check_source(config)
    return config.source in ("stdlib", "text") and config.path != "-"


# --------------------------------------------------------------------------- machines


def enough_files(config: PrepareConfig, count: int, world: int) -> None:
    """Each machine needs a text file."""
    require(
        count >= world,
        f"{config.path or config.source} has {count} text files, too few for {world} machines: "
        f"each needs one at least; use {count} machines or cut the text into {world} files",
    )


# --------------------------------------------------------------------------- text files


class Part(NamedTuple):
    """A document in a text file: its split, the bytes where it begins and ends, its digest."""

    split: str
    start: int
    end: int
    key: bytes


def text_pieces(
    config: PrepareConfig, cut_long: bool, start: Position, rank: int, world: int, bad: Bad
) -> Iterator[Piece]:
    """Pieces of text files, each of which is read once before, to part it."""
    paths = files(config)
    enough_files(config, len(paths), world)
    sizes = [path.stat().st_size for path in paths]
    for unit in file_share(sizes, rank, world):
        if unit < start[0]:
            continue
        try:
            parts = text_parts(config, paths[unit], len(paths) < FEW_TEXTS)
        except DataError as error:
            bad(str(error))
            continue
        for part in parts:
            begin = max(part.start, start[1] if unit == start[0] else 0)
            if begin < part.end:
                yield from part_pieces(config, cut_long, unit, paths[unit], part, begin)


def text_parts(config: PrepareConfig, path: Path, few: bool) -> list[Part]:
    """The documents in a text file that are not empty: the file, or of `few` its begin and end."""
    source, cut = str(config.source), sys.maxsize
    begin = text_start(source, path)
    if few:
        cut = int(sum(map(len, read_text(source, path, begin))) * (1 - config.val_fraction))
    hashes, sizes = (new_hash(), new_hash()), [0, 0]
    for chunk in read_text(source, path, begin):
        for i, text in enumerate((chunk[:cut], chunk[cut:])):
            data = text.encode()
            hashes[i].update(data)
            sizes[i] += len(data)
        cut = max(0, cut - len(chunk))
    keys = [one.digest() for one in hashes]
    splits = ("train", "val") if few else (split_of(keys[0], config), "")
    middle = begin + sizes[0]
    parts = [Part(splits[0], begin, middle, keys[0])]
    parts.append(Part(splits[1], middle, middle + sizes[1], keys[1]))
    return [part for part in parts if part.start < part.end]


def part_pieces(
    config: PrepareConfig, cut_long: bool, unit: int, path: Path, part: Part, begin: int
) -> Iterator[Piece]:
    """Pieces of a document in a text file from byte `begin` on."""
    chunks: Iterable[str] = read_text(str(config.source), path, begin, part.end)
    texts = stream_pieces(chunks, BATCH_CHARACTERS, path) if cut_long else ["".join(chunks)]
    for text in texts:
        first, begin = begin == part.start, begin + len(text.encode())
        yield Piece(part.split, text, first, begin == part.end, part.key, (unit, begin, 0))
    require(begin == part.end, f"{path} changed while it was read; start again")


# --------------------------------------------------------------------------- rows


def row_pieces(
    config: PrepareConfig, cut_long: bool, start: Position, rank: int, world: int, bad: Bad
) -> Iterator[Piece]:
    """Pieces of the rows of files, a data set or standard input."""
    for unit, rows in row_units(config, start, rank, world, bad):
        for row, text in rows:
            found = document_pieces(config, cut_long, unit, row, clean(text))
            yield from found[start[2] if (unit, row) == start[:2] else 0 :]


def row_units(
    config: PrepareConfig, start: Position, rank: int, world: int, bad: Bad
) -> Iterator[tuple[int, Rows]]:
    """(number, rows) of each file from `start` on: whole files, or of too few every world-th row.

    Of a data set and standard input every world-th row, too (but see `hub_rows`).
    """
    if config.source == "dataset":
        yield 0, hub_rows(config, start[1], rank, world, bad)
    elif config.path == "-":
        yield 0, stdin_rows(config, Share(start[1], rank, world), bad)
    else:
        paths = files(config)
        sizes = [path.stat().st_size for path in paths]
        whole = len(paths) >= world
        for unit in file_share(sizes, rank, world) if whole else range(len(paths)):
            if unit >= start[0]:
                begin = start[1] if unit == start[0] else 0
                share = Share(begin) if whole else Share(begin, (rank - unit) % world, world)
                yield (
                    unit,
                    read_rows(str(config.source), paths[unit], config.text_field, share, bad),
                )


def stdin_rows(config: PrepareConfig, share: Share, bad: Bad) -> Rows:
    """Lines of JSON, or pieces of about `BATCH_CHARACTERS` of a text."""
    if config.source == "jsonl":
        yield from json_lines(sys.stdin.buffer, STDIN, config.text_field, share, bad)
        return
    chunks = decoded(sys.stdin.buffer, STDIN, 0)
    try:
        for row, text in enumerate(stream_pieces(chunks, BATCH_CHARACTERS, STDIN)):
            if share.has(row):
                yield row, text.removeprefix("\ufeff") if row == 0 else text
    except DataError as error:
        bad(f"{error}; what follows cannot be read either")


def document_pieces(
    config: PrepareConfig, cut_long: bool, unit: int, row: int, text: str
) -> list[Piece]:
    """The pieces of a row; a piece of standard input is parted at its end, as a text file is."""
    parted = config.source == "text"
    cut = int(len(text) * (1 - config.val_fraction)) if parted else len(text)
    texts: list[tuple[str, str, bool, bool, bytes]] = []
    for i, part in enumerate((text[:cut], text[cut:])):
        if part:
            key = digest(part.encode())
            split = ("train", "val")[i] if parted else split_of(key, config)
            cuts = cut_long and not parted
            found = list(pieces(part, BATCH_CHARACTERS)) if cuts else [part]
            last = len(found) - 1
            texts += [(split, one, j == 0, j == last, key) for j, one in enumerate(found)]
    ends = [(unit, row, i) for i in range(1, len(texts))]
    return [Piece(*one, end) for one, end in zip(texts, [*ends, (unit, row + 1, 0)], strict=False)]


def all_texts(config: PrepareConfig, size: int) -> Iterator[str]:
    """The texts of the source, in pieces of about `size` characters."""
    bad = refusal(config, Skipped(loud=False))
    if not is_text(config):
        for _, rows in row_units(config, (0, 0, 0), 0, 1, bad):
            for _, text in rows:
                yield from pieces(clean(text), size) if text else ()
        return
    source = str(config.source)
    for path in files(config):
        try:
            begin = text_start(source, path)
            if config.skip_invalid:
                sum(map(len, read_text(source, path, begin)))
        except DataError as error:
            bad(str(error))
            continue
        found = stream_pieces(read_text(source, path, begin), size, path)
        yield from (text for text in found if text)


# --------------------------------------------------------------------------- splits


def new_hash() -> "hashlib.blake2b":
    """The hash that decides about the split."""
    return hashlib.blake2b(digest_size=8, key=b"accel_gpt val")


def digest(data: bytes) -> bytes:
    """8 bytes that tell a document, given as UTF-8, from others."""
    found = new_hash()
    found.update(data)
    return found.digest()


def share_of(key: bytes) -> float:
    """A digest as a number from 0 to 1."""
    return int.from_bytes(key, "big") / 2**64


def held_out(key: bytes, fraction: float) -> bool:
    """True for a share `fraction` of all texts, decided by the text's digest alone."""
    return int.from_bytes(key, "big") < fraction * 2**64


def split_of(key: bytes, config: PrepareConfig) -> str:
    """Split of a document that is not parted."""
    return "val" if held_out(key, config.val_fraction) else "train"
