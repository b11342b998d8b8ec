"""Warn at the start of a run if its evaluations will take a large share of it."""

from collections.abc import Mapping, Sequence

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.cost.flops import FORWARD_SHARE
from accel_gpt.data.corpus import EvalSplit

LARGE_SHARE = 1 / 5  # of the time between two evaluations
SHORT_SECONDS = 30  # an evaluation that is never worth a line; assumption
LONG_SECONDS = 600  # an evaluation that is always worth a line; assumption
# A first step also warms up caches and kernels, or compiles. On its own it tells the speed only if
# it takes longer than that by far. Assumptions.
WARM_UP_SECONDS = 10
FIRST_COMPILED_SECONDS = 600


class EvaluationTime:
    """Estimates the seconds of each evaluation from those of a step, once."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        self.tokens = 0  # that an evaluation reads, of all splits
        self.estimated = False

    def start(self, evaluated: Mapping[str, Sequence[EvalSplit]]) -> None:
        """Count the tokens that each evaluation reads, of all splits."""
        self.tokens = 0
        for parts in evaluated.values():
            self.tokens += sum(evaluated_tokens(part) for part in parts)

    def check(self, step_seconds: float, warm: bool, on_cpu: bool) -> str | None:
        """Return a warning if evaluations will take long; None later, and if nothing is known.

        `warm`: the first step of this launch is not among the timed ones.
        """
        compiles = not on_cpu or self.config.train.compile
        slow = FIRST_COMPILED_SECONDS if compiles else WARM_UP_SECONDS
        if self.estimated or not (warm or step_seconds > slow):
            return None
        self.estimated = True
        steps = min(self.config.eval.every or self.plan.max_steps, self.plan.max_steps)
        seconds = self.tokens / self.plan.tokens_per_step * FORWARD_SHARE * step_seconds
        share = seconds / (steps * step_seconds)
        takes_large_share = seconds > SHORT_SECONDS and share > LARGE_SHARE
        if takes_large_share or seconds > LONG_SECONDS:
            return self.warning(seconds, steps, share)
        return None

    def warning(self, seconds: float, steps: int, share: float) -> str:
        """Say how long each evaluation takes, and which options shorten it."""
        options = self.config.eval
        times = f"{share:.1f} times" if share >= 1 else f"{share:.0%} of"
        between = f"the {steps:,} steps between two" if steps < self.plan.max_steps else "all steps"
        each = "whole splits" if options.tokens is None else f"{options.tokens:,}"
        more = "" if options.hellaswag is None else " without HellaSwag"
        every = f", or raise eval.every ({options.every:,})" if options.every else ""
        return (
            f"WARNING: each evaluation takes about {format_estimate(seconds)}{more}, {times} the "
            f"time of {between}; lower eval.tokens ({each}){every}"
        )


def evaluated_tokens(part: EvalSplit) -> int:
    """Return the number of tokens of a source that are evaluated."""
    whole = int(part.split.lengths.sum())
    return whole if part.tokens is None else min(whole, part.tokens)


def format_estimate(seconds: float) -> str:
    """Format as `40 s`, `25 min`, `2.2 hours`, `3.4 days`: no more digits than an estimate has."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:,.1f} days"
