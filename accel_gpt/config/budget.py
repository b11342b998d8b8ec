"""Turn a time budget, `train.budget`, into a number of steps. No torch.

The first launch measures what a step, an evaluation, the samples and a save take: `Costs`. `fit`
finds the longest run within the budget, and `with_length` scales a config to this run.

After a tenth of the run, `fit_again` looks at the length once more, at the speed of the steps so
far. While the learning rate is constant, it sets another length. The steps before are those of a
run that had this length from its start: `with_other_length` changes nothing that was due by then.
"""

import math
from bisect import bisect_left
from dataclasses import replace

from accel_gpt.config.depth import at_length
from accel_gpt.config.experiment import Config, Stage
from accel_gpt.config.options import duration
from accel_gpt.config.plan import (
    WSD_DECAY_SHARE,
    Budget,
    Costs,
    Plan,
    reference_steps,
    with_edges,
)
from accel_gpt.config.stages import begins_at_once, first_steps, total_tokens
from accel_gpt.config.values import of_section, to_flat
from accel_gpt.errors import require

FEWEST_STEPS = 10  # of a run with a budget; assumption: a shorter run trains nothing
# Share of the budget that is planned, since machines get slower as they get warm; assumption
PLANNED_SHARE = 0.95
LOOK_SHARE = 0.1  # of the steps, after which the length is looked at again; assumption
LOOK_STEPS = 3  # fewest timed steps for the second look; assumption


def with_budget(config: Config, budget: Budget) -> Config:
    """Return `config` with the length that `budget` came to, and what is scaled with it."""
    config = with_length(config, budget.first_steps)
    if budget.looked_at is None:
        return config
    return with_other_length(config, budget.looked_at, budget.steps)


def with_length(config: Config, steps: int) -> Config:
    """Return `config` with `steps` steps in place of `train.budget`.

    Options that follow from `model.depth` follow from this length. For the others, see
    `with_intervals`.
    """
    found = with_intervals(config, steps)
    if config.model.depth is None:
        return found
    flat = at_length(to_flat(config), steps)
    return replace(
        found,
        optim=replace(found.optim, **of_section("optim", flat)),
        schedule=replace(found.schedule, **of_section("schedule", flat)),
    )


def with_intervals(config: Config, steps: int) -> Config:
    """Return `config` with `steps` steps and what is scaled with them: warm-up and intervals.

    They are scaled from the length that they are meant for, see `reference_steps`, and so are the
    edges of stages.
    """
    reference = reference_steps(config)

    def scaled(count: int) -> int:
        return max(1, round(count * steps / reference)) if count else 0

    warmup = min(scaled(config.schedule.warmup_steps), steps - 1)
    every_tokens = config.checkpoint.every_tokens
    return replace(
        config,
        stages=with_edges(config, steps),
        train=replace(config.train, max_steps=steps, max_tokens=None, budget=None),
        optim=replace(config.optim, muon_momentum_warmup=scaled(config.optim.muon_momentum_warmup)),
        schedule=replace(config.schedule, warmup_steps=warmup),
        eval=replace(config.eval, every=scaled(config.eval.every)),
        sample=replace(config.sample, every=scaled(config.sample.every)),
        checkpoint=replace(
            config.checkpoint,
            every=scaled(config.checkpoint.every),
            every_tokens=scaled(every_tokens) if every_tokens else None,
        ),
        log=replace(config.log, every=scaled(config.log.every)),
    )


def fit(config: Config, costs: Costs, seconds: float) -> Budget:
    """Return the budget with the length of the longest run of `config` within `seconds`.

    The run is `with_budget(config, budget)`. Raises `UserError` if fewer than `FEWEST_STEPS` fit.
    """
    asked = str(config.train.budget)
    planned = duration("train.budget", asked) or 0.0
    needed = costs.total(with_intervals(config, FEWEST_STEPS), FEWEST_STEPS)
    whole = planned + max(needed - seconds, 0.0) / PLANNED_SHARE
    require(
        needed <= seconds,
        f"train.budget is {asked}, but {FEWEST_STEPS} steps with an evaluation and a save take "
        f"{math.ceil(whole):,} s ({costs.describe()}); raise it to {math.ceil(whole)}s, or lower "
        "train.tokens_per_step, eval.tokens or the size of the model",
    )
    steps = longest(config, costs, seconds)
    return Budget(
        asked=asked,
        seconds=seconds - costs.set_up,
        costs=costs,
        first_steps=steps,
        steps=steps,
    )


