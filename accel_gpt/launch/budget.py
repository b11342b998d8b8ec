"""Find the length of a run with `train.budget`, and watch the speed that the length relies on.

After a tenth of the run, the length is looked at again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

from accel_gpt.config.budget import (
    PLANNED_SHARE,
    fit,
    rate_is_constant,
    seconds_ahead,
)
from accel_gpt.config.costs import Budget, Costs
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Plan, plural
from accel_gpt.launch.ranks import all_gather, on_main

SLOW = 2.0  # a slow moment: so many times the measured seconds of a step
WINDOW_SECONDS = 60.0  # length of the moments that are compared
NEAR = (0.85, 1.1)  # shares of the budget that are not told; assumption


def fit_slowest(config: Config, costs: Costs, started: float) -> Budget:
    """Return the longest run that fits into `train.budget` on the slowest ranks; a collective.

    `costs`: as measured on this rank. `started`: the time at which the budget began, by
    `time.monotonic`. Raises `UserError` if the budget is too short.
    """
    seconds = duration("train.budget", config.train.budget) or 0.0
    costs = slowest(all_gather(costs))
    end = started + PLANNED_SHARE * seconds
    budget: Budget = on_main(lambda: fit(config, costs, end - time.monotonic()))
    return budget


def slowest(costs: Sequence[Costs]) -> Costs:
    """Return the costs of the slowest ranks, which the others wait for."""
    return Costs(*(max(seconds) for seconds in zip(*map(astuple, costs), strict=True)))


def describe_look(config: Config, plan: Plan, looked: Budget, spent: float) -> str | None:
    """Return what a second look came to; None if the run ends near its budget and stays as it is.

    `config` and `plan`: before the look. `spent`: seconds of the run so far.
    """
    assert plan.budget is not None
    assert looked.looked_at is not None
    speed = f"a step takes {looked.costs.step:.3g} s, not {plan.budget.costs.step:.3g} s"
    if looked.steps != plan.max_steps:
        steps = plural(looked.steps, "step")
        return f"budget   {steps} in {looked.asked}, not {plan.max_steps:,}: {speed}"
    step = looked.looked_at
    ahead = seconds_ahead(config, looked.costs, step, plan.max_steps)
    share = (spent + ahead) / looked.seconds
    if NEAR[0] <= share <= NEAR[1] or rate_is_constant(config, plan, step):
        return None
    return (
        f"WARNING: up to step {step:,}, {speed}; the run takes {share:.0%} of train.budget "
        f"{looked.asked}, since schedule {config.schedule.name} keeps the length from the start"
    )


class Pace:
    """Times the steps of a launch of a run with a budget, and warns of a slow moment."""

    def __init__(self, budget: Budget | None, log: Callable[[str], None]) -> None:
        self.budget = budget
        self.log = log
        self.is_first = True  # the first steps of a launch compile
        self.all_steps = 0  # that were timed
        self.all_seconds = 0.0
        self.steps = 0  # in the present window
        self.seconds = 0.0
        self.is_slow = False

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds of the timed steps of this launch."""
        return self.all_seconds / self.all_steps

    def note(self, step: int, steps: int, seconds_per_step: float) -> None:
        """Note the speed of the last `steps` steps, up to `step`."""
        if self.budget is None or self.is_first:
            self.is_first = False
            return
        self.all_steps += steps
        self.all_seconds += steps * seconds_per_step
        self.steps += steps
        self.seconds += steps * seconds_per_step
        if self.seconds < WINDOW_SECONDS:
            return
        times = self.seconds / self.steps / self.budget.costs.step
        if times > SLOW and not self.is_slow:
            self.log(
                f"WARNING: up to step {step:,}, a step took {times:.1f} times as long as the "
                f"{self.budget.costs.step:.2g} s for which train.budget {self.budget.asked} set "
                "the length; the run takes longer than its budget"
            )
        self.is_slow = times > SLOW
        self.steps = 0
        self.seconds = 0.0
