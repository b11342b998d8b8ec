"""`accel-gpt export RUN --to DIR`: a model as a folder that transformers opens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_gpt.config.options import REQUIRED, option
from accel_gpt.config.parse import parse_command
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.errors import require


@dataclass(frozen=True)
class ExportCommand:
    """Write a model as a folder that `transformers` opens, and prove that it computes the same.

    Examples:
      accel-gpt export runs/quickstart --to exported
      accel-gpt export runs/quickstart --to exported --checkpoint best --overwrite
      accel-gpt export runs/quickstart --to exported --dtype bf16
    """

    run: str = option(
        REQUIRED,
        "Folder of a run, of one checkpoint, or in transformers format; or a Hub id.",
        positional=True,
    )
    to: str = option(
        "",
        "Folder to make.",
    )
    checkpoint: str = option(
        "last",
        "Of a run: last, best, or a step.",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Of the weights.",
    )
    overwrite: bool = option(
        False,
        "Replace an exported model that is at `to`.",
    )

    def __post_init__(self) -> None:
        require(bool(self.to), "--to is missing; give the folder to make")


def main(argv: Sequence[str]) -> int:
    """Write a folder for transformers; exit code 4 where it computes something else."""
    options = parse_command(ExportCommand, argv, "accel-gpt export")
    exit_on_sigterm()
    write_out(export_model(options))
    return 0


def export_model(options: ExportCommand) -> str:
    """Write the folder; returns what it holds, in words."""
    from accel_gpt.hub.export import export

    to = Path(options.to)
    exported = export(
        name=options.run,
        to=to,
        checkpoint=options.checkpoint,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    return exported.describe(to)
