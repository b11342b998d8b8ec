"""`accel-gpt report RUN [RUN ...]`: curves, samples and configs of runs as one HTML file.

Reads `metrics.jsonl`, `run.json`, `config.yaml` and `samples/` of each, also while a run is
writing; changes nothing there but `report.html`. No torch.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.report.page import build_page
from accel_gpt.report.references import find_reference, write_reference
from accel_gpt.report.run_folder import RunFolder, open_runs

FIRST = ("step", "tokens", "time")


@dataclass(frozen=True)
class ReportCommand:
    """Write curves, samples and configs of runs as one HTML file, which needs no network.

    Works while a run is writing. What lies in the runs may be of anybody: it is shown as text.
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: str | None = None
    """HTML file; null: report.html in the run, of several runs in the current folder."""
    reference: str = "auto"
    """Curve drawn grey behind: a name in configs/references, a .json file, or none; auto: the one
    for the same model and vocabulary, and the same data or config name."""
    png: str | None = None
    """Folder for each plot as a picture."""
    csv: str | None = None
    """File for all figures of all runs."""
    as_reference: str | None = None
    """JSON file for the val losses of the run, which must be finished, as a reference."""

    def __post_init__(self) -> None:
        require(bool(self.run), "RUN missing; see --help")
        require(len(self.run) == 1 or not self.as_reference, "--as_reference takes one run alone")


def main(argv: Sequence[str]) -> int:
    """Write a page with curves, samples and configs of runs."""
    runs: list[str] = []
    rest: list[str] = []
    for number, word in enumerate(argv):
        option = number > 0 and argv[number - 1].startswith("--") and "=" not in argv[number - 1]
        (rest if word.startswith("-") or option else runs).append(word)
    options = parse_command(ReportCommand, [*runs[:1], *rest], "accel-gpt report")
    write_out(report(replace(options, run=tuple(runs))))
    return 0


def report(asked: ReportCommand) -> str:
    """Write what was asked for; what was written, as text.

    Raises `UserError` for a folder that is no run, an unknown reference, and a place where nothing
    can be written.
    """
    runs = open_runs(asked.run)
    reference = find_reference(asked.reference, runs)
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    out = Path(asked.out) if asked.out else default
    page = build_page(runs, reference).encode(errors="replace")
    told = [f"report     {out} ({len(page) / 1e6:.2f} MB)"]
    told += [f"           {run.name} is {run.status}" for run in runs if run.writing]
    if reference:
        told.append(f"reference  {reference['name']}: {reference['title']}")
    try:
        write_file(out, [page])
        if asked.csv:
            write_csv(runs, Path(asked.csv))
            told.append(f"figures    {asked.csv}")
        if asked.png:
            from accel_gpt.report.pictures import draw_all

            Path(asked.png).mkdir(parents=True, exist_ok=True)
            drawn = draw_all(runs, Path(asked.png), reference)
            told.append(f"plots      {asked.png} ({', '.join(drawn)})")
        if asked.as_reference:
            write_reference(runs[0], Path(asked.as_reference))
            told.append(f"curve      {asked.as_reference}")
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return "".join(f"{line}\n" for line in told)


def write_csv(runs: Sequence[RunFolder], path: Path) -> None:
    """Every record of all runs: a column for the run, then one for each key."""
    keys = list(dict.fromkeys(key for run in runs for key in sorted(run.figures.columns)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *FIRST, *map(harmless, keys)])
        for run in runs:
            writer.writerows(rows(run, keys))


def rows(run: RunFolder, keys: Sequence[str]) -> Iterator[list[str]]:
    """The records of a run as rows, empty where a key was not recorded."""
    figures, name = run.figures, harmless(run.name)
    clocks = zip(figures.steps, figures.tokens, figures.seconds, strict=True)
    columns = [figures.columns.get(key) for key in keys]
    place = [0] * len(keys)
    for number, clock in enumerate(clocks):
        row = [name, *(spelled(float(value)) for value in clock)]
        for i, column in enumerate(columns):
            row.append("")
            if column and place[i] < len(column[0]) and column[0][place[i]] == number:
                row[-1] = spelled(float(column[1][place[i]]))
                place[i] += 1
        yield row


def spelled(value: float) -> str:
    """A number with all its digits; nothing for what is not known."""
    if value != value:
        return ""
    return str(int(value)) if value == int(value) else repr(value)


def harmless(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name
