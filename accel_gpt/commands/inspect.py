"""`accel-gpt inspect PATH`: verify data or a checkpoint, or compare tokenizers on a text."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from accel_gpt.config.data import DataConfig
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import CheckpointError, DataError, not_negative, positive, require
from accel_gpt.redact import redact


@dataclass(frozen=True)
class InspectCommand:
    """Tell what data, a run or a checkpoint holds and verify it, or compare tokenizers on a text.

    Exit code 3 when data is damaged, 4 when a checkpoint is.
    """

    place: Annotated[str, tyro.conf.Positional] = ""
    """Data folder, of any project, or its URL; or folder of a run or of a checkpoint."""
    json: bool = False
    """One JSON object in place of text."""
    quick: bool = False
    """Read no shard and hash no checkpoint."""
    tokenizer: str | None = None
    """gpt2, bytes or the path of a tokenizer.json, for shards that do not say it."""
    windows: int = 2
    """First windows of each split that are shown as text."""
    block_size: int = 64
    """Tokens in a window."""
    text: str | None = None
    """File of UTF-8 text on which tokenizers are compared."""
    tokenizers: tuple[str, ...] = ()
    """For text: gpt2, bytes, tokenizer.json files, data folders; none: gpt2, bytes, PLACE's."""

    def __post_init__(self) -> None:
        require(bool(self.place or self.text), "PLACE or --text FILE missing; see --help")
        require(bool(self.text or not self.tokenizers), "--tokenizers needs --text FILE")
        not_negative("inspect", self, "windows")
        positive("inspect", self, "block_size")


def main(argv: Sequence[str]) -> int:
    """Print a report, then its problems on stderr; 0 when there are none."""
    options = parse_command(InspectCommand, argv, "accel-gpt inspect")
    from accel_gpt.commands.inspect_report import data_text, printable, tokenizers_text

    data, code, place = DataConfig(tokenizer=options.tokenizer), DataError.exit_code, options.place
    if options.text:
        from accel_gpt.commands.compare_tokenizers import compare

        specs = options.tokenizers or ("gpt2", "bytes", *filter(None, [place]))
        report, describe = compare(options.text, specs, data), tokenizers_text
    elif is_run(place):
        from accel_gpt.commands.inspect_run import inspect_run, run_text

        report, describe = inspect_run(place, options.quick), run_text
        code = CheckpointError.exit_code
    else:
        from accel_gpt.commands.inspect_data import inspect_data

        report = inspect_data(place, data, options.quick, options.windows, options.block_size)
        describe = data_text
    text = json.dumps(report, indent=1) + "\n" if options.json else describe(report)
    write_out(redact(text))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {redact(printable(problem))}\n")
    return code if report["problems"] else 0


def is_run(place: str) -> bool:
    """Whether a folder is a run's or a checkpoint's."""
    marks = ("checkpoints", "manifest.json", "trainer_state.json")
    return any(Path(place, mark).exists() for mark in marks)
