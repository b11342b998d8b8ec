"""Read texts from a column of files with rows, or of a data set of the Hub, with `datasets`.

`datasets` streams: nothing is kept on disk, and a state resumes at a row. No code of a data set is
executed.
"""

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import AccelGPTError, DataError, UserError, one_line, require

State = dict[str, Any]

STATE_ROWS = 1000  # rows between two states; a resume repeats at most this many
# Ending of a file with rows -> its kind, the builder of `datasets` except for tsv
ROW_KINDS: Mapping[str, str] = MappingProxyType(
    {
        ".json": "json",
        ".jsonl": "json",
        ".ndjson": "json",
        ".csv": "csv",
        ".tsv": "tsv",
        ".parquet": "parquet",
        ".arrow": "arrow",
        ".tar": "webdataset",
    }
)


class Row(NamedTuple):
    """A value in the column of the text."""

    number: int
    value: Any
    state: State | None
    """The state from which `datasets` resumes, at this row or an earlier row; see `read_rows()`."""


def load_library() -> Any:
    """Import `datasets`, without its progress bars."""
    import datasets
    import fsspec.compression
    import pyarrow as pa

    datasets.config.TORCH_AVAILABLE = False  # importing torch takes 165 MB and a second
    datasets.disable_progress_bars()
    if "zstd" not in fsspec.compression.compr:  # it needs the package zstandard
        fsspec.compression.register_compression(
            "zstd", lambda file, mode=None, **_: pa.CompressedInputStream(file, "zstd"), "zst"
        )
    return datasets


def open_files(kind: str, files: Iterable[Path]) -> Any:
    """Open files with rows of one of `ROW_KINDS` as one stream."""
    options: dict[str, Any] = {}
    if kind in ("csv", "tsv"):
        options = {"keep_default_na": False, "sep": "\t" if kind == "tsv" else ","}  # NA is text
    return load_library().load_dataset(
        "csv" if kind == "tsv" else kind,
        data_files={"train": [glob.escape(str(file)) for file in files]},
        split="train",
        streaming=True,
        **options,
    )


def open_hub(name: str, subset: str | None) -> dict[str, Any]:
    """Open the splits of a data set of the Hub, by name.

    Raises `UserError` if it cannot be read.
    """
    library = load_library()
    try:
        return dict(library.load_dataset(name, subset, streaming=True))
    except Exception as error:  # errors of datasets, fsspec, huggingface_hub and httpx
        raise UserError(
            f"data set {name} (config {subset}) cannot be read from the Hub: {one_line(error)}"
        ) from None


def read_rows(
    open_data: Callable[[], Any], where: str, field: str, first: int, state: State | None
) -> Iterator[Row]:
    """Yield the values in a column from row number `first` on; the first row is number 0.

    `state`: where to resume, at row `first` or earlier: {"row": number of the next row, "dataset":
    `state_dict` of the data set at that row}. `where` names the data in errors. A row without the
    column has the value None, but the first one must have it.
    """
    path = field.split(".")
    start = 0
    try:
        data = open_data()
        columns = data.column_names
        if columns:
            path = column_path(field, where, columns)
            data = data.select_columns(path[:1])
        if state is not None:
            data.load_state_dict(state["dataset"])
            start = state["row"]
        with closing(iter(data)) as rows:
            for number, row in enumerate(rows, start):
                if number == start:
                    path = column_path(field, where, row)
                if number >= first:
                    yield Row(number, inner_value(row, path), state)
                if (number + 1) % STATE_ROWS == 0:
                    state = {"row": number + 1, "dataset": data.state_dict()}
    except AccelGPTError:
        raise
    except Exception as error:  # errors of datasets, pandas, pyarrow, fsspec and httpx
        raise DataError(f"{where} cannot be read: {one_line(error)}") from None


def column_path(field: str, where: str, columns: Iterable[str]) -> list[str]:
    """Return the names that lead to the text of a row; raise `UserError` if the first is missing.

    A column may have a dot in its name.
    """
    path = [field] if field in columns else field.split(".")
    require(
        path[0] in columns,
        f"data.prepare.text_field is {field}, but {where} has no such column; expected one of "
        f"{', '.join(columns)}",
    )
    return path


def inner_value(value: Any, path: list[str]) -> Any:
    """Return the value at a path of names; from a list, the values of its items."""
    for number, name in enumerate(path):
        if isinstance(value, list):
            return [inner_value(item, path[number:]) for item in value]
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns, each with a role and a content."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value)
    )


def as_text(value: Any, where: str, field: str) -> str:
    """Return the text of a value: a string, bytes of UTF-8, or strings in a list; null is empty."""
    if isinstance(value, list) and all(isinstance(part, str | None) for part in value):
        value = "\n\n".join(part for part in value if part)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 in column {field}: {error}") from None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where} has {value!r:.50} in column {field}; expected text")
    return clean(value or "").replace("\r\n", "\n")
