"""`train.budget`: the longest run within a time, and the intervals that follow from it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.budget import (
    FEWEST_STEPS,
    fit,
    fit_again,
    look_step,
    rate_is_constant,
    seconds_ahead,
    with_budget,
    with_length,
    with_other_length,
)
from accel_gpt.config.experiment import (
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    SampleConfig,
    ScheduleConfig,
    Stage,
    TrainConfig,
)
from accel_gpt.config.plan import Costs, make_plan, reference_steps, token_steps
from accel_gpt.config.stages import first_steps, spans
from accel_gpt.config.values import build, to_flat
from accel_gpt.errors import UserError
from accel_gpt.evals.samples import samples_due
from accel_gpt.optim.groups import fraction_at
from accel_gpt.optim.schedule import momentum_at
from accel_gpt.runs.state import TrainState

BUDGET = {"train.budget": "5m", "train.tokens_per_step": 65_536, "model.block_size": 64}


def config_with(**keys: object) -> Config:
    """Return a config with a budget; keys have __ in place of dots."""
    flat = {key.replace("__", "."): value for key, value in keys.items()}
    config: Config = build(Config, {**to_flat(Config()), **BUDGET, **flat})
    return config


COSTS = st.builds(
    Costs,
    step=st.floats(0.001, 5),
    start=st.floats(0, 60),
    evaluation=st.floats(0, 30),
    samples=st.floats(0, 10),
    save=st.floats(0, 10),
)


@given(COSTS, st.floats(10, 20_000), st.integers(1, 50_000), st.integers(0, 3000))
@example(Costs(step=3.6412560352385572), 36.412560352385572, 1, 0)  # ten steps; the quotient is 9
def test_the_longest_run_within_the_budget(
    costs: Costs, seconds: float, every: int, warmup: int
) -> None:
    config = config_with(eval__every=every, schedule__warmup_steps=warmup)

    def spent(steps: int) -> float:
        return costs.start + steps * costs.step + costs.pauses(with_length(config, steps), steps)

    if spent(FEWEST_STEPS) > seconds:
        with pytest.raises(UserError, match="but 10 steps with an evaluation"):
            fit(config, costs, seconds)
        return
    budget = fit(config, costs, seconds)
    steps = budget.steps
    assert steps >= FEWEST_STEPS
    assert spent(steps) <= seconds
    run = with_length(config, steps)
    assert run.train.budget is None
    assert make_plan(run, 1).max_steps == steps  # warm-up and decay fit into it


def test_saves_by_tokens_are_counted() -> None:
    config = config_with(
        checkpoint__every=70, checkpoint__every_tokens=100_000_000, checkpoint__keep_best=False
    )
    state = TrainState(config={})
    saves = 0
    for state.step in range(1, 5001):
        state.tokens += config.train.tokens_per_step
        saves += state.save_is_due(config.checkpoint, config.train.tokens_per_step)
    saves += not state.save_is_due(config.checkpoint, config.train.tokens_per_step)  # the last step
    assert Costs(step=1, save=2).pauses(config, 5000) == 2 * saves


@pytest.mark.parametrize("keep_best", [True, False])
def test_each_evaluation_and_each_save_of_the_best_is_counted(keep_best: bool) -> None:
    """At worst, each evaluation is the best so far and is saved."""
    config = config_with(
        eval__every=30, checkpoint__every=50, checkpoint__keep_best=keep_best, sample__every=40
    )
    costs = Costs(step=1, evaluation=3, samples=0.25, save=100)
    evaluations = saves = samples = 0
    for step in range(1, 201):
        evaluates = step % 30 == 0 or step == 200
        evaluations += evaluates
        saves += step % 50 == 0 or (keep_best and evaluates)
        samples += step % 40 == 0
    expected = 3 * evaluations + 0.25 * samples + 100 * saves
    assert costs.pauses(config, 200) == expected
    # trained weights are evaluated first, and not saved
    tuned = replace(config, model=replace(config.model, init_from="runs/x"))
    assert costs.pauses(tuned, 200) == expected + 3
    assert costs.total(tuned, 200) == costs.total(config, 200) + 3
    assert costs.pauses(tuned, 200, after=1) == expected


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_rates_that_follow_from_the_depth_follow_from_the_length(
    optimizer: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "data: {train: x, tokenizer: bytes}\nmodel: {depth: 2, block_size: 8192}\n"
        f"train: {{micro_batch_size: 16}}\noptim: {{name: {optimizer}, eps: 1e-7}}"
    )
    expected = load_config([str(file), "--train.max_steps", "300"], "test")
    found = with_length(load_config([str(file), "--train.budget", "1m"], "test"), 300)
    assert found.train == expected.train
    assert (found.optim, found.schedule) == (expected.optim, expected.schedule)
    assert found.optim.eps == 1e-7
    long_decay = ("--train.max_steps", "1000", "--schedule.decay_share", "0.95")
    asked = load_config([str(file), *long_decay, "--train.budget", "1m"], "test")
    plan = make_plan(with_length(asked, 100), 1)
    assert (plan.warmup_steps, plan.decay_steps) == (10, 90)


def test_no_pauses_leave_no_second_unused() -> None:
    config = config_with(eval__every=0, checkpoint__every=0, sample__every=0)
    budget = fit(config, Costs(step=0.5, start=3), 60)
    assert budget.steps == 114


def test_lengths_are_scaled_from_the_length_that_they_are_meant_for() -> None:
    meant = config_with(
        train__max_steps=1000,
        schedule__warmup_steps=100,
        schedule__name="wsd",
        eval__every=250,
        sample__every=500,
        checkpoint__every=200,
        log__every=10,
    )
    run = with_length(meant, 2500)
    assert run.schedule.warmup_steps == 250
    assert (run.eval.every, run.sample.every, run.checkpoint.every) == (625, 1250, 500)
    assert run.log.every == 25
    tokens = replace(meant, train=replace(meant.train, max_steps=None, max_tokens=65_536_000))
    assert with_length(tokens, 2500) == run
    nothing = config_with(eval__every=0, checkpoint__every=100, sample__every=50)
    assert with_length(nothing, 50).checkpoint.every == 50  # once in the run
    assert with_length(nothing, 50).eval.every == 0


# --------------------------------------------------------------------------- the second look

RUNS = st.fixed_dictionaries(
    {
        "schedule__name": st.sampled_from(["wsd", "constant"]),
        "schedule__warmup_steps": st.integers(0, 150),
        "schedule__decay_share": st.sampled_from([None, 0.1, 0.7]),
        "eval__every": st.integers(0, 600),
        "sample__every": st.integers(0, 600),
        "sample__growth": st.sampled_from([1.0, 1.5]),
        "checkpoint__every": st.integers(0, 600),
        "checkpoint__every_tokens": st.none() | st.integers(1, 10**8),
        "log__every": st.integers(1, 200),
    }
)


def what_is_due(config: Config, step: int) -> tuple[object, ...]:
    """Return what happens in a step of a run and after it."""
    state = TrainState(step=step, tokens=step * config.train.tokens_per_step)
    return (
        fraction_at(step - 1, config, make_plan(config, 1)),
        momentum_at(step - 1, 0.95, config.optim.muon_momentum_warmup),
        bool(config.eval.every) and step % config.eval.every == 0,
        samples_due(config.sample, step, last=False),
        state.save_is_due(config.checkpoint, config.train.tokens_per_step),
        step % config.log.every == 0,
    )


LONG_DECAY: dict[str, object] = {
    "schedule__name": "wsd",
    "schedule__warmup_steps": 0,
    "schedule__decay_share": 0.7,
}


@given(RUNS, st.integers(10, 1500), st.integers(1, 300), st.integers(0, 3000))
@example(LONG_DECAY, 150, 45, 10)  # 0.7 of the new length would begin at step 30
def test_another_length_changes_nothing_that_was_due_before(
    keys: dict[str, object], steps: int, step: int, further: int
) -> None:
    if keys["schedule__name"] == "constant":
        keys = keys | {"schedule__decay_share": None}
    before = with_length(config_with(train__max_steps=1000, **keys), steps)
    plan = make_plan(before, 1)
    if step >= steps or not rate_is_constant(before, plan, step):
        return
    longer = 2 * max(step, plan.warmup_steps) + further
    after = with_other_length(before, step, longer)
    assert make_plan(after, 1).max_steps == longer
    for earlier in range(1, step + 1):
        assert what_is_due(before, earlier) == what_is_due(after, earlier)


@pytest.mark.parametrize("name", ["wsd", "constant"])
@pytest.mark.parametrize("measured", [0.3, 0.5, 1.0, 1.5, 3.5])
def test_a_busy_machine_costs_no_budget(name: str, measured: float) -> None:
    """The first measurement was so many times the real one; the run ends near its budget."""
    config = config_with(
        train__max_steps=1000, schedule__name=name, schedule__warmup_steps=10, eval__every=250
    )
    real = Costs(step=0.2, evaluation=1, samples=0.3, save=0.1)
    budget = fit(config, real.at_speed(measured * real.step), 285)
    run = with_budget(config, budget)
    plan = replace(make_plan(run, 1), budget=budget)
    step = look_step(budget, 0)
    spent = seconds_ahead(run, real, 0, plan.max_steps)
    spent -= seconds_ahead(run, real, step, plan.max_steps)
    looked = fit_again(run, plan, step, real.step, 285 - spent)
    ends = spent + seconds_ahead(with_budget(config, looked), real, step, looked.steps)
    assert 0.97 * 285 < ends <= 285
    if measured in (0.3, 3.5):
        assert looked.steps != budget.steps
    assert looked.first_steps == budget.steps


def test_a_rate_that_falls_keeps_the_length() -> None:
    for keys in ({"schedule__name": "cosine"}, {"schedule__name": "wsd"}):
        config = config_with(train__max_steps=100, schedule__decay_share=0.95, **keys)
        budget = fit(config, Costs(step=3), 285)
        plan = replace(make_plan(with_budget(config, budget), 1), budget=budget)
        looked = fit_again(with_budget(config, budget), plan, 9, 1.0, 200)
        assert (looked.steps, looked.looked_at) == (budget.steps, 9)


def test_a_run_that_is_far_too_slow_still_decays() -> None:
    config = config_with(train__max_steps=1000, schedule__name="wsd")
    budget = fit(config, Costs(step=0.1), 100)
    run = with_budget(config, budget)
    looked = fit_again(run, replace(make_plan(run, 1), budget=budget), 100, 5.0, -400)
    assert looked.steps == 200
    assert 0 < make_plan(with_budget(config, looked), 1).decay_steps <= 100


def test_a_refusal_says_how_long_the_shortest_run_takes() -> None:
    config = config_with(train__budget="1m", checkpoint__keep_best=False)
    with pytest.raises(UserError, match=r"take 116 s \(a step 9 s, .*raise it to 116s, or lower"):
        fit(config, Costs(step=9.0, evaluation=4, save=1), 46.5)
    enough = config_with(train__budget="116s", checkpoint__keep_best=False)
    spent = 0.95 * 60 - 46.5  # by the measurement
    assert fit(enough, Costs(step=9.0, evaluation=4, save=1), 0.95 * 116 - spent).steps == 10


# --------------------------------------------------------------------------- stages


def staged(*edges: float) -> Config:
    """Return a config of 1,000 steps with a stage from each edge, each with a larger batch."""
    stages = [
        Stage(edge, {"train.tokens_per_step": 1024 * (number + 2)})
        for number, edge in enumerate(edges)
    ]
    train = TrainConfig(tokens_per_step=1024, micro_batch_size=1, max_steps=1000)
    return Config(
        model=ModelConfig(block_size=64, n_embd=32, n_head=2),
        train=train,
        schedule=ScheduleConfig(name="constant"),
        stages=tuple(stages),
    )


def test_edges_are_scaled_with_the_length() -> None:
    run = with_length(staged(0.25, 600), 500)
    assert [stage.from_ for stage in run.stages] == [0.25, 300]
    assert first_steps(run, 500) == [0, 125, 300]


@pytest.mark.parametrize("steps", [210, 400, 1000, 1700])
@pytest.mark.parametrize(
    "edges",
    [(0.05, 0.5), (50, 500), (0.0999, 0.11, 0.12), (0, 0.1, 0.9), (0.98, 0.99, 0.999)],
)
def test_a_second_look_moves_no_stage_that_has_begun(edges: tuple[float, ...], steps: int) -> None:
    before = staged(*edges)
    after = with_other_length(before, 100, steps)
    was, new = first_steps(before, 1000), first_steps(after, steps)
    for first, other in zip(was, new, strict=True):
        assert first == other if first < 100 else other >= 100
        expected = round(first * steps / 1000)
        assert first < 100 or expected < 102 or expected > steps - 4 or other == expected
    assert [span.first_step for span in spans(after, steps)] == new  # each has a step


def test_a_step_of_a_larger_batch_counts_as_what_it_takes() -> None:
    config = staged(0.5)
    costs = Costs(step=1.0, relative=(1.0, 2.0))
    budget = fit(replace(config, train=replace(config.train, budget="1h")), costs, 3000.0)
    assert budget.steps == 2000
    run = with_budget(config, budget)
    assert costs.total(run, budget.steps) == 3000.0


def test_checkpoints_by_tokens_follow_the_batch_of_each_stage() -> None:
    config = staged(0.5)
    state = TrainState()
    due = set()
    for step in range(1, 1001):
        size = 1024 if step <= 500 else 2048
        state.step = step
        state.tokens += size
        if state.save_is_due(CheckpointConfig(every=0, every_tokens=10_000), size):
            due.add(step)
    assert token_steps(config, 1000, 10_000) == due
    assert (
        reference_steps(
            replace(config, train=replace(config.train, max_steps=None, max_tokens=state.tokens))
        )
        == 1000
    )


def test_a_second_look_in_a_later_stage_knows_how_much_longer_its_steps_take() -> None:
    """The steps of the second stage take 8 times as long; the machine is as fast as measured."""
    config = replace(staged(0.05), schedule=ScheduleConfig(name="wsd", decay_share=0.2))
    config = replace(config, train=replace(config.train, budget="1h"))
    budget = fit(config, Costs(step=1.0, relative=(1.0, 8.0)), 3000.0)
    run = with_budget(config, budget)
    plan = replace(make_plan(run, 1), budget=budget)
    step = look_step(budget, 0)
    spent = budget.costs.training(run, budget.steps, last=step)
    assert run.stages[0].from_ * budget.steps < step
    looked = fit_again(run, plan, step, 1.0, 3000.0 - spent)
    assert looked.steps == pytest.approx(budget.steps, rel=0.01)


def test_a_budget_finds_a_length_for_stages_near_the_end() -> None:
    """Shorter lengths are tried, at which they would have no step."""
    config = staged(0.9, 0.95)
    config = replace(
        config,
        train=replace(config.train, budget="1h", max_steps=None),
        checkpoint=CheckpointConfig(every=0, every_tokens=10_000),
        eval=EvalConfig(every=10),
        sample=SampleConfig(every=0),
    )
    assert make_plan(config, 1).max_steps  # of the rehearsal
    budget = fit(config, Costs(step=1.0, relative=(1.0, 2.0, 3.0)), 3000.0)
    run = with_budget(config, budget)
    assert len(make_plan(run, 1).stages) == 3
