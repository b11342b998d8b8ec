"""Read the index of a data folder: dataset.json, which `prepare/` writes.

The index holds the tokenizer, the vocabulary size, the settings of `data.prepare` and the shards.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from accel_gpt.errors import DataError, require
from accel_gpt.json_files import Count, Size, load_json_as

INDEX = "dataset.json"
FORMAT = "accel_gpt-dataset"
VERSION = 1
SHARD_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}\Z"  # no path to another folder


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer that encoded the shards."""

    kind: str
    fingerprint: str


@dataclass(frozen=True)
class ShardEntry:
    """One shard file, as the index describes it."""

    name: Annotated[str, msgspec.Meta(pattern=SHARD_NAME)]
    tokens: Size
    documents: Count  # that begin in the shard
    bytes: Count  # UTF-8 bytes of these documents
    sha256: str  # of the file, hex
    max_token: Count


@dataclass(frozen=True)
class Index:
    """The content of dataset.json."""

    format: Literal["accel_gpt-dataset"]
    version: Literal[1]
    tokenizer: TokenizerEntry
    eot_id: Count | None
    splits: dict[str, list[ShardEntry]]
    vocab_size: Size
    prepared: dict[str, Any] = field(default_factory=dict)
    """The settings of `data.prepare`, and a fingerprint of the text."""


def read_index(folder: Path) -> Index:
    """Read the index of a data folder.

    Raises `UserError` if there is no folder, `DataError` if its index is missing or not as `Index`
    says.
    """
    check_folder(folder)
    where = folder / INDEX
    if not where.exists():
        raise DataError(
            f"{folder} has no {INDEX}, so it is not a prepared data folder; run accel-gpt prepare"
        )
    return load_json_as(Index, where, DataError)


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless `folder` is a folder."""
    require(
        folder.is_dir(),
        f"data folder {folder} does not exist; expected token shards, as accel-gpt prepare makes",
    )


def is_shard_name(name: str) -> bool:
    """Return whether a name is a plain file name, not a path to another folder."""
    return re.match(SHARD_NAME, name) is not None
