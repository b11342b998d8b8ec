"""Answer nine questions about a run: is it healthy?

    Case            what is known of the run, in case.py
    learning.py     counting, leak, fit, curve, rates
    keeping.py      data, machine, kill, identity

Each answer has a figure, what it is compared with, and a verdict. A verdict has a bound with a
source, or one that benchmarks/doctor.py measured.
"""

from collections.abc import Sequence

import numpy as np

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_given
from accel_gpt.config.values import build
from accel_gpt.errors import require
from accel_gpt.health.case import Case, Line
from accel_gpt.health.keeping import data, identity, kill, machine
from accel_gpt.health.learning import counting, curve, fit, leak, rates
from accel_gpt.report.runs import NamedRun

CHECKS = (counting, leak, fit, curve, rates, data, machine, kill, identity)


def examine(run: NamedRun) -> list[Line]:
    """Return one line for each question about a run, with the config of its last launch.

    Executes no file of --code. Raises `UserError` if the run has no config.
    """
    file = run.path / "config.yaml"
    require(file.is_file(), f"{run.path} has no config.yaml")
    case = Case(run, build(Config, read_given([str(file)], "accel-gpt doctor")))
    with np.errstate(all="ignore"):  # records that were edited may hold any numbers
        return [check(case) for check in CHECKS]


def verdict(lines: Sequence[Line]) -> str:
    """Return the verdict in one line: `1 wrong (leak), 2 to look at (fit, data), 6 fine`."""
    parts = []
    for name, shown in (("wrong", "wrong"), ("look", "to look at"), (None, "not known")):
        found = [line.name for line in lines if line.verdict == name]
        if found:
            parts.append(f"{len(found)} {shown} ({', '.join(found)})")
    fine = sum(line.verdict == "fine" for line in lines)
    return ", ".join([*parts, f"{fine} fine"])
