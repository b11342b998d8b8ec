"""`accel-gpt export RUN --to DIR`: a model as a folder that transformers opens."""

from pathlib import Path

from accel_gpt.commands.options import ExportCommand
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.hub.export import export


def run(options: ExportCommand) -> int:
    """Write a folder for transformers; exit code 4 if it computes something else."""
    exit_on_sigterm()
    write_out(export_model(options))
    return 0


def export_model(options: ExportCommand) -> str:
    """Write the folder; returns what it holds, in words."""
    to = Path(options.to)
    exported = export(
        name=options.run,
        to=to,
        checkpoint=options.checkpoint,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    return exported.describe(to)
