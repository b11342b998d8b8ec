"""Read the index of a data folder: dataset.json, which `prepare/` writes.

The index holds the tokenizer, the vocabulary size, the settings of `data.prepare` and the shards.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_gpt.errors import DataError, UserError
from accel_gpt.files import TOKEN_ENDINGS
from accel_gpt.json_files import Count, Size, convert_json, read_json_object

INDEX = "dataset.json"
DATA_MARKS = (INDEX, *(f"*{ending}" for ending in TOKEN_ENDINGS))  # a data folder holds one of them
FORMAT = "accel_gpt-dataset"
VERSION = 1
ADVICE = "prepare the data again"
SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer that encoded the shards."""

    kind: str
    fingerprint: str


@dataclass(frozen=True)
class ShardEntry:
    """One shard file, as the index describes it."""

    name: str
    tokens: Size
    documents: Count  # that begin in the shard
    bytes: Count  # UTF-8 bytes of these documents
    sha256: str  # of the file, hex
    max_token: Count


@dataclass(frozen=True)
class Index:
    """The content of dataset.json."""

    format: str
    version: int
    tokenizer: TokenizerEntry
    eot_id: Count | None
    splits: dict[str, list[ShardEntry]]
    vocab_size: Size
    prepared: dict[str, Any] = field(default_factory=dict)
    """The settings of `data.prepare`, and a fingerprint of the text."""


def read_index(folder: Path) -> Index:
    """Read the index of a data folder.

    Raises `UserError` if there is no folder, `DataError` if its index is missing, is damaged or
    has another version.
    """
    check_folder(folder)
    where = folder / INDEX
    if not where.exists():
        raise DataError(
            f"{folder} has no {INDEX}, so it is not a prepared data folder; run accel-gpt prepare"
        )
    content = read_json_object(where, DataError, ADVICE)
    check_version(where, content)
    index = convert_json(Index, content, where, DataError, ADVICE)
    for shards in index.splits.values():
        for shard in shards:
            check_shard_name(where, shard.name)
    return index


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless `folder` is a folder."""
    if not folder.exists():
        raise UserError(f"data folder {folder} does not exist; accel-gpt prepare makes it")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of token shards; accel-gpt prepare makes one")


def check_version(where: Path, content: Mapping[str, Any]) -> None:
    """Raise `DataError` unless the file is an index of the version that this code reads."""
    if content.get("format") != FORMAT:
        raise DataError(
            f"{where} is not an index of accel_gpt: its format is not {FORMAT!r}; {ADVICE}"
        )
    version = content.get("version")
    if version != VERSION:
        raise DataError(
            f"{where} has format version {version}; this version of accel_gpt reads {VERSION}: "
            "update accel_gpt, or prepare the data again"
        )


def is_shard_name(name: str) -> bool:
    """Return whether a name is a plain file name, not a path to another folder."""
    return SHARD_NAME.fullmatch(name) is not None


def check_shard_name(where: Path, name: str) -> None:
    """Raise `DataError` if the name of a shard could lead to another folder."""
    if not is_shard_name(name):
        raise DataError(
            f"{where} names a shard {name[:100]!r}; expected a file name of letters, digits, '.', "
            f"'_' and '-'; {ADVICE}"
        )
