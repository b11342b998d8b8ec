"""The plan: every number follows from config and world size, or the error names what would fit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_gpt.config.experiment import Config, ScheduleConfig, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError
from accel_gpt.optim.schedule import lr_fraction


def config(schedule: ScheduleConfig | None = None, block_size: int = 1024, **train: Any) -> Config:
    return Config(
        model=ModelConfig(block_size=block_size),
        train=TrainConfig(**{"max_steps": 100, **train}),
        schedule=schedule or ScheduleConfig(),
    )


@given(micro=st.integers(1, 8), accumulation=st.integers(1, 8), world=st.integers(1, 8))
def test_micro_steps_of_all_processes_number_the_sequences_of_a_step(
    micro: int, accumulation: int, world: int
) -> None:
    asked = micro * accumulation * world * 32
    plan = make_plan(
        config(block_size=32, tokens_per_step=asked, micro_batch_size=micro), world_size=world
    )
    position = 7 * plan.sequences_per_step
    numbered = [list(plan.micro_step_starts(rank, position)) for rank in range(world)]
    assert (plan.tokens_per_step, plan.accumulation_steps) == (asked, accumulation)
    assert {len(firsts) for firsts in numbered} == {accumulation}
    in_order = [first for step in zip(*numbered, strict=True) for first in step]
    assert in_order == list(range(position, position + plan.sequences_per_step, micro))


def test_tokens_become_steps_rounded_up() -> None:
    asked = config(
        ScheduleConfig(name="wsd", warmup_steps=3),
        block_size=64,
        tokens_per_step=4096,
        micro_batch_size=64,
    )
    tokens = replace(asked, train=replace(asked.train, max_steps=None, max_tokens=100_000))
    plan = make_plan(tokens, world_size=1)
    assert (plan.max_steps, plan.warmup_steps, plan.decay_steps) == (25, 3, 5)


@pytest.mark.parametrize(
    ("name", "max_steps", "warmup", "decay"),
    [("wsd", 2, 1, 1), ("cosine", 1, 0, 1), ("linear", 11, 10, 1), ("constant", 2, 2, 1)],
)
def test_a_warm_up_is_at_most_the_run_and_a_cut_one_is_told(
    name: str, max_steps: int, warmup: int, decay: int
) -> None:
    schedule = ScheduleConfig(name=name, warmup_steps=10)  # type: ignore[arg-type]  # a Literal
    plan = make_plan(config(schedule, max_steps=max_steps, micro_batch_size=8), 1)
    assert (plan.warmup_steps, plan.decay_steps) == (warmup, decay)
    told = plan.describe(schedule.warmup_steps).splitlines()[1]
    cut = "" if warmup == 10 else " (schedule.warmup_steps is 10)"
    assert told.endswith(f", {warmup} of them warm-up{cut}")
    rates = [lr_fraction(step, name, plan, 0.0) for step in range(max_steps)]
    assert max(rates) == 1


def test_the_fall_may_be_a_share_of_the_run() -> None:
    for name, share, steps in (("wsd", 0.7, 70), ("linear", 0.5, 50), ("wsd", None, 20)):
        schedule = ScheduleConfig(name=name, decay_share=share)  # type: ignore[arg-type]  # a Literal
        assert make_plan(config(schedule), 1).decay_steps == steps


@pytest.mark.parametrize(
    ("sequences", "asked", "world", "taken"),
    [(32, 32, 2, 16), (12, 12, 6, 2), (12, 12, 4, 3), (32, 32, 1, 32), (32, 8, 2, 8)],
)
def test_micro_batch_shrinks_until_the_processes_share_the_step(
    sequences: int, asked: int, world: int, taken: int
) -> None:
    one = config(tokens_per_step=sequences * 1024, micro_batch_size=asked)
    plan = make_plan(one, world_size=world)
    assert plan.micro_batch_size == taken
    assert plan.sequences_per_step == sequences


def test_micro_batch_of_a_reproducible_run_stays() -> None:
    exact = config(tokens_per_step=32 * 1024, micro_batch_size=32, reproducible=True)
    with pytest.raises(UserError, match="x 2 processes = 65,536"):
        make_plan(exact, world_size=2)
