"""Say which metric compares evaluations, and whether a low or a high value is good. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from accel_gpt.errors import UserError, did_you_mean, require

FALLING = re.compile(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(/.+)?")
RISING = re.compile(r"eval/hellaswag_acc(_norm)?")


@dataclass(frozen=True)
class Yardstick:
    """A metric, and whether its highest or its lowest value is the best."""

    metric: str
    highest: bool = False

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether a value is better than another; None: there is none. NaN never is."""
        if other is None:
            return math.isfinite(value)  # JSON stores no infinite value
        return value > other if self.highest else value < other

    def value(self, record: Mapping[str, float]) -> float:
        """Return the metric of an evaluation. Raises `UserError` if the evaluation has no such one.

        `record`: the metrics of an evaluated step.
        """
        if self.metric not in record:
            names = [name for name in record if name.startswith("eval/")]
            expected = did_you_mean(self.metric, names, f"expected one of {', '.join(names)}")
            raise UserError(f"eval.best: the evaluation has no metric {self.metric}; {expected}")
        return record[self.metric]


def parse_yardstick(name: str, text: str) -> Yardstick:
    """Parse `METRIC`, `min METRIC` or `max METRIC`; `name`: of the option, for errors.

    Raises `UserError` if the metric is none of an evaluation, or if it needs min or max.
    """
    *goals, metric = text.split() or [""]
    goal = " ".join(goals)
    require(
        metric.startswith("eval/") and goal in ("", "min", "max"),
        f"{name} is {text!r}; expected a metric such as eval/val_loss, or min or max before it",
    )
    known = {"min": FALLING.fullmatch(metric), "max": RISING.fullmatch(metric)}
    goal = goal or next((one for one, match in known.items() if match), "")
    require(bool(goal), f"{name} is {metric}; expected min {metric} or max {metric}")
    return Yardstick(metric, highest=goal == "max")
