"""Read the text of a config, after choosing its files."""

from collections.abc import Iterator

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare import documents as room
from accel_gpt.prepare.documents import Piece, Position
from accel_gpt.prepare.pieces import find_cut
from accel_gpt.prepare.readers import Skipped
from accel_gpt.prepare.sources import select, source_fingerprint


def read_pieces(
    config: PrepareConfig,
    cut_long: bool = True,
    start: Position | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Piece]:
    return room.split_pieces(
        config=config,
        files=select(config).files,
        find_cut=find_cut if cut_long else None,
        start=start or Position(),
        skipped=skipped or Skipped(config.skip_invalid),
    )


def read_texts(config: PrepareConfig) -> Iterator[str]:
    return room.documents(config, select(config).files)


def read_sample(config: PrepareConfig, size: int) -> Iterator[str]:
    return room.sample_texts(config, select(config).files, size)


def fingerprint(config: PrepareConfig) -> str:
    return source_fingerprint(config, select(config).files)


def text_bytes(config: PrepareConfig) -> int | None:
    return room.expected_bytes(config, select(config).files)
