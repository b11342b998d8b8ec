"""`accel-gpt report RUN [RUN ...]`: curves, samples and configs of runs as one HTML file.

Reads `metrics.jsonl`, `run.json`, `config.yaml` and `samples/` of each run, also while it trains;
writes nothing there but `report.html`. Needs no torch.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel_gpt.config.checks import Positional
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.report.page import build_page
from accel_gpt.report.payload import payload
from accel_gpt.report.plots import draw_plots
from accel_gpt.report.references import find_reference
from accel_gpt.report.runs import NamedRun, open_runs

CHUNK = 10_000  # rows of the CSV file that are put together at once


@dataclass(frozen=True)
class ReportCommand:
    """Write curves, samples and configs of runs as one HTML file, which needs no network.

    Works while a run is training. The runs may be anybody's: all that is in them is shown as text.
    Examples:
      accel-gpt report runs/quickstart
      accel-gpt report runs/a runs/b --out compared.html
      accel-gpt report runs/quickstart --png plots --csv metrics.csv
    """

    run: Positional[tuple[str, ...]]
    """Folders of runs."""
    out: str | None = None
    """HTML file; null: report.html in the run, or for several runs in the current folder."""
    reference: str = "auto"
    """Grey curve to compare with: a name in configs/references, a .json file, or none; auto: the
    one for the same model, vocabulary and data."""
    png: str | None = None
    """Folder for a PNG file of each plot."""
    csv: str | None = None
    """CSV file for all metrics of all runs."""


def main(argv: Sequence[str]) -> int:
    """Write a page with curves, samples and configs of runs."""
    write_out(report(parse_command(ReportCommand, argv, "accel-gpt report")))
    return 0


def report(options: ReportCommand) -> str:
    """Write the files that are requested; returns a line for each.

    Raises `UserError` for a folder that is not a run, an unknown reference, and a file that cannot
    be written.
    """
    runs = open_runs(options.run)
    for path in filter(None, (options.out, options.csv)):
        own = not path.endswith(".html") and (Path(path).parent / "run.json").exists()
        require(not (own and Path(path).exists()), f"{path} is a file of a run; name another one")
    reference = find_reference(options.reference, runs)
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    out = Path(options.out) if options.out else default
    page = build_page(runs, reference).encode(errors="replace")
    lines = [f"report     {out} ({len(page) / 1e6:.2f} MB)"]
    lines += [f"           {run.name}: {run.status}" for run in runs if run.running]
    if reference:
        lines.append(f"reference  {reference['name']}: {reference['title']}")
    try:
        write_file(out, [page])
        if options.csv:
            write_csv(runs, Path(options.csv))
            lines.append(f"metrics    {options.csv}")
        if options.png:
            Path(options.png).mkdir(parents=True, exist_ok=True)
            drawn = draw_plots(payload(runs, reference), Path(options.png))
            lines.append(f"plots      {options.png} ({', '.join(drawn)})")
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return "".join(f"{line}\n" for line in lines)


def write_csv(runs: Sequence[NamedRun], path: Path) -> None:
    """Write every record of all runs: a column for the run, then one for each key."""
    keys = list(dict.fromkeys(key for run in runs for key in run.metrics.keys("")))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", "tokens", "time", *map(escape_formula, keys)])
        for run in runs:
            metrics, name = run.metrics, escape_formula(run.name)
            clocks = np.stack([metrics.steps, metrics.tokens, metrics.seconds], axis=1)
            for start in range(0, len(clocks), CHUNK):
                end = min(start + CHUNK, len(clocks))
                table = np.full((end - start, 3 + len(keys)), np.nan)
                table[:, :3] = clocks[start:end]
                for i, key in enumerate(keys, start=3):
                    if key in metrics.columns:
                        rows, values = metrics.columns[key]
                        part = slice(*np.searchsorted(rows, (start, end)))
                        table[rows[part] - start, i] = values[part]
                writer.writerows([name, *map(format_number, row)] for row in table.tolist())


def format_number(value: float) -> str:
    """A number with all its digits; an empty text for what is not finite."""
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value == int(value) else repr(value)


def escape_formula(name: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name
