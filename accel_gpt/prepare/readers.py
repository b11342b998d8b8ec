"""Read text from files of any size and from Hub data sets, in bounded memory.

Text files are read by byte offset. JSON lines, Parquet, Arrow and data sets are read by row; the
first row is number 0. A null is an empty text. Memory holds one chunk of a text file, or a batch of
rows and the longest row.

`skip` receives a message for each line, row or file that cannot be decoded. It raises `DataError`,
or returns and reading continues after the invalid part.

`datasets` streams data sets of the Hub, but does not read local files. With `datasets`, reading
JSON lines or Parquet takes 220 to 520 MB per process instead of 35 to 110. It also reads the whole
file if one line is not JSON. A damaged Parquet file aborted 3 of 30 processes (datasets 5.2.0,
pyarrow 26.0.1).
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import shlex
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.hub_client import describe_dataset_error
from accel_gpt.errors import AccelGPTError, DataError, UserError, needs_package

Skip = Callable[[str], None]
State = dict[str, Any]

CHUNK_BYTES = 1 << 20  # bytes of a file read at once
SNIFFED_BYTES = 8192  # bytes at the start of a file that tell binary content and encoding
BATCH_ROWS = 64  # rows of Parquet decoded at once
STATE_ROWS = 1000  # rows of a data set between two states; a resume repeats at most this many
TOP_LEVEL = "only a column at the top level is read, so move it there"
LONGEST_JSON_LINE = 64 << 20  # bytes; assumption: a longer line is not a document
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "null")
# Errors that decompression and Arrow raise for damaged files
DAMAGE = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    NotImplementedError,
    KeyError,
    MemoryError,
)

# Programs that decompress a file to standard output with -dc
DECOMPRESSORS = types.MappingProxyType(
    {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
)
# Marks at the start of a text in another encoding than UTF-8; UTF-32's begins with UTF-16's
ENCODINGS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Row(NamedTuple):
    """A document from a file or a data set."""

    number: int
    text: str
    state: State | None = None
    """The state from which `datasets` resumes, at this row or an earlier row; see `hub_rows()`."""


@dataclass
class Skipped:
    """Count the parts of the source that cannot be decoded; unless `allowed`, raise an error."""

    allowed: bool
    count: int = 0

    def add(self, message: str) -> None:
        """Count one more skipped part, and print the first message to stderr."""
        if not self.allowed:
            raise DataError(message) from None
        if self.count == 0:
            sys.stderr.write(f"skipped (skip_invalid is set): {message}\n")
        self.count += 1


# --------------------------------------------------------------------------- files


class DamagedError(DataError):
    """A file that cannot be decompressed or decoded completely."""


@contextmanager
def open_file(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file for reading, and decompress it if its name ends in .gz, .bz2, .xz or .zst.

    Text and JSON lines in UTF-16 or UTF-32 are read as UTF-8. Errors of reading and decompressing
    become a `DataError` that names the file.
    """
    try:
        with path.open("rb") as raw, decompress(raw, path.name.lower()) as file:
            yield as_utf8(file) if source in ("text", "jsonl") else file
    except AccelGPTError:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}; check the file and its disk"
            ) from None
        raise DamagedError(
            f"{path} cannot be read completely as {source}: {error}; download or write it again"
        ) from None


