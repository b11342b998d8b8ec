"""Answer nine questions about a run: is it healthy?

    Case            what is known of the run, in case.py
    learning.py     counting, leak, fit, curve, rates
    keeping.py      data, machine, kill, identity

Each answer has a figure, what it is compared with, and a verdict. A verdict has a bound with a
source, or one that benchmarks/doctor.py measured.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_given
from accel_gpt.config.values import build
from accel_gpt.errors import require
from accel_gpt.health.case import Case, Line, Unknown
from accel_gpt.health.keeping import data, identity, kill, machine
from accel_gpt.health.learning import counting, curve, fit, leak, rates
from accel_gpt.report.runs import NamedRun

Check = Callable[[Case, Line], None]
QUESTIONS: Mapping[str, tuple[str, Check]] = MappingProxyType(
    {
        "counting": ("Does it know more than counting?", counting),
        "leak": ("Is it too good to be true?", leak),
        "fit": ("Is it over- or underfitted?", fit),
        "curve": ("Is the curve as it should be?", curve),
        "rates": ("Are the rates right?", rates),
        "data": ("Is the data sound?", data),
        "machine": ("Is the machine used?", machine),
        "kill": ("Would a kill hurt?", kill),
        "identity": ("Does it say what it is?", identity),
    }
)


def examine(run: NamedRun) -> list[Line]:
    """Return one line for each question about a run, with the config of its last launch.

    Executes no file of --code. Raises `UserError` if the run has no config.
    """
    file = run.path / "config.yaml"
    require(file.is_file(), f"{run.path} has no config.yaml")
    return answers(Case(run, build(Config, read_given([str(file)], "accel-gpt doctor"))))


def answers(case: Case) -> list[Line]:
    """Ask each question about a run."""
    lines = []
    with np.errstate(all="ignore"):  # records that were edited may hold any numbers
        for name, (question, check) in QUESTIONS.items():
            line = Line(name, question)
            try:
                check(case, line)
                line.find("fine")
            except Unknown as why:
                line.compared = str(why)
            lines.append(line)
    return lines


def verdict(lines: Sequence[Line]) -> str:
    """Return the verdict in one line: `1 wrong (leak), 2 to look at (fit, data), 6 fine`."""
    parts = []
    for name, shown in (("wrong", "wrong"), ("look", "to look at"), (None, "not known")):
        found = [line.name for line in lines if line.verdict == name]
        if found:
            parts.append(f"{len(found)} {shown} ({', '.join(found)})")
    fine = sum(line.verdict == "fine" for line in lines)
    return ", ".join([*parts, f"{fine} fine"])
