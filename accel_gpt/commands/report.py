"""`accel-gpt report RUN [RUN ...]`: write curves, samples and configs of runs as HTML.

Reads the folder of each run, also while it trains, and what `accel-gpt doctor` reads. Writes
`report.html`, and `statistics.json` as `accel-gpt doctor` does.
"""

from pathlib import Path

from accel_gpt.commands.options import ReportCommand
from accel_gpt.console import write_err, write_out
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import write_file
from accel_gpt.health.case import Line
from accel_gpt.health.doctor import examine
from accel_gpt.report.machines import summary
from accel_gpt.report.page import build_page
from accel_gpt.report.runs import NamedRun, open_runs


def run(options: ReportCommand) -> int:
    """Write the page and print its path. Raises `UserError` for a folder that is not a run."""
    runs = open_runs(options.run)
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    out = Path(options.out) if options.out else default
    health = [health_of(run) for run in runs]
    page = build_page(runs, health).encode(errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, [page])
    write_out(f"report     {out} ({len(page) / 1e6:.2f} MB)\n")
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        sums = summary(run)
        if sums:
            write_out(f"machines   {name}{sums}\n")
        if run.running:
            write_out(f"           {run.name}: {run.status}\n")
    return 0


def health_of(run: NamedRun) -> list[Line]:
    """Return the lines of the doctor; none, and a line on stderr, if the config cannot be read."""
    try:
        return examine(run)
    except AccelGPTError as error:
        write_err(f"the health of {run.name} is not known: {error}")
        return []