def decompress(raw: BinaryIO, name: str) -> BinaryIO:
    """Return a file with the decompressed bytes of `raw`, or `raw` if it is not compressed."""
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".bz2"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if name.endswith(".xz"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if name.endswith(".zst"):
        with needs_package("pyarrow"):
            import pyarrow as pa
        stream = pa.CompressedInputStream(raw, "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, CHUNK_BYTES))
    return raw


class Utf8Reader(io.RawIOBase):
    """Read a file in another encoding as UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.rest = b""

    def readable(self) -> bool:
        """Return that the file can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with UTF-8; return the number of bytes, 0 at the end of the file."""
        data = b"x"
        while data and not self.rest:
            data = self.file.read(CHUNK_BYTES)
            self.rest = self.decoder.decode(data, final=not data).encode()
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def as_utf8(file: BinaryIO) -> BinaryIO:
    """Return a file that reads as UTF-8, decided by its start."""
    encoding = wide_encoding(cast(io.BufferedReader, file).peek(SNIFFED_BYTES))
    if encoding is None:
        return file
    return cast(BinaryIO, io.BufferedReader(Utf8Reader(file, encoding), CHUNK_BYTES))


def wide_encoding(start: bytes) -> str | None:
    """Return the encoding of a text in UTF-16 or UTF-32 from its start; None for any other file.

    It has a byte order mark, or is mostly Latin, so that many bytes are 0.
    """
    for mark, encoding in ENCODINGS:
        if start.startswith(mark):
            return encoding
    start = start[: min(len(start), SNIFFED_BYTES) // 4 * 4]
    zeros = (start[::2].count(0), start[1::2].count(0))
    if 4 * sum(zeros) <= len(start):
        return None
    order = "le" if zeros[1] > zeros[0] else "be"
    for encoding in (f"utf-32-{order}", f"utf-16-{order}"):
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(start)
            if all(character.isprintable() or character.isspace() for character in text):
                return encoding
    return None


# --------------------------------------------------------------------------- text


def text_start(path: Path) -> int:
    """Return the byte offset of the text, which is after the byte order mark if there is one."""
    with open_file(path, "text") as file:
        return len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0


def whole_text(path: Path) -> Iterator[str]:
    """Yield a text file as chunks of text, without the byte order mark."""
    yield from text_chunks(path, text_start(path))


def text_chunks(path: Path, start: int, end: int | None = None) -> Iterator[str]:
    """Yield bytes `start` to `end` of a text file as chunks of text, with unchanged line ends.

    Raises `DataError` if a byte is not UTF-8; the message has its offset.
    """
    with open_file(path, "text") as file:
        if file.seekable():
            file.seek(start)
        else:
            left = start
            while left:
                skipped = file.read(min(CHUNK_BYTES, left))
                if not skipped:  # the file became shorter
                    break
                left -= len(skipped)
        yield from decode_chunks(file, path, start, end)


def decode_chunks(
    file: BinaryIO, where: object, start: int, end: int | None = None
) -> Iterator[str]:
    """Yield the text of a file from its current offset, `start`, to `end`; never split \\r\\n."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=False)
    offset = start
    ended = False
    while not ended:
        data = file.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - offset))
        offset += len(data)
        ended = not data
        try:
            text = decoder.decode(data, final=ended)
        except UnicodeDecodeError as error:
            raise not_utf8(where, error, offset - len(error.object)) from None
        if text:
            yield text


def not_utf8(where: object, error: UnicodeDecodeError, offset: int, detail: str = "") -> DataError:
    """Return the error for bytes that are not UTF-8. `offset`: offset of the decoded bytes."""
    return DataError(
        f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
        f"{offset + error.start}{detail}; convert it, for example with "
        "iconv -f WINDOWS-1252 -t UTF-8"
    )


def separated_rows(
    chunks: Iterable[str], where: object, separator: str, first: int, skip: Skip
) -> Iterator[Row]:
    """Yield the texts between separators as rows, from number `first` on.

    `where`: the name of the text, for messages. Memory holds the longest row.
    """
    number = 0
    rest = ""
    try:
        for chunk in chunks:
            searched = max(0, len(rest) - len(separator) + 1)
            rest += chunk
            if rest.find(separator, searched) < 0:
                continue
            *texts, rest = rest.split(separator)
            for text in texts:
                if number >= first:
                    yield Row(number, text)
                number += 1
    except DataError as error:
        skip(f"{error}; the rest of {where} cannot be read either")
    if number >= first:
        yield Row(number, rest)


# --------------------------------------------------------------------------- JSON lines


def read_rows(source: str, path: Path, field: str, first: int, skip: Skip) -> Iterator[Row]:
    """Yield the rows of a jsonl, parquet or arrow file from number `first` on.

    Raises `UserError` if the column is missing. If `skip` allows damage, the rest of a damaged
    file is skipped.
    """
    readers = {"jsonl": json_lines, "parquet": parquet_rows, "arrow": arrow_rows}
    try:
        with open_file(path, source) as file:
            if path.stat().st_size:
                yield from readers[source](file, path, field, first, skip)
    except DamagedError as error:
        skip(str(error))


