"""Read text from files of any size and from Hub data sets, in bounded memory.

Text is UTF-8, or UTF-16 or UTF-32 with a byte order mark. Windows line ends (CR LF) become line
feeds, and lone surrogates become U+FFFD. JSON lines, Parquet and data sets are read by row; the
first row is number 0, and a null is an empty text. Invalid text raises `DataError` with the file,
and the line, row or byte.

`datasets` streams data sets of the Hub, but does not read local files. With `datasets`, reading
JSON lines or Parquet takes 220 to 520 MB per process instead of 35 to 110. It also reads the whole
file if one line is not JSON. A damaged Parquet file aborted 3 of 30 processes (datasets 5.2.0,
pyarrow 26.0.1).
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.hub import describe_dataset_error

State = dict[str, Any]

COMPRESSIONS = (".gz", ".zst")
CHUNK_BYTES = 1 << 20  # bytes of a file read at once
HEAD_BYTES = 8192  # bytes at the start of a file that tell whether it is text
BATCH_ROWS = 64  # rows of Parquet decoded at once
STATE_ROWS = 1000  # rows of a data set between two states; a resume repeats at most this many
LONGEST_JSON_LINE = 64 << 20  # bytes; assumption: a longer line is an array, not a document
# Byte order marks of other encodings than UTF-8; UTF-32's mark begins with UTF-16's
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Row(NamedTuple):
    """A text from a file or a data set."""

    number: int
    text: str
    state: State | None = None
    """The state from which `datasets` resumes, at this row or an earlier row; see `hub_rows()`."""


# --------------------------------------------------------------------------- files


@contextmanager
def open_file(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file for reading, and decompress it if its name ends in .gz or .zst.

    Errors of reading and decoding become a `DataError` that names the file.
    """
    try:
        with path.open("rb") as raw, decompress(raw, path.name.lower()) as file:
            yield file
    except AccelGPTError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, NotImplementedError) as error:
        raise DataError(
            f"{path} cannot be read completely as {source}: {error}; download or write it again"
        ) from None


