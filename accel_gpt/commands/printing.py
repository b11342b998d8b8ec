"""Print the report of a command: as JSON, or as a table with the same names and values."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from accel_gpt.console import table, write_out
from accel_gpt.files import strict_json


def write_report(report: Mapping[str, Any], as_json: bool) -> None:
    """Print a report to standard output; see above."""
    if as_json:
        write_out(f"{strict_json(report, indent=1)}\n")
    else:
        write_out(table([*report_rows(report, "")], "<", "<"))
    sys.stdout.flush()  # before what follows on standard error


def report_rows(report: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    """Yield a row for each value of a report: its name, indented by its depth, and its text."""
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield indent + name, ""
            yield from report_rows(value, indent + "  ")
        elif isinstance(value, list):
            yield indent + name, ", ".join(map(format_value, value)) or "none"
        else:
            yield indent + name, format_value(value)


def format_value(value: object) -> str:
    """Format a value of a report in one line."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        whole = isinstance(value, int) or abs(value) >= 1e4
        return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.5g}"
    text = str(value)
    return text if text.isprintable() else repr(text)