def json_lines(file: BinaryIO, where: object, field: str, first: int, skip: Skip) -> Iterator[Row]:
    """Yield the rows of JSON lines. A line ends with a line feed; blank lines are not rows."""
    number = 0
    row = 0
    offset = 0
    while line := file.readline(LONGEST_JSON_LINE + 1):
        number += 1
        size = len(line)
        too_long = size > LONGEST_JSON_LINE
        if too_long or not line.isspace():
            if row >= first:
                try:
                    yield Row(row, json_text(line, offset, number, where, field))
                except DataError as error:
                    skip(str(error))
            row += 1
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
            size += len(line)
        offset += size


def json_text(line: bytes, offset: int, number: int, where: object, field: str) -> str:
    """Return the text of line `number`, which begins at byte `offset`.

    Raises `DataError` if the line holds no text, `UserError` if the column is missing.
    """
    if len(line) > LONGEST_JSON_LINE:
        raise DataError(
            f"line {number} of {where} is longer than {LONGEST_JSON_LINE:,} bytes; write one JSON "
            "object per line"
        )
    try:
        row = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, offset, f", in line {number}") from None
    except (ValueError, RecursionError) as error:
        tool = "jq -c . joins the lines of an object"
        if line.lstrip().startswith(b"["):
            tool = "jq -c '.[]' converts an array"
        raise DataError(
            f"line {number} of {where} is not JSON: {error}; write one object per line ({tool})"
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"line {number} of {where} is {row!r:.50}; expected an object such as "
            f'{{"{field}": "..."}} (jq -c \'.[]\' converts an array)'
        )
    check_column(field, f"line {number} of {where}", row, jq_command(row, field, where))
    value = row[field]
    if value is None or isinstance(value, str):
        return value or ""
    advice = ""
    if isinstance(value, dict) and value:
        inner = next((key for key in value if isinstance(value[key], str)), next(iter(value)))
        advice = f"; {TOP_LEVEL}: {jq_command(row, f'{field}.{inner}', where)}"
    raise DataError(
        f"line {number} of {where} has {value!r:.50} in column {field}; expected text{advice}"
    )


def jq_command(row: object, field: str, where: object) -> str:
    """Return the command that moves the text at `a.b` in a row to the top level and joins lists."""
    path = ""
    for name in field.split("."):
        if isinstance(row, list):
            path += "[]"
            row = next(iter(row), None)
        is_plain = name.isascii() and name.isidentifier()
        path += f".{name if is_plain else json.dumps(name, ensure_ascii=False)}"
        row = row.get(name) if isinstance(row, dict) else None
    if isinstance(row, list):
        path += "[]"
    if "[]" in path:
        path = f'[{path}] | join("\\n")'
    program = shlex.quote(f"{{text: ({path})}}")
    if not isinstance(where, Path):
        return f"jq -c {program}"
    file = shlex.quote(str(where))
    if tool := DECOMPRESSORS.get(where.suffix.lower()):
        return f"{tool} -dc {file} | jq -c {program} > flat.jsonl"
    return f"jq -c {program} {file} > flat.jsonl"


def python_literal(path: str | Path) -> str:
    """Return a path as a string of Python code, to stand in double quotes of a shell."""
    escaped = str(path).replace("'", r"\'")
    return f"'{escaped}'"


def check_column(field: str, where: object, columns: Iterable[str], flatten: str = "") -> None:
    """Raise `UserError` if the column `field` is missing.

    `flatten`: a command that moves a column from inside another one to the top level.
    """
    if field in columns:
        return
    outer = field.partition(".")[0]
    if flatten and outer in columns:
        raise UserError(
            f"data.prepare.text_field is {field!r}, which lies inside the column {outer} of "
            f"{where}; {TOP_LEVEL}: {flatten}"
        )
    raise UserError(
        f"data.prepare.text_field is {field!r}, but {where} has no such column; set it to one of "
        f"its columns: {', '.join(columns)}"
    )


# --------------------------------------------------------------------------- Parquet, Arrow


def parquet_rows(file: BinaryIO, path: Path, field: str, first: int, skip: Skip) -> Iterator[Row]:
    """Yield the rows of a Parquet column from `first` on, skipping earlier row groups."""
    with needs_package("pyarrow"):
        from pyarrow.parquet import ParquetFile
    # Open by path: Arrow's threads would need the interpreter for a Python file, even at its exit.
    with ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as table:
        check_type(table.schema_arrow, field, path)
        number = 0
        group = 0
        while group < table.num_row_groups:
            rows = table.metadata.row_group(group).num_rows
            if number + rows > first:
                break
            number += rows
            group += 1
        batches = table.iter_batches(
            batch_size=BATCH_ROWS,
            row_groups=range(group, table.num_row_groups),
            columns=[field],
            use_threads=False,
        )
        yield from column_rows(batches, number, path, first, skip)


