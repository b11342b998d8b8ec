"""Turn a time budget, `train.budget`, into a number of steps. No torch.

The first launch measures what a step, an evaluation, the samples and a save take: `Costs`. `fit`
finds the longest run within the budget, and `with_length` scales a config to this run.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from accel_gpt.config.depth import at_length
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Budget, reference_steps
from accel_gpt.config.values import of_section, to_flat
from accel_gpt.errors import require

FEWEST_STEPS = 10  # of a run with a budget; assumption: a shorter run trains nothing
# Share of the budget that is planned, since machines get slower as they get warm; assumption
PLANNED_SHARE = 0.95
# Largest share of a budget for evaluations, samples and saves together; assumption
PAUSE_SHARE = 0.2


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    start: float = 0.0  # until the first step is under way
    evaluation: float = 0.0  # one evaluation that `eval.every` asks for
    last_evaluation: float = 0.0  # that only the last step makes, in addition
    samples: float = 0.0  # all samples of one step
    save: float = 0.0  # one checkpoint

    def pauses(self, config: Config, steps: int) -> float:
        """Return the seconds of all evaluations, samples and saves of a run."""
        evaluated = due_steps(config.eval.every, steps)
        saved = due_steps(config.checkpoint.every, steps)
        if config.checkpoint.every_tokens:
            interval = max(config.checkpoint.every_tokens / config.train.tokens_per_step, 1)
            saved |= {math.ceil(i * interval) for i in range(1, int(steps / interval) + 1)}
        if config.checkpoint.keep_best:
            saved |= evaluated  # at most: each evaluation is better than those before
        samples = len(due_steps(config.sample.every, steps)) if config.sample.every else 0
        return (
            self.last_evaluation
            + len(evaluated) * self.evaluation
            + samples * self.samples
            + len(saved) * self.save
        )

    def describe(self) -> str:
        """Format the seconds of each part."""
        parts = {
            "a step": self.step,
            "an evaluation": self.evaluation + self.last_evaluation,
            "samples": self.samples,
            "a save": self.save,
            "the start": self.start,
        }
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())


def due_steps(every: int, steps: int) -> set[int]:
    """Return the steps at which something is due every `every` steps (0: never), and the last."""
    return {*(range(every, steps + 1, every) if every else ()), steps}


def format_seconds(seconds: float) -> str:
    """Format a short time: `0.17 s`."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def with_length(config: Config, steps: int, thin: int = 1) -> Config:
    """Return `config` with `steps` steps in place of `train.budget`.

    Options that follow from `model.depth` follow from this length. For the others and `thin`, see
    `with_intervals`.
    """
    found = with_intervals(config, steps, thin)
    if config.model.depth is None:
        return found
    flat = at_length(to_flat(config), steps)
    schedule = replace(found.schedule, **of_section("schedule", flat))
    if schedule.decay_steps:
        decay = min(schedule.decay_steps, steps - schedule.warmup_steps)
        schedule = replace(schedule, decay_steps=decay)
    optim = replace(found.optim, **of_section("optim", flat))
    return replace(found, optim=optim, schedule=schedule)


def with_intervals(config: Config, steps: int, thin: int) -> Config:
    """Return `config` with `steps` steps and what is scaled with them: warm-up, decay, intervals.

    They are scaled from the length that they are meant for, see `reference_steps`. Evaluations,
    samples and saves are `thin` times as rare.
    """
    reference = reference_steps(config)

    def scaled(count: int, times: int = 1) -> int:
        return max(1, round(count * times * steps / reference)) if count else 0

    schedule = config.schedule
    warmup = min(scaled(schedule.warmup_steps), steps - 1)
    decay = schedule.decay_steps
    every_tokens = config.checkpoint.every_tokens
    return replace(
        config,
        train=replace(config.train, max_steps=steps, max_tokens=None, budget=None),
        optim=replace(config.optim, muon_momentum_warmup=scaled(config.optim.muon_momentum_warmup)),
        schedule=replace(
            schedule,
            warmup_steps=warmup,
            decay_steps=min(scaled(decay), steps - warmup) if decay else None,
        ),
        eval=replace(config.eval, every=scaled(config.eval.every, thin)),
        sample=replace(config.sample, every=scaled(config.sample.every, thin)),
        checkpoint=replace(
            config.checkpoint,
            every=scaled(config.checkpoint.every, thin),
            every_tokens=scaled(every_tokens, thin) if every_tokens else None,
        ),
        log=replace(config.log, every=scaled(config.log.every)),
    )


def fit(config: Config, costs: Costs, seconds: float) -> tuple[int, Budget]:
    """Return the steps of the longest run of `config` within `seconds`, and how it was found.

    The run is `with_length(config, steps, budget.thin)`. Raises `UserError` if fewer than
    `FEWEST_STEPS` fit.
    """
    rarest = reference_steps(config)  # so rare that all are due at the last step only
    asked = str(config.train.budget)
    require(
        longest(config, costs, seconds, rarest) >= FEWEST_STEPS,
        f"train.budget is {asked}, but {FEWEST_STEPS} steps with an evaluation and a save need "
        f"more ({costs.describe()}); raise train.budget, or lower train.tokens_per_step, "
        "eval.tokens or the size of the model",
    )

    def pauses_are_short(thin: int) -> bool:
        steps = longest(config, costs, seconds, thin)
        pauses = costs.pauses(with_intervals(config, steps, thin), steps)
        return steps >= FEWEST_STEPS and pauses <= PAUSE_SHARE * seconds

    thin = 1 + bisect_left(range(1, rarest), True, key=pauses_are_short)
    steps = longest(config, costs, seconds, thin)
    return steps, Budget(asked=asked, thin=thin, step_seconds=costs.step)


def longest(config: Config, costs: Costs, seconds: float, thin: int) -> int:
    """Return the most steps that take at most `seconds`, at least 1."""

    def is_too_long(steps: int) -> bool:
        run = with_intervals(config, steps, thin)
        return costs.start + steps * costs.step + costs.pauses(run, steps) > seconds

    most = max(math.floor(seconds / costs.step), 1)
    return 1 + bisect_left(range(2, most + 1), True, key=is_too_long)
