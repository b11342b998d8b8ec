"""`accel-gpt inspect PATH`: verify data or a checkpoint, or compare tokenizers on a text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.config.checks import NotNegative, Positional, Positive, Section
from accel_gpt.config.data import DataConfig
from accel_gpt.config.parse import parse_command
from accel_gpt.console import table, write_out
from accel_gpt.errors import CheckpointError, DataError, require
from accel_gpt.files import strict_json
from accel_gpt.redact import redact

MARKS = ("checkpoints", "manifest.json", "trainer_state.json")  # of a run or a checkpoint


@dataclass(frozen=True)
class InspectCommand(Section, prefix="inspect."):
    """Show and verify what data, a run or a checkpoint holds, or compare tokenizers on a text.

    Exit code 3 when data is damaged, 4 when a checkpoint is. Examples:
      accel-gpt inspect data/stdlib_bpe4096
      accel-gpt inspect runs/quickstart --quick
      accel-gpt inspect --text notes.txt --tokenizers gpt2,data/stdlib_bpe4096
    """

    path: Positional[str] = ""
    """Data folder, of any project, or its URL; or folder of a run or of a checkpoint."""
    json: bool = False
    """One JSON object in place of text."""
    quick: bool = False
    """Read no shard and hash no checkpoint."""
    tokenizer: str | None = None
    """gpt2, bytes or the path of a tokenizer.json, for shards that do not name theirs."""
    windows: NotNegative[int] = 2
    """First sequences of each split that are shown as text."""
    block_size: Positive[int] = 64
    """Tokens in such a sequence."""
    text: str | None = None
    """File of UTF-8 text on which tokenizers are compared."""
    tokenizers: tuple[str, ...] = ()
    """For text: gpt2, bytes, tokenizer.json files, data folders; none: gpt2, bytes, PATH's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path or self.text), "PATH or --text FILE missing; see --help")
        require(bool(self.text or not self.tokenizers), "--tokenizers needs --text FILE")


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
    lines = strict_json(report, indent=1).splitlines() if options.json else describe(report)
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
    columns = ["tokens/byte", "bytes/token", "1-byte share", "MB/s", "round trip"]
    rows = [["tokenizer", "vocabulary", "tokens", *columns]]
    for row in report["tokenizers"]:
        rows.append(
            [
                row["tokenizer"],
                f"{row['vocab_size']:,}",
                f"{row['tokens']:,}",
                f"{row['tokens_per_byte']:.4f}",
                f"{row['bytes_per_token']:.3f}",
                f"{row['single_byte_share']:.2%}",
                f"{row['mb_per_s']:.1f}",
                "yes" if row["round_trip"] else "no",
            ]
        )
    lines = table(rows, "<0", *[">0"] * 6, "<0").splitlines()
    return [f"{report['text']}: {report['bytes']:,} bytes", *lines]
