"""`accel-gpt doctor RUN`: answer nine questions about a run, each with a figure and a verdict.

Reads the run's folder and its data. Writes only `statistics.json`, see health/text.py.
"""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from accel_gpt.commands.options import DoctorCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.console import write_out
from accel_gpt.health.case import Line
from accel_gpt.health.doctor import examine, verdict
from accel_gpt.report.runs import open_runs

NARROWEST = 40  # columns of the page
WIDEST = 120
INDENT = " " * 7  # the width of a verdict


def run(options: DoctorCommand) -> int:
    """Print the page of a run; return 0."""
    (found,) = open_runs([options.run])
    lines = examine(found)
    if options.json:
        report = {"run": options.run, "verdict": verdict(lines), "lines": [*map(asdict, lines)]}
        write_report(report, as_json=True)
    else:
        write_out("\n".join([f"{options.run}: {verdict(lines)}", *page(lines), ""]))
    return 0


def page(lines: Sequence[Line]) -> Iterator[str]:
    """Yield each line of the page, wrapped to the terminal: verdict, question, answer, advice."""
    width = max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
    for line in lines:
        compared = f"; beside: {line.compared}" if line.compared else ""
        answer = f"{line.verdict or '-':<6} {line.question} {line.figure}{compared}"
        yield from textwrap.wrap(answer, width, subsequent_indent=INDENT)
        if line.todo:
            yield from textwrap.wrap(
                f"-> {line.todo}", width, initial_indent=INDENT, subsequent_indent=INDENT
            )
