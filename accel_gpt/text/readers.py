"""Text out of one file of any size and kind, bit by bit: text, JSON lines, Parquet, Arrow.

Text files are read by byte offset, the others by row, counted from 0; a null is an empty text.
Memory: a chunk or a batch of rows of about `BATCH_BYTES`, and the longest row.
`skip` is called with a sentence for each thing that cannot be decoded; it raises `DataError`, or
returns, and reading goes on after it.
"""

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from accel_gpt.errors import AccelGPTError, DataError, UserError

Skip = Callable[[str], None]
Rows = Iterator[tuple[int, str]]

CHUNK_BYTES = 1 << 20  # bytes of a text file read at once
BATCH_BYTES = 8 << 20  # of a Parquet column, decoded at once
BATCH_ROWS = 256
# What gzip and Arrow raise for files that are damaged.
DAMAGE = (EOFError, OSError, zlib.error, ValueError, NotImplementedError, KeyError, MemoryError)
LONGEST_JSON_LINE = 64 << 20  # bytes; assumption: a longer line is no document but a bomb or a blob
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "null")


@dataclass
class Skipped:
    """What cannot be decoded: an error, or, where it is `allowed`, counted and skipped."""

    allowed: bool
    count: int = 0

    def add(self, message: str) -> None:
        """Count one more thing; the first one is reported on stderr."""
        if not self.allowed:
            raise DataError(message) from None
        if self.count == 0:
            sys.stderr.write(f"skipped (data.prepare.skip_invalid is set): {message}\n")
        self.count += 1


# --------------------------------------------------------------------------- text


def text_start(path: Path) -> int:
    """Offset of the first byte of text: that after a byte order mark."""
    with opened(path) as file:
        return len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0


def text_chunks(path: Path, start: int, end: int | None = None) -> Iterator[str]:
    """Bytes `start` to `end` of a text file as text, line ends included, in chunks.

    Raises `DataError` naming the first byte that is not UTF-8.
    """
    with opened(path) as file:
        file.seek(start)
        yield from decoded(file, path, start, end)


def decoded(file: BinaryIO, where: object, start: int, end: int | None = None) -> Iterator[str]:
    """UTF-8 from a file that is at offset `start`, until `end`, in chunks; keeps \\r\\n whole."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=False)
    data = b"first"
    while data:
        data = file.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - start))
        start += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise not_utf8(where, error, start - len(error.object)) from None
        if text:
            yield text


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file for reading; what the system refuses is a `DataError`."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def not_utf8(where: object, error: UnicodeDecodeError, offset: int, detail: str = "") -> DataError:
    """The error for bytes that are not UTF-8, of which the first decoded lay at `offset`."""
    return DataError(
        f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
        f"{offset + error.start}{detail}; convert it first, for example with iconv -t UTF-8"
    )


# --------------------------------------------------------------------------- rows


def read_rows(source: str, path: Path, field: str, first: int, skip: Skip) -> Rows:
    """(number, text) of the rows of a jsonl, parquet or arrow file, from number `first` on.

    Raises `UserError` for a column that is not there. After damage that may be skipped the rest of
    the file is left out.
    """
    readers: dict[str, Callable[..., Rows]]
    readers = {"jsonl": jsonl_file, "parquet": parquet_file, "arrow": arrow_file}
    try:
        if path.stat().st_size:
            yield from readers[source](path, field, first, skip)
    except AccelGPTError:
        raise
    except DAMAGE as error:
        message = f"{path} cannot be read as {source}, or not to its end: {error}"
        if isinstance(error, OSError) and error.errno:
            raise DataError(message) from None
        skip(f"{message}; expected a whole {source} file: make or download it again")


def check_column(field: str, where: object, columns: list[str]) -> None:
    """`UserError` where the column `field` is missing."""
    if field not in columns:
        raise UserError(
            f"data.prepare.text_field is {field!r}, which {where} does not have; its columns: "
            f"{', '.join(columns)}"
        )


def jsonl_file(path: Path, field: str, first: int, skip: Skip) -> Rows:
    """Rows of a file of JSON lines, plain, .gz or .zst."""
    with path.open("rb") as raw:
        file: BinaryIO = raw
        if path.name.lower().endswith(".gz"):
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif path.name.lower().endswith(".zst"):
            import pyarrow as pa

            file = cast(
                BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), CHUNK_BYTES)
            )
        with file:
            yield from json_lines(file, path, field, first, skip)


def json_lines(file: BinaryIO, where: object, field: str, first: int, skip: Skip) -> Rows:
    """Rows of JSON lines; a line ends with a line feed, and one of white space is no row."""
    number = row = offset = 0
    while line := file.readline(LONGEST_JSON_LINE + 1):
        number += 1
        size, too_long = len(line), len(line) > LONGEST_JSON_LINE
        if too_long or not line.isspace():
            if row >= first:
                try:
                    yield row, json_text(line, offset, number, where, field)
                except DataError as error:
                    skip(str(error))
            row += 1
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
            size += len(line)
        offset += size


def json_text(line: bytes, offset: int, number: int, where: object, field: str) -> str:
    """Text of line `number`, which begins at `offset`; `DataError` where there is none."""
    if len(line) > LONGEST_JSON_LINE:
        raise DataError(
            f"line {number} of {where} is longer than {LONGEST_JSON_LINE:,} bytes; expected a JSON "
            "object in each line"
        )
    try:
        row = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, offset, f", in line {number}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"line {number} of {where} is not JSON: {error}; expected an object in each line (an "
            "array over several lines becomes one by jq -c '.[]')"
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"line {number} of {where} is {row!r:.50}; expected an object such as "
            f'{{"{field}": "..."}} (an array becomes lines by jq -c \'.[]\')'
        )
    check_column(field, f"line {number} of {where}", list(row))
    value = row[field]
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(f"line {number} of {where} has {value!r:.50} in column {field}; expected text")


# --------------------------------------------------------------------------- Parquet, Arrow


def parquet_file(path: Path, field: str, first: int, skip: Skip) -> Rows:
    """Rows of a Parquet file; row groups before the start are not read."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
        check_type(file.schema_arrow, field, path)
        number = 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            if number + group.num_rows > first:
                columns = (group.column(i) for i in range(group.num_columns))
                size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
                count = BATCH_BYTES * group.num_rows // max(size, 1)
                batches = file.iter_batches(
                    batch_size=max(1, min(BATCH_ROWS, count)),
                    row_groups=[index],
                    columns=[field],
                    use_threads=False,
                )
                yield from column_rows(batches, number, path, first, skip)
            number += group.num_rows


