"""`accel-gpt report RUN [RUN ...]`: curves, samples and configs of runs as one HTML file.

Reads `metrics.jsonl`, `run.json`, `config.yaml` and `samples/` of each, also while a run is
writing; changes nothing there but `report.html`. No torch.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_gpt.config.options import ReportCommand
from accel_gpt.errors import UserError
from accel_gpt.files import write_file
from accel_gpt.report.page import build_page
from accel_gpt.report.references import find_reference, write_reference
from accel_gpt.report.run_folder import RunFolder, open_runs

FIRST = ("step", "tokens", "time")


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
