"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint."""

import sys
from pathlib import Path

from accel_gpt.commands.inspect_data import data_lines, inspect_data
from accel_gpt.commands.inspect_run import inspect_run, run_lines
from accel_gpt.commands.options import InspectCommand
from accel_gpt.config.data import DataConfig
from accel_gpt.console import write_out
from accel_gpt.errors import CheckpointError, DataError
from accel_gpt.files import strict_json

MARKS = ("checkpoints", "manifest.json", "trainer_state.json")  # of a run or a checkpoint


def run(options: InspectCommand) -> int:
    """Print a report, then its problems on stderr; 0 if there are none."""
    if any(Path(options.path, mark).exists() for mark in MARKS):
        report = inspect_run(Path(options.path), options.quick)
        lines = run_lines(report)
        code = CheckpointError.exit_code
    else:
        report = inspect_data(
            path=options.path,
            data=DataConfig(tokenizer=options.tokenizer),
            quick=options.quick,
            windows=options.windows,
            block_size=options.block_size,
        )
        lines = data_lines(report)
        code = DataError.exit_code
    if options.json:
        lines = [strict_json(report, indent=1)]
    write_out("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {problem}\n")
    return code if report["problems"] else 0
