"""Figures that are measured after a run, put into the records that it wrote.

Reads and rewrites `metrics.jsonl` and `metrics.csv`, each as a whole. The caller holds the lock of
the run's folder.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any

from accel_gpt.files import write_file
from accel_gpt.training.metrics import COLUMNS, Record, csv_line, read_lines, without_inf
from accel_gpt.untrusted import load_json


def merge_record(out_dir: Path, record: Record) -> None:
    """Add the figures of `record` to what `out_dir` holds of its step; other figures stay.

    A step of which nothing was told gets a record of its own, in its place among the others.
    """
    lines, rows = read_lines(out_dir / "metrics.jsonl"), read_rows(out_dir / "metrics.csv")
    lines = merged_lines(lines, record)
    rows = merged_rows(rows, record)
    write_file(out_dir / "metrics.jsonl", ["".join(lines).encode()])
    table = [csv_line(COLUMNS), *(csv_line([row.get(c, "") for c in COLUMNS]) for row in rows)]
    write_file(out_dir / "metrics.csv", ["".join(table).encode()])


def merged_lines(lines: list[str], record: Record) -> list[str]:
    """The lines of a metrics.jsonl with the figures of `record` in them."""
    finite = without_inf(record)
    step, numbers = int(record["step"]), [step_of(line) for line in lines]
    if step in numbers:
        at = len(numbers) - 1 - numbers[::-1].index(step)
        figures = {k: v for k, v in finite.items() if k not in ("tokens", "time")}
        whole: dict[str, Any] = load_json(lines[at]) | figures
        return [*lines[:at], json.dumps(whole) + "\n", *lines[at + 1 :]]
    at = sum(number is None or number < step for number in numbers)
    return [*lines[:at], json.dumps(finite) + "\n", *lines[at:]]


def step_of(line: str) -> int | None:
    """The step of a line of metrics.jsonl; None for a line that is not ours."""
    try:
        step = load_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv by column, of this version or an earlier one."""
    return [
        row
        for row in csv.DictReader(read_lines(path))
        if re.fullmatch("[0-9]{1,18}", row.get("step") or "")
    ]


def merged_rows(rows: list[dict[str, str]], record: Record) -> list[dict[str, str]]:
    """The rows of a metrics.csv with the figures of `record` in them."""
    step = int(record["step"])
    figures = {key: str(value) for key, value in record.items()}
    same = [row for row in rows if int(row["step"]) == step]
    if same:
        kept = {k: v for k, v in figures.items() if k not in ("step", "tokens", "time")}
        same[-1].update(kept)
        return rows
    at = sum(int(row["step"]) < step for row in rows)
    return [*rows[:at], figures, *rows[at:]]
