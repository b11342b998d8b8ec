"""The learning rate at each step, against the tables of the field and as properties."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_gpt.config.plan import Plan
from accel_gpt.optim.schedule import lr_fraction, momentum_at

PEAK, MIN = 6e-4, 6e-5


def plan(max_steps: int, warmup: int, decay: int) -> Plan:
    return Plan(1, 1, 8, 1, max_steps, warmup, decay)


def test_gpt2_reproduction_table() -> None:
    p = plan(95_365, 715, 95_365 - 715)
    at = {s: PEAK * lr_fraction(s, "cosine", p, MIN / PEAK) for s in (0, 357, 714, 715, 95_365)}
    assert at[0] == pytest.approx(8.4e-7, rel=2e-3)
    assert at[357] == pytest.approx(3e-4, rel=2e-3)
    assert at[714] == at[715] == PEAK
    assert at[95_365] == pytest.approx(MIN)


def test_wsd_is_stable_until_its_tail() -> None:
    p = plan(100, 10, 20)
    assert [lr_fraction(s, "wsd", p, 0.0) for s in (9, 50, 80)] == [1.0, 1.0, 1.0]
    assert lr_fraction(90, "wsd", p, 0.0) == pytest.approx(0.5)
    assert lr_fraction(100, "wsd", p, 0.0) == 0.0


@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    floor=st.floats(0, 1),
)
def test_within_bounds_and_never_rising_after_warmup(
    name: str, warmup: int, length: int, floor: float
) -> None:
    p = plan(warmup + length, warmup, length)
    values = [lr_fraction(s, name, p, floor) for s in range(warmup + length + 3)]
    assert all(0 < v <= 1 for v in values[:warmup])
    after = values[warmup:]
    assert all(floor - 1e-12 <= v <= 1 + 1e-12 for v in after)
    assert all(b <= a + 1e-12 for a, b in pairwise(after))
    assert math.isclose(after[0], 1.0)


def test_muons_momentum_warms_up() -> None:
    values = [momentum_at(s, 0.95, 100) for s in (0, 50, 100, 999)]
    assert values == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert momentum_at(0, 0.95, 0) == 0.95
    assert momentum_at(0, 0.5, 100) == 0.5
