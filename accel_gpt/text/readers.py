"""Text out of one file of any size and kind, bit by bit: text, JSON lines, Parquet, Arrow.

Text files are read by byte offset, the others by row, counted from 0; a null is an empty text.
Memory: a chunk or a batch of rows of about `BATCH_BYTES`, and the longest row.
`bad` is told of each thing that cannot be decoded; it raises `DataError`, or lets it be skipped.
"""

import codecs
import gzip
import io
import json
import sys
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.bpe import clean
from accel_gpt.errors import DataError, UserError

Bad = Callable[[str], None]
Rows = Iterator[tuple[int, str]]

CHUNK = 1 << 20  # bytes of a text file read at once
BATCH_BYTES = 8 << 20  # of a Parquet column, decoded at once
BATCH_ROWS = 256
# What gzip and Arrow raise for files that are not what they should be.
DAMAGE = (EOFError, OSError, zlib.error, ValueError, NotImplementedError, KeyError, MemoryError)
LONGEST_LINE = 64 << 20  # bytes; assumption: a longer line is no document but a bomb or a blob


@dataclass
class Skipped:
    """What `skip_invalid` left out: how many, and the first one's message, told on stderr."""

    count: int = 0
    first: str = ""
    loud: bool = True

    def add(self, message: str) -> None:
        """Count one more."""
        if self.count == 0:
            self.first = message
            if self.loud:
                sys.stderr.write(f"skipped, as data.prepare.skip_invalid says: {message}\n")
        self.count += 1


def refusal(config: PrepareConfig, skipped: Skipped) -> Bad:
    """What is done about a thing that cannot be decoded."""

    def bad(message: str) -> None:
        if not config.skip_invalid:
            raise DataError(message) from None
        skipped.add(message)

    return bad


class Share(NamedTuple):
    """The rows that are wanted: from number `start`, those that leave `rest` modulo `parts`."""

    start: int = 0
    rest: int = 0
    parts: int = 1

    def has(self, row: int) -> bool:
        """Whether `row` is wanted."""
        return row >= self.start and row % self.parts == self.rest


# --------------------------------------------------------------------------- text


def text_start(source: str, path: Path) -> int:
    """Offset of the first byte of text: that after a byte order mark."""
    if source == "stdlib":
        return 0
    with opened(path) as file:
        return len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0


def read_text(source: str, path: Path, start: int, end: int | None = None) -> Iterator[str]:
    """Bytes `start` to `end` of a text file as text, line ends included, in chunks.

    Of Python's library: of the file's text as UTF-8, by its declared encoding; empty if it has
    another. Raises `DataError` naming the first byte that is not UTF-8.
    """
    if source == "stdlib":
        yield library_text(path).encode()[start:end].decode()
        return
    with opened(path) as file:
        file.seek(start)
        yield from decoded(file, path, start, end)


def decoded(file: BinaryIO, where: object, start: int, end: int | None = None) -> Iterator[str]:
    """UTF-8 from a file that stands at offset `start`, until `end`, in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = b"first"
    while data:
        data = file.read(CHUNK if end is None else min(CHUNK, end - start))
        start += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            offset = start - len(error.object) + error.start
            raise DataError(
                f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset}; "
                "convert it first, for example with iconv -t UTF-8"
            ) from None
        if text:
            yield text


def library_text(path: Path) -> str:
    """A Python source by its declared encoding, empty when that is wrong."""
    try:
        with opened(path), tokenize.open(path) as file:
            return clean(file.read())
    except (SyntaxError, UnicodeDecodeError):
        return ""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file for reading; what the system refuses is a `DataError`."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


# --------------------------------------------------------------------------- rows


def read_rows(source: str, path: Path, field: str, share: Share, bad: Bad) -> Rows:
    """(number, text) of the wanted rows of a jsonl, parquet or arrow file.

    Raises `UserError` for a column that is not there. After damage that `bad` lets pass the rest
    of the file is left out.
    """
    read = {"jsonl": jsonl_file, "parquet": parquet_file, "arrow": arrow_file}[source]
    try:
        if path.stat().st_size:
            yield from read(path, field, share, bad)
    except UserError:
        raise
    except DAMAGE as error:
        message = f"{path} cannot be read as {source}, or not to its end: {error}"
        if isinstance(error, OSError) and error.errno:
            raise DataError(message) from None
        bad(f"{message}; expected a whole {source} file: make or download it again")


def need_pyarrow(what: object) -> Any:
    """The package, or a sentence."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{what} needs the package pyarrow; pip install pyarrow") from None
    return pyarrow


def not_there(field: str, where: object, columns: list[str]) -> UserError:
    """The error for a missing column."""
    return UserError(
        f"data.prepare.text_field is {field!r}, which {where} does not have; its columns: "
        f"{', '.join(columns)}"
    )


# --------------------------------------------------------------------------- JSON lines


def jsonl_file(path: Path, field: str, share: Share, bad: Bad) -> Rows:
    """Rows of a file of JSON lines, plain, .gz or .zst."""
    name = path.name.lower()
    with path.open("rb") as raw:
        if name.endswith(".gz"):
            with gzip.open(raw) as unzipped:
                yield from json_lines(cast(BinaryIO, unzipped), path, field, share, bad)
        elif name.endswith(".zst"):
            stream = need_pyarrow(path).CompressedInputStream(raw, "zstd")
            with io.BufferedReader(stream, CHUNK) as file:
                yield from json_lines(file, path, field, share, bad)
        else:
            yield from json_lines(raw, path, field, share, bad)


