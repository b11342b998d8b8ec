"""`accel-gpt inspect PATH`: verify data or a checkpoint, or compare tokenizers on a text."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from accel_gpt.config.data import DataConfig
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import CheckpointError, DataError, not_negative, positive, require
from accel_gpt.redact import redact

MARKS = ("checkpoints", "manifest.json", "trainer_state.json")  # of a run or a checkpoint


@dataclass(frozen=True)
class InspectCommand:
    """Show and verify what data, a run or a checkpoint holds, or compare tokenizers on a text.

    Exit code 3 when data is damaged, 4 when a checkpoint is.
    """

    path: Annotated[str, tyro.conf.Positional] = ""
    """Data folder, of any project, or its URL; or folder of a run or of a checkpoint."""
    json: bool = False
    """One JSON object in place of text."""
    quick: bool = False
    """Read no shard and hash no checkpoint."""
    tokenizer: str | None = None
    """gpt2, bytes or the path of a tokenizer.json, for shards that do not name theirs."""
    windows: int = 2
    """First sequences of each split that are shown as text."""
    block_size: int = 64
    """Tokens in such a sequence."""
    text: str | None = None
    """File of UTF-8 text on which tokenizers are compared."""
    tokenizers: tuple[str, ...] = ()
    """For text: gpt2, bytes, tokenizer.json files, data folders; none: gpt2, bytes, PATH's."""

    def __post_init__(self) -> None:
        require(bool(self.path or self.text), "PATH or --text FILE missing; see --help")
        require(bool(self.text or not self.tokenizers), "--tokenizers needs --text FILE")
        not_negative("inspect", self, "windows")
        positive("inspect", self, "block_size")


def main(argv: Sequence[str]) -> int:
    """Print a report, then its problems on stderr; 0 when there are none."""
    options = parse_command(InspectCommand, argv, "accel-gpt inspect")
    data, code, path = DataConfig(tokenizer=options.tokenizer), DataError.exit_code, options.path
    if options.text:
        from accel_gpt.commands.compare_tokenizers import compare

        specs = options.tokenizers or ("gpt2", "bytes", *filter(None, [path]))
        report, describe = compare(options.text, specs, data), tokenizer_lines
    elif any(Path(path, mark).exists() for mark in MARKS):
        from accel_gpt.commands.inspect_run import inspect_run, run_lines

        report, describe = inspect_run(Path(path), options.quick), run_lines
        code = CheckpointError.exit_code
    else:
        from accel_gpt.commands.inspect_data import data_lines, inspect_data

        report = inspect_data(path, data, options.quick, options.windows, options.block_size)
        describe = data_lines
    lines = json.dumps(report, indent=1).splitlines() if options.json else describe(report)
    write_out("".join(f"{redact(on_one_line(line))}\n" for line in lines))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {redact(on_one_line(problem))}\n")
    return code if report["problems"] else 0


def on_one_line(text: str) -> str:
    """`text` with control and formatting characters escaped: names in files may hold any."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def tokenizer_lines(report: dict[str, Any]) -> list[str]:
    """The report of `compare` for people."""
    return [
        f"{report['text']}: {report['bytes']:,} bytes",
        f"{'tokenizer':<24} {'vocabulary':>10} {'tokens':>13} {'tokens/byte':>11} "
        f"{'bytes/token':>11} {'1-byte share':>12} {'MB/s':>8}  round trip",
        *(
            f"{row['tokenizer']:<24} {row['vocab_size']:>10,} {row['tokens']:>13,} "
            f"{row['tokens_per_byte']:>11.4f} {row['bytes_per_token']:>11.3f} "
            f"{row['single_byte_share']:>12.2%} {row['mb_per_s']:>8.1f}  "
            f"{'yes' if row['round_trip'] else 'no'}"
            for row in report["tokenizers"]
        ),
    ]
