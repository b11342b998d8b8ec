"""Open what is known of a run: its records, its config, and the statistics of its text.

Each check of the doctor gets a `Case`, and fills one `Line` of the page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from accel_gpt.config.experiment import Config
from accel_gpt.data.sources import all_train_paths, val_paths
from accel_gpt.errors import AccelGPTError, first_line
from accel_gpt.files import is_url
from accel_gpt.health.text import TextStatistics, text_statistics
from accel_gpt.report.curves import Floats, Metrics
from accel_gpt.report.runs import NamedRun
from accel_gpt.runs.folder import number

Verdict = Literal["fine", "look", "wrong"]
VERDICTS: Sequence[Verdict] = ("fine", "look", "wrong")  # the worst last
BEGINNING = 0.1  # share of a run that tells little yet, unless the warm-up is longer; assumption


class Above(NamedTuple):
    """Bounds that a sound figure is not above."""

    look: float
    wrong: float = math.inf

    def verdict(self, value: float) -> Verdict:
        """Return the verdict on a figure."""
        return "wrong" if value > self.wrong else "look" if value > self.look else "fine"


class Below(NamedTuple):
    """Bounds that a sound figure is not below."""

    look: float
    wrong: float = -math.inf

    def verdict(self, value: float) -> Verdict:
        """Return the verdict on a figure."""
        return "wrong" if value < self.wrong else "look" if value < self.look else "fine"


class Unknown(Exception):
    """Nothing can be said about a question, and why."""


@dataclass
class Line:
    """The answer to one question about a run."""

    name: str
    question: str
    figure: str = "not known"
    compared: str = ""
    verdict: Verdict | None = None  # None: nothing can be said
    todo: str = ""

    def find(self, verdict: Verdict, todo: str = "") -> None:
        """Add a finding: the worst verdict counts."""
        if self.verdict is None or VERDICTS.index(verdict) > VERDICTS.index(self.verdict):
            self.verdict = verdict
        self.todo = "; ".join(filter(None, (self.todo, todo)))

    def judge(self, value: float, bounds: Above | Below, todo: str) -> None:
        """Find `look` or `wrong` if a figure is outside of its bounds."""
        verdict = bounds.verdict(value)
        if verdict != "fine":
            self.find(verdict, todo)


@dataclass
class Case:
    """A run, as its folder and its data tell it."""

    run: NamedRun
    config: Config

    @property
    def metrics(self) -> Metrics:
        """Return the records as curves."""
        return self.run.metrics

    @cached_property
    def text(self) -> TextStatistics:
        """Return the statistics of the text. Raises `Unknown` if they cannot be measured."""
        if self.uses("shards"):
            raise Unknown("shards() of --code makes the data")
        data = self.config.data
        try:
            if any(
                is_url(source.path) for source in [*all_train_paths(self.config), *val_paths(data)]
            ):
                raise Unknown("the data are remote")
            return text_statistics(self.config, self.run.path)
        except (AccelGPTError, OSError) as error:
            raise Unknown(first_line(error)) from None

    def uses(self, function: str) -> bool:
        """Return whether the run was trained with a function of --code."""
        functions = self.run.last_launch("code", "functions")
        return isinstance(functions, list) and function in functions

    def last(self, key: str) -> float | None:
        """Return the last value of a metric after step 0."""
        steps, values = self.after_start(key)
        return float(values[-1]) if len(steps) else None

    def after_start(self, key: str) -> tuple[Floats, Floats]:
        """Return steps and values of a metric without those before the first step."""
        steps, values = self.metrics.curve(key)
        return steps[steps > 0], values[steps > 0]

    def in_last_stage(self, key: str) -> tuple[Floats, Floats]:
        """Return steps and values of a metric after step 0, of the stage of the last value.

        Another length, batch or mixture changes losses and updates by itself.
        """
        steps, values = self.after_start(key)
        here = self.run.in_last_stage(steps)
        return steps[here], values[here]

    def recorded(self, *keys: str) -> float:
        """Return a number in the last launch of run.json; NaN if there is none."""
        return number(self.run.last_launch(*keys))

    @cached_property
    def rate(self) -> tuple[Floats, Floats]:
        """Return the steps of train/lr, and the rates as shares of the highest."""
        steps, rates = self.metrics.curve("train/lr")
        highest = rates.max(initial=0)
        return steps, rates / highest if highest > 0 else rates

    def at_high_rate(self, key: str) -> Floats:
        """Return the values of a metric at steps whose rate is at least half of the peak."""
        steps, values = self.metrics.curve(key)
        rate_steps, shares = self.rate
        if not len(steps) or not len(rate_steps):
            return values
        high = np.interp(steps, rate_steps, shares) >= 0.5
        return values[high & (steps > 1)]

    def seconds_after(self, step: int) -> float:
        """Return the seconds of training after a step, until the last record."""
        steps = self.metrics.steps
        seconds = self.metrics.seconds
        if not len(steps):
            return 0.0
        return max(0.0, float(seconds[-1] - np.interp(step, steps, seconds)))

    @property
    def warmup_steps(self) -> float:
        """Return the steps of the warm-up; 0 if they are not known."""
        steps = self.recorded("plan", "warmup_steps")
        return steps if steps > 0 else 0.0

    @property
    def is_early(self) -> bool:
        """Return whether the run trains and has just begun."""
        beginning = max(2 * self.warmup_steps, BEGINNING * (self.run.end or 0))
        return self.run.state == "running" and self.run.last_step < beginning

    @property
    def from_scratch(self) -> bool:
        """Return whether the run began with random weights."""
        return self.config.model.init_from == "scratch"
