"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_gpt.config.data import DataConfig
from accel_gpt.config.options import REQUIRED, Section, option
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import CheckpointError, DataError
from accel_gpt.files import strict_json

MARKS = ("checkpoints", "manifest.json", "trainer_state.json")  # of a run or a checkpoint


@dataclass(frozen=True)
class InspectCommand(Section, prefix="inspect."):
    """Show and verify what data, a run or a checkpoint holds.

    Exit code 3 when data is damaged, 4 when a checkpoint is. Examples:
      accel-gpt inspect data/stdlib_bpe4096
      accel-gpt inspect runs/quickstart --quick
      accel-gpt inspect runs/quickstart/checkpoints/step_00001000 --json
    """

    path: str = option(
        REQUIRED,
        "Data folder, of any project, or its URL; or folder of a run or of a checkpoint.",
        positional=True,
    )
    json: bool = option(
        False,
        "One JSON object in place of text.",
    )
    quick: bool = option(
        False,
        "Read no shard and hash no checkpoint.",
    )
    tokenizer: str | None = option(
        None,
        "gpt2, bytes or the path of a tokenizer.json, for shards that do not name theirs.",
    )
    windows: int = option(
        2,
        "First sequences of each split that are shown as text.",
        at_least=0,
    )
    block_size: int = option(
        64,
        "Tokens in such a sequence.",
        above=0,
    )


def main(argv: Sequence[str]) -> int:
    """Print a report, then its problems on stderr; 0 when there are none."""
    options = parse_command(InspectCommand, argv, "accel-gpt inspect")
    data, code, path = DataConfig(tokenizer=options.tokenizer), DataError.exit_code, options.path
    if any(Path(path, mark).exists() for mark in MARKS):
        from accel_gpt.commands.inspect_run import inspect_run, run_lines

        report, describe = inspect_run(Path(path), options.quick), run_lines
        code = CheckpointError.exit_code
    else:
        from accel_gpt.commands.inspect_data import data_lines, inspect_data

        report = inspect_data(path, data, options.quick, options.windows, options.block_size)
        describe = data_lines
    lines = strict_json(report, indent=1).splitlines() if options.json else describe(report)
    write_out("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {problem}\n")
    return code if report["problems"] else 0