def arrow_file(path: Path, field: str, first: int, skip: Skip) -> Rows:
    """Rows of an Arrow file in the file or the stream format, mapped rather than read."""
    import pyarrow as pa
    from pyarrow import ipc

    with pa.memory_map(str(path)) as file:
        indexed = file.read(6) == b"ARROW1"
        opener = ipc.open_file if indexed else ipc.open_stream
        file.seek(0)
        schema = opener(file).schema
        check_type(schema, field, path)
        file.seek(0)
        column = schema.get_field_index(field)
        options = ipc.IpcReadOptions(included_fields=[column], use_threads=False)
        reader = opener(file, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if indexed else reader
        yield from column_rows(batches, 0, path, first, skip)


def check_type(schema: Any, field: str, path: Path) -> None:
    """The column must be there, once, and hold text, or bytes that may be UTF-8."""
    import pyarrow as pa

    check_column(field, path, list(schema.names))
    count = schema.names.count(field)
    kind = schema.field(field).type if count == 1 else f"{count} columns"
    if str(kind.value_type if isinstance(kind, pa.DictionaryType) else kind) not in TEXT_TYPES:
        raise DataError(f"column {field} of {path} holds {kind}; expected text")


def column_rows(batches: Any, number: int, path: Path, first: int, skip: Skip) -> Rows:
    """Rows of batches of one column, the first one being row `number`."""
    for batch in batches:
        if number + len(batch) > first:
            column = as_bytes(batch.column(0))
            for i in range(max(0, first - number), len(batch)):
                try:
                    yield number + i, (column[i].as_py() or b"").decode("utf-8")
                except UnicodeDecodeError as error:
                    skip(str(not_utf8(f"row {number + i} of {path}", error, 0, " of its text")))
        number += len(batch)


def as_bytes(column: Any) -> Any:
    """A column of text as bytes, its offsets checked: those of a damaged file may lie outside."""
    import pyarrow as pa

    plain = {"string": pa.binary(), "large_string": pa.large_binary()}.get(str(column.type))
    if plain is not None:
        column = column.view(plain)
    column.validate(full=True)
    return column.cast(pa.large_binary())
