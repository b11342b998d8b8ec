"""Read the text of a config, after choosing its files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare import documents
from accel_gpt.prepare.documents import Piece, Position
from accel_gpt.prepare.pieces import find_cut
from accel_gpt.prepare.sources import select


def chosen(config: PrepareConfig) -> tuple[PrepareConfig, list[Path]]:
    selection = select(config)
    return replace(config, source=selection.source), selection.files


def read_pieces(config: PrepareConfig, start: Position | None = None) -> Iterator[Piece]:
    return documents.split_pieces(*chosen(config), find_cut, start or Position())


def read_texts(config: PrepareConfig) -> Iterator[str]:
    return documents.documents(*chosen(config))


def read_sample(config: PrepareConfig, size: int) -> Iterator[str]:
    return documents.sample_texts(*chosen(config), size)