def decompress(raw: BinaryIO, name: str) -> BinaryIO:
    """Return a file with the decompressed bytes of `raw`, or `raw` if it is not compressed."""
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        import pyarrow as pa

        stream = pa.CompressedInputStream(raw, "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, CHUNK_BYTES))
    return raw


def unpacked_name(name: str) -> str:
    """Return a file name in small letters without the ending of a compression that is read."""
    name = name.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return name


@contextmanager
def open_text(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file of text so that it reads as UTF-8, whatever its byte order mark.

    Raises `DataError` if there is a zero byte at its start, as in UTF-16 without a mark.
    """
    with open_file(path, source) as file:
        start = cast(io.BufferedReader, file).peek(HEAD_BYTES)
        encoding = encoding_of(start)
        if encoding != "utf-8":
            yield cast(BinaryIO, io.BufferedReader(Utf8Reader(file, encoding), CHUNK_BYTES))
            return
        zero = start[:HEAD_BYTES].find(b"\0")
        if zero >= 0:
            raise DataError(
                f"{path} has a zero byte at offset {zero}; expected UTF-8, or UTF-16 with a byte "
                "order mark"
            )
        yield file


def encoding_of(start: bytes) -> str:
    """Return the encoding that the byte order mark at the start of a text says, or utf-8."""
    for mark, encoding in MARKS:
        if start.startswith(mark):
            return encoding
    return "utf-8"


class Utf8Reader(io.RawIOBase):
    """Reads a file in another encoding as UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.rest = b""

    def readable(self) -> bool:
        """Return that the file can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with UTF-8; return the number of bytes, 0 at the end of the file."""
        ended = False
        while not self.rest and not ended:
            data = self.file.read(CHUNK_BYTES)
            ended = not data
            self.rest = self.decoder.decode(data, final=ended).encode()
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def text_chunks(path: Path) -> Iterator[str]:
    """Yield a text file as chunks of text, without the byte order mark."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=False)  # never splits \r\n
    with open_text(path, "text") as file:
        offset = 0
        ended = False
        while not ended:
            data = file.read(CHUNK_BYTES)
            offset += len(data)
            ended = not data
            if offset == len(data):
                data = data.removeprefix(codecs.BOM_UTF8)
            try:
                text = decoder.decode(data, final=ended)
            except UnicodeDecodeError as error:
                where = offset - len(error.object) + error.start
                raise DataError(
                    f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {where}"
                ) from None
            if text:
                yield text.replace("\r\n", "\n")


def separated_rows(path: Path, separator: str, first: int) -> Iterator[Row]:
    """Yield the texts of a file between separators as rows, from number `first` on."""
    number = 0
    rest = ""
    for chunk in text_chunks(path):
        searched = max(0, len(rest) - len(separator) + 1)
        rest += chunk
        if rest.find(separator, searched) < 0:
            continue
        *texts, rest = rest.split(separator)
        for text in texts:
            if number >= first:
                yield Row(number, text)
            number += 1
    if number >= first:
        yield Row(number, rest)


# --------------------------------------------------------------------------- JSON lines


def json_rows(path: Path, field: str, first: int) -> Iterator[Row]:
    """Yield the rows of JSON lines from number `first` on. Blank lines are not rows."""
    number = 0
    row = 0
    with open_text(path, "jsonl") as file:
        while line := file.readline(LONGEST_JSON_LINE + 1):
            number += 1
            where = f"line {number} of {path}"
            if len(line) > LONGEST_JSON_LINE:
                raise DataError(
                    f"{where} is longer than {LONGEST_JSON_LINE:,} bytes; write one object per line"
                )
            if line.isspace():
                continue
            if row >= first:
                yield Row(row, json_text(line, where, field))
            row += 1


def json_text(line: bytes, where: str, field: str) -> str:
    """Return the text of a line.

    Raises `DataError` if the line holds no text, `UserError` if the column is missing.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON: {error}; write one object per line, or set data.prepare.source "
            "to text"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f'{where} is {row!r:.50}; expected an object such as {{"{field}": "..."}}')
    return row_text(row, field, where)


def row_text(row: dict[str, Any], field: str, where: str) -> str:
    """Return the text in column `field` of a row, with Unix line ends."""
    check_column(field, where, row)
    value = row[field]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where} has {value!r:.50} in column {field}; expected text")
    return clean(value or "").replace("\r\n", "\n")


def check_column(field: str, where: object, columns: Iterable[str]) -> None:
    """Raise `UserError` if the column `field` is missing."""
    if field not in columns:
        raise UserError(
            f"data.prepare.text_field is {field!r}, but {where} has no such column, which every "
            f"row must have; set it to one of its columns: {', '.join(columns)}"
        )


# --------------------------------------------------------------------------- Parquet


def parquet_rows(path: Path, field: str, first: int) -> Iterator[Row]:
    """Yield the rows of a Parquet column from `first` on, skipping earlier row groups."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    # Open by path: Arrow's threads would need the interpreter for a Python file, even at its exit.
    with (
        open_file(path, "parquet"),
        ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as table,
    ):
        check_column(field, path, table.schema_arrow.names)
        number = 0
        group = 0
        while group < table.num_row_groups:
            rows = table.metadata.row_group(group).num_rows
            if number + rows > first:
                break
            number += rows
            group += 1
        for batch in table.iter_batches(
            batch_size=BATCH_ROWS,
            row_groups=range(group, table.num_row_groups),
            columns=[field],
            use_threads=False,
        ):
            kind = batch.column(0).type
            try:
                values = batch.column(0).cast(pa.large_binary())
            except pa.ArrowNotImplementedError:
                raise DataError(f"column {field} of {path} holds {kind}; expected text") from None
            for value in values:
                if number >= first:
                    text = (value.as_py() or b"").decode()
                    yield Row(number, text.replace("\r\n", "\n"))
                number += 1


# --------------------------------------------------------------------------- the Hub


def hub_rows(config: PrepareConfig, first: int, state: State | None) -> Iterator[Row]:
    """Stream the rows of a Hub data set from number `first` on.

    `state`: where to resume, at row `first` or earlier: {"row": number of the next row, "dataset":
    `state_dict` of the data set at that row}.
    """
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # importing torch takes 165 MB and a second
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
                where = f"row {number} of data set {config.dataset}"
                yield Row(number, row_text(row, config.text_field, where), state)
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
