"""Read texts from a column of files with rows, or of a data set of the Hub, with `datasets`.

`datasets` streams, and keeps nothing on disk. No code of a data set is executed.
"""

import glob
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from accel_gpt.data.tokenizer import clean
from accel_gpt.errors import AccelGPTError, DataError, UserError, one_line, require
from accel_gpt.prepare.sources import TextSource

BATCH_ROWS = 200  # rows that become Python objects at once
PARQUET_ROWS = 1000  # rows that are decoded at once


def load_library() -> Any:
    """Import `datasets`, without its progress bars and log."""
    import datasets
    import fsspec.compression
    import pandas as pd
    import pyarrow as pa

    warnings.filterwarnings("error", category=pd.errors.ParserWarning)  # of dropped cells
    datasets.config.TORCH_AVAILABLE = False  # importing torch takes 165 MB and a second
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised, too
    if "zstd" not in fsspec.compression.compr:  # it needs the package zstandard
        fsspec.compression.register_compression(
            "zstd", lambda file, mode=None, **_: pa.CompressedInputStream(file, "zstd"), "zst"
        )
    return datasets


def open_files(source: TextSource, field: str) -> Any:
    """Open files with rows of one of `ROW_KINDS` as one stream; see `cast_only` for `field`."""
    kind = source.kind
    options: dict[str, Any] = {}
    if kind in ("csv", "tsv"):
        # NA and 007 are text, and a row may not have more cells than the header
        options = {"keep_default_na": False, "index_col": False, "converters": {field: str}}
        options["sep"] = "\t" if kind == "tsv" else ","
    elif kind == "parquet":
        # the default is the size of the first row group, which may be 0
        options = {"batch_size": PARQUET_ROWS}
    builder = load_library().load_dataset_builder(
        "csv" if kind == "tsv" else kind,
        data_files={"train": [glob.escape(str(file)) for file in source.files]},
        **options,
    )
    data = builder.as_streaming_dataset(split="train")
    if kind not in ("json", "parquet", "arrow"):
        return data
    if not builder.info.features:
        builder.info.features = None  # the first file tells no types: cast nothing
        return data
    cast_only(builder, column_path(field, source.name, builder.info.features)[0])
    return builder.as_streaming_dataset(split="train")


def cast_only(builder: Any, column: str) -> None:
    """Let a builder cast one column alone to the type that it has in the first rows.

    `datasets` casts every column, and so refuses files that differ in columns which nobody reads.
    """
    library = load_library()
    cast = builder._cast_table
    kind = builder.info.features[column]
    if kind == library.Value("null"):
        kind = library.Value("string")
    builder.info.features = library.Features({column: kind})

    def cast_table(table: Any, **options: Any) -> Any:
        if column in table.column_names:
            return cast(table.select([column]), **options)
        return cast(table.from_pydict({column: [None] * len(table)}), **options)

    builder._cast_table = cast_table


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


def read_rows(source: TextSource, field: str, first: int) -> Iterator[tuple[int, int, Any]]:
    """Yield the values in a column from shard `first` on: shard, row in the shard, value.

    A shard is a file. A row without the column has the value None, but the first row must have it.
    """
    path: list[str] = []
    try:
        data = source.data
        if data is None:
            data = open_files(source, field)
        if columns := data.column_names:
            path = column_path(field, source.name, columns)
            data = data.select_columns(path[:1])
        for shard in range(first, data.num_shards):
            row = 0
            with closing(data.shard(data.num_shards, shard).iter(BATCH_ROWS)) as batches:
                for batch in batches:
                    path = path or column_path(field, source.name, batch)
                    count = len(next(iter(batch.values())))
                    for value in batch.get(path[0], [None] * count):
                        yield shard, row, inner_value(value, path[1:])
                        row += 1
    except AccelGPTError:
        raise
    except Exception as error:  # errors of datasets, pandas, pyarrow, fsspec and httpx
        raise DataError(f"{source.name} cannot be read: {one_line(error)}") from None


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


def as_text(value: Any) -> str:
    """Return the text of a value: a string, bytes of UTF-8, or strings in a list; null is empty.

    Raises `ValueError` for any other value.
    """
    if isinstance(value, list) and all(isinstance(part, str | None) for part in value):
        value = "\n\n".join(part for part in value if part)
    if isinstance(value, bytes):
        value = value.decode()
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r:.50}")
    text = clean(value or "")
    return text.replace("\r\n", "\n") if "\r" in text else text