def arrow_rows(file: BinaryIO, path: Path, field: str, first: int, skip: Skip) -> Iterator[Row]:
    """Yield the rows of an Arrow column, in the file or the stream format, from mapped memory."""
    with needs_package("pyarrow"):
        import pyarrow as pa
        from pyarrow import ipc
    has_index = file.read(6) == b"ARROW1"
    opener = ipc.open_file if has_index else ipc.open_stream
    with pa.memory_map(str(path)) as memory:
        schema = opener(memory).schema
        check_type(schema, field, path)
        memory.seek(0)
        column = schema.get_field_index(field)
        options = ipc.IpcReadOptions(included_fields=[column], use_threads=False)
        reader = opener(memory, options=options)
        batches = reader
        if has_index:
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from column_rows(batches, 0, path, first, skip)


def check_type(schema: Any, field: str, path: Path) -> None:
    """Raise an error unless the column exists exactly once and holds text or bytes."""
    import pyarrow as pa

    flatten = (
        'python -c "import datasets; '
        f"datasets.Dataset.from_parquet({python_literal(path)}).flatten()"
        ".to_parquet('flat.parquet')\", which names it "
    )
    check_column(field, path, schema.names, flatten + field)
    count = schema.names.count(field)
    if count > 1:
        raise DataError(f"{path} has {count} columns {field}; expected one")
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind) and kind.num_fields:
        inner = f"{field}.{kind.field(0).name}"
        raise DataError(
            f"column {field} of {path} holds {kind}; expected text; {TOP_LEVEL}: {flatten}{inner}"
        )
    if str(kind) not in TEXT_TYPES:
        raise DataError(f"column {field} of {path} holds {kind}; expected text")


def column_rows(
    batches: Iterable[Any], number: int, path: Path, first: int, skip: Skip
) -> Iterator[Row]:
    """Yield the rows of one-column batches from `first` on; the batches begin with row `number`."""
    for batch in batches:
        if number + len(batch) > first:
            values = text_bytes(batch.column(0))
            for i in range(max(0, first - number), len(batch)):
                try:
                    yield Row(number + i, (values[i].as_py() or b"").decode("utf-8"))
                except UnicodeDecodeError as error:
                    skip(str(not_utf8(f"row {number + i} of {path}", error, 0, " of its text")))
        number += len(batch)


def text_bytes(column: Any) -> Any:
    """Return a text column as bytes, after checking its offsets for damage."""
    import pyarrow as pa

    if str(column.type) == "string":
        column = column.view(pa.binary())
    elif str(column.type) == "large_string":
        column = column.view(pa.large_binary())
    column.validate(full=True)
    return column.cast(pa.large_binary())


# --------------------------------------------------------------------------- the Hub


def hub_rows(config: PrepareConfig, first: int, state: State | None, skip: Skip) -> Iterator[Row]:
    """Stream the rows of a Hub data set from number `first` on.

    `state`: where to resume, at row `first` or earlier: {"row": number of the next row, "dataset":
    `state_dict` of the data set at that row}. `skip` is called for values that are not text.
    """
    with needs_package("datasets"):
        import datasets
    datasets.config.TORCH_AVAILABLE = False  # importing torch takes 165 MB and a second
    field = config.text_field
    where = f"data set {config.dataset}"
    try:
        data = datasets.load_dataset(
            config.dataset, config.dataset_config, split=config.dataset_split, streaming=True
        )
        start = 0
        if state is not None:
            data.load_state_dict(state["dataset"])
            start = state["row"]
        for number, row in enumerate(data, start):
            if number >= first:
                check_column(field, where, row)
                value = row[field]
                if value is None or isinstance(value, str):
                    yield Row(number, value or "", state)
                else:
                    skip(f"row {number} of {where} has {value!r:.50} in column {field}, not text")
            if (number + 1) % STATE_ROWS == 0:
                state = {"row": number + 1, "dataset": data.state_dict()}
    except AccelGPTError:
        raise
    except Exception as error:  # errors of datasets, pyarrow, fsspec, huggingface_hub and httpx
        raise UserError(
            describe_dataset_error(
                str(config.dataset), config.dataset_config, config.dataset_split, error
            )
        ) from None