def json_lines(file: BinaryIO, where: object, field: str, share: Share, bad: Bad) -> Rows:
    """Rows of JSON lines; a line ends with a line feed, and one of white space is no row."""
    number = row = offset = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        size, bomb = len(line), len(line) > LONGEST_LINE
        if bomb or not line.isspace():
            if not share.has(row):
                pass
            elif bomb:
                bad(
                    f"line {number} of {where} is longer than {LONGEST_LINE:,} bytes; expected a "
                    "JSON object in each line"
                )
            else:
                text = json_text(line, offset, number, where, field, bad)
                if text is not None:
                    yield row, text
            row += 1
        while bomb and line and not line.endswith(b"\n"):
            line = file.readline(CHUNK)
            size += len(line)
        offset += size


def json_text(
    line: bytes, offset: int, number: int, where: object, field: str, bad: Bad
) -> str | None:
    """Text of line `number`, which begins at `offset`; None when it is skipped."""
    try:
        text = line.decode("utf-8")
        row = json.loads(text.removeprefix("\ufeff") if offset == 0 else text)
    except UnicodeDecodeError as error:
        bad(
            f"{where} is not UTF-8: byte 0x{line[error.start]:02x} at offset "
            f"{offset + error.start}, in line {number}; convert it first, for example with iconv "
            "-t UTF-8"
        )
        return None
    except (ValueError, RecursionError) as error:
        bad(
            f"line {number} of {where} is not JSON: {error}; expected an object in each line (an "
            "array over several lines becomes one by jq -c '.[]')"
        )
        return None
    if not isinstance(row, dict):
        bad(
            f"line {number} of {where} is {row!r:.50}; expected an object such as "
            f'{{"{field}": "..."}} (an array becomes lines by jq -c \'.[]\')'
        )
        return None
    if field not in row:
        raise not_there(field, f"line {number} of {where}", list(row))
    value = row[field]
    if value is None or isinstance(value, str):
        return value or ""
    bad(f"line {number} of {where} has {value!r:.50} in column {field}; expected text")
    return None


# --------------------------------------------------------------------------- Parquet, Arrow


def parquet_file(path: Path, field: str, share: Share, bad: Bad) -> Rows:
    """Rows of a Parquet file; row groups before the start are not read."""
    pa = need_pyarrow(path)
    with pa.parquet.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False) as file:
        check_column(pa, file.schema_arrow, field, path)
        number = 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            if number + group.num_rows > share.start:
                columns = (group.column(i) for i in range(group.num_columns))
                size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
                count = BATCH_BYTES * group.num_rows // max(size, 1)
                batches = file.iter_batches(
                    batch_size=max(1, min(BATCH_ROWS, count)),
                    row_groups=[index],
                    columns=[field],
                    use_threads=False,
                )
                yield from column_rows(pa, batches, number, path, share, bad)
            number += group.num_rows


def arrow_file(path: Path, field: str, share: Share, bad: Bad) -> Rows:
    """Rows of an Arrow file in the file or the stream format, mapped rather than read."""
    pa = need_pyarrow(path)
    with pa.memory_map(str(path)) as file:
        indexed = file.read(6) == b"ARROW1"
        opener = pa.ipc.open_file if indexed else pa.ipc.open_stream
        file.seek(0)
        schema = opener(file).schema
        check_column(pa, schema, field, path)
        file.seek(0)
        column = schema.get_field_index(field)
        options = pa.ipc.IpcReadOptions(included_fields=[column], use_threads=False)
        reader = opener(file, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if indexed else reader
        yield from column_rows(pa, batches, 0, path, share, bad)


def check_column(pa: Any, schema: Any, field: str, path: Path) -> None:
    """The column must be there, once, and hold text, or bytes that may be UTF-8."""
    if field not in schema.names:
        raise not_there(field, path, list(schema.names))
    if schema.names.count(field) > 1:
        raise DataError(f"{path} has {schema.names.count(field)} columns {field!r}; expected one")
    kind = schema.field(field).type
    held = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = ("string", "large_string", "string_view", "binary", "large_binary", "null")
    if str(held) not in kinds:
        raise DataError(f"column {field} of {path} holds {kind}; expected text")


def column_rows(pa: Any, batches: Any, number: int, path: Path, share: Share, bad: Bad) -> Rows:
    """Rows of batches of one column, the first one being row `number`."""
    for batch in batches:
        if number + len(batch) > share.start:
            column = as_bytes(pa, batch.column(0))
            for i in range(max(0, share.start - number), len(batch)):
                if share.has(number + i):
                    data = column[i].as_py() or b""
                    try:
                        yield number + i, data.decode("utf-8")
                    except UnicodeDecodeError as error:
                        bad(
                            f"row {number + i} of {path} is not UTF-8: byte "
                            f"0x{data[error.start]:02x} at offset {error.start} of its text; "
                            "expected UTF-8"
                        )
        number += len(batch)


def as_bytes(pa: Any, column: Any) -> Any:
    """A column of text as bytes, its offsets checked: those of a damaged file may lie outside."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    column.validate(full=True)
    plain = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    return column if plain else column.cast(pa.large_binary())