def longest(config: Config, costs: Costs, seconds: float) -> int:
    """Return the most steps that take at most `seconds`, at least 1."""

    def is_too_long(steps: int) -> bool:
        run = with_intervals(config, steps)
        return costs.total(run, steps) > seconds

    step = costs.step * min(costs.relative)
    most = math.floor(seconds / step) + 1  # the quotient of two floats may be too small
    return 1 + bisect_left(range(2, most + 1), True, key=is_too_long)


# --------------------------------------------------------------------------- the second look


def look_step(budget: Budget, first_step: int) -> int:
    """Return the step after which a launch that began at `first_step` looks at the length again."""
    return max(math.ceil(LOOK_SHARE * budget.steps), first_step + 1 + LOOK_STEPS)


def fit_again(
    config: Config, plan: Plan, step: int, step_seconds: float, seconds_left: float
) -> Budget:
    """Return the budget of a run at `step`, with the length that fits the seconds that are left.

    `step_seconds`: what a step of the first stage takes in this run. The length stays if the rate
    is not constant up to `step`. A run gets at least as many further steps as it has made, so that
    it can decay.
    """
    budget = plan.budget
    assert budget is not None
    costs = budget.costs.at_speed(step_seconds)
    steps = plan.max_steps
    if rate_is_constant(config, plan, step):
        fewest = 2 * max(step, plan.warmup_steps)
        fastest = step_seconds * min(costs.relative)
        most = step + math.floor(max(seconds_left, 0.0) / fastest)

        def is_too_long(steps: int) -> bool:
            run = with_other_length(config, step, steps)
            return seconds_ahead(run, costs, step, steps) > seconds_left

        steps = fewest + bisect_left(range(fewest + 1, most + 1), True, key=is_too_long)
    return replace(budget, looked_at=step, steps=steps, costs=costs)


def rate_is_constant(config: Config, plan: Plan, step: int) -> bool:
    """Return whether the rate of the first `step` steps depends on the warm-up alone."""
    if config.own.lr is not None:
        return False
    if config.schedule.name == "wsd":
        return step <= plan.max_steps - plan.decay_steps
    return config.schedule.name == "constant"


def seconds_ahead(config: Config, costs: Costs, step: int, steps: int) -> float:
    """Return what a run takes from `step` to its end."""
    training = costs.training(config, steps, first=step)
    return training + costs.pauses(config, steps, after=step)


def with_other_length(config: Config, step: int, steps: int) -> Config:
    """Return `config` with `steps` steps; up to `step`, the run stays as it is.

    An interval is scaled if nothing was due by `step`, and nothing becomes due by then. The warm-up
    stays. The decay begins after `step`. So does each stage that has not begun.
    """
    before = config.train.max_steps
    if before is None or before == steps:
        return config
    tokens = total_tokens(config, before, last=step)

    def scaled(interval: int, done: int = step) -> int:
        if interval <= done:
            return interval
        return max(round(interval * steps / before), done + 1)

    schedule = config.schedule
    if schedule.name == "wsd":
        most = steps - max(step, schedule.warmup_steps)
        if math.ceil((schedule.decay_share or WSD_DECAY_SHARE) * steps) > most:
            schedule = replace(schedule, decay_share=most / steps)
    every_tokens = config.checkpoint.every_tokens
    return replace(
        config,
        stages=with_other_edges(config, step, steps),
        train=replace(config.train, max_steps=steps),
        schedule=schedule,
        eval=replace(config.eval, every=scaled(config.eval.every)),
        sample=replace(config.sample, every=scaled(config.sample.every)),
        checkpoint=replace(
            config.checkpoint,
            every=scaled(config.checkpoint.every),
            every_tokens=scaled(every_tokens, tokens) if every_tokens else None,
        ),
        log=replace(config.log, every=scaled(config.log.every)),
    )


def with_other_edges(config: Config, step: int, steps: int) -> tuple[Stage, ...]:
    """Return the stages of `config` for another length, decided after `step`, of `steps` steps.

    A stage that has begun keeps its first step. The others begin after `step`, and each has a step.
    """
    before = config.train.max_steps
    assert before is not None
    earliest = step
    stages: list[Stage] = []
    firsts = first_steps(config, before)[0 if begins_at_once(config) else 1 :]
    for stage, first in zip(config.stages, firsts, strict=True):
        moved = first
        if first >= step:
            latest = steps - (len(config.stages) - len(stages))
            moved = max(min(round(first * steps / before), latest), earliest)
            earliest = moved + 1
        is_share = isinstance(stage.from_, float) and round(stage.from_ * steps) == moved
        stages.append(stage if is_share else replace(stage, from_=moved))
    return tuple(stages)
