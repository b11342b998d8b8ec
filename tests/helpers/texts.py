"""Read the text of a config, after selecting its files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare import documents
from accel_gpt.prepare.documents import BEGINNING, Piece, Position
from accel_gpt.prepare.sources import TextSource, select


def no_chat(_: list[dict[str, Any]]) -> str:
    raise AssertionError("the text holds no chats")


def opened(config: PrepareConfig) -> list[TextSource]:
    return documents.open_data_sets(config, select(config)[0])[0]


def read_pieces(config: PrepareConfig, start: Position = BEGINNING) -> Iterator[Piece]:
    return documents.read_pieces(config, opened(config), no_chat, start=start)


def read_texts(config: PrepareConfig) -> Iterator[str]:
    """Yield the texts of all sources; none is cut into splits."""
    sources = [replace(source, split="train") for source in opened(config)]
    for piece in documents.read_pieces(config, sources, no_chat):
        yield piece.text


def read(path: Path | str, **more: Any) -> list[str]:
    """Return the documents of a source that have text."""
    return [text for text in read_texts(PrepareConfig(source=str(path), **more)) if text]
