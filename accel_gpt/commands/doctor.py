"""`accel-gpt doctor RUN`: answer nine questions about a run, each with a figure and a verdict.

Reads the run's folder and its data. Writes only `statistics.json`, see health/text.py.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from accel_gpt.commands.options import DoctorCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.console import write_out
from accel_gpt.health.case import Line
from accel_gpt.health.doctor import examine, verdict
from accel_gpt.report.runs import open_runs

WIDTH = 78  # columns of the page


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
    """Yield the lines of the page: verdict, question, figure and comparison; what to do."""
    for line in lines:
        yield f"\n{line.verdict or '-':<6} {line.question}"
        yield from indented(line.figure)
        if line.compared:
            yield from indented(f"beside: {line.compared}")
        if line.todo:
            yield from indented(f"-> {line.todo}")


def indented(text: str) -> list[str]:
    """Wrap a text under its question."""
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 7, subsequent_indent=" " * 9)
