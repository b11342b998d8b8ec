"""Look at the length of a run with a `train.budget` again, once, at the speed of its steps.

The one event that changes the config of a run while it trains. `config.yaml` and `run.json` have
the new length before the next step is made.
"""

from dataclasses import replace

from accel_gpt.config.budget import (
    fit_again,
    look_step,
    with_other_length,
)
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Budget, Plan, make_plan, plural
from accel_gpt.config.values import to_flat
from accel_gpt.data.corpus import Corpus
from accel_gpt.launch.context import Context
from accel_gpt.launch.ranks import all_gather, on_main
from accel_gpt.runs.state import TrainState
from accel_gpt.training.reporter import Reporter


def look_at_length(context: Context, state: TrainState, reporter: Reporter, corpus: Corpus) -> bool:
    """Look at the length again if it is due before the step that follows `state`; a collective.

    Returns whether the run has another length now.
    """
    budget = context.plan.budget
    if budget is None or budget.looked_at is not None:
        return False
    step = state.step
    first_step = reporter.stopwatch.first_step
    if step == first_step + 1:
        reporter.lap(step)  # the first step of a launch is slow: do not count it
    if step != look_step(budget, first_step):
        return False
    reporter.lap(step)
    speeds = all_gather((reporter.stopwatch.elapsed(), reporter.stopwatch.step_seconds))
    spent, step_seconds = map(max, zip(*speeds, strict=True))  # of the slowest ranks
    timed = step - first_step - 1
    expected = budget.costs.training(context.config, context.plan.max_steps, first_step + 1, step)
    step_seconds *= timed * budget.costs.step / expected  # of a step of the first stage
    looked = fit_again(
        config=context.config,
        plan=context.plan,
        step=step,
        step_seconds=step_seconds,
        seconds_left=budget.seconds - spent,
    )
    text = describe_look(context.plan, looked)
    changed = change_length(context, state, reporter, corpus, looked)
    if changed and text:
        reporter.log(text)
    return changed


def describe_look(plan: Plan, looked: Budget) -> str | None:
    """Return what a second look came to; None if the run stays as it is. `plan`: before it."""
    assert plan.budget is not None
    if looked.steps == plan.max_steps:
        return None
    steps = plural(looked.steps, "step")
    return (
        f"budget   {steps} in {looked.asked}, not {plan.max_steps:,}: a step takes "
        f"{looked.costs.step:.3g} s, not {plan.budget.costs.step:.3g} s"
    )


def change_length(
    context: Context, state: TrainState, reporter: Reporter, corpus: Corpus, budget: Budget
) -> bool:
    """Record that a second look came to `budget`, then train for its length; a collective.

    Returns False, and changes nothing, if the disk takes no record.
    """
    config = with_other_length(context.config, state.step, budget.steps)
    plan = replace(
        make_plan(config, context.plan.world_size), budget=budget, finish=context.plan.finish
    )
    before = to_flat(context.config)
    if not set_length(context, state, reporter, corpus, config, plan):
        return False
    for key, value in to_flat(config).items():
        if value != before[key]:
            state.config[key] = value
    state.budget = budget
    return True


def set_length(
    context: Context,
    state: TrainState,
    reporter: Reporter,
    corpus: Corpus,
    config: Config,
    plan: Plan,
) -> bool:
    """Record another length of the run, then give it to all parts of the run; a collective.

    Returns False, and changes nothing, if the disk takes no record.
    """
    corpus.set_length(config, state.sequences)
    if not on_main(lambda: reporter.record_length(config, plan, corpus)):
        corpus.set_length(context.config, state.sequences)
        return False
    context.set_length(config, plan)
    return True
