"""Read the text of a config, after selecting its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare import documents
from accel_gpt.prepare.documents import DocumentSource, Piece, Position
from accel_gpt.prepare.pieces import find_cut
from accel_gpt.prepare.sources import select


def no_chat(_: list[dict[str, Any]]) -> str:
    raise AssertionError("the text holds no chats")


def opened(config: PrepareConfig, whole: bool = False) -> list[DocumentSource]:
    return documents.open_selected(config, select(config).sources, no_chat, whole)[0]


def read_pieces(config: PrepareConfig, start: Position | None = None) -> Iterator[Piece]:
    return documents.read_pieces(opened(config), find_cut, start or Position())


def read_texts(config: PrepareConfig) -> Iterator[str]:
    return documents.all_texts(opened(config, whole=True))


def read_sample(config: PrepareConfig, size: int) -> Iterator[str]:
    return documents.sample_texts(opened(config, whole=True), size)


def read(path: Path | str, **more: Any) -> list[str]:
    """Return the documents of a source that have text."""
    return [text for text in read_texts(PrepareConfig(source=str(path), **more)) if text]
