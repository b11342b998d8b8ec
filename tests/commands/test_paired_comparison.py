"""The sequential test: how often it is wrong, what it finds, its Bayes factor, diverged runs."""

import math

import numpy as np
import pytest

from accel_gpt.commands.paired_comparison import (
    EFFECT_VARIANCE,
    WRONG,
    compare,
    fewest_seeds,
    log_bayes_factor,
    smallest_difference,
)

BASELINE = dict.fromkeys(range(1, 21), 5.0)


def seeds_until_clear(differences: np.ndarray, settings: int = 1) -> int | None:
    """Look after each seed, as a sweep does."""
    losses = {}
    for seed, difference in enumerate(differences.tolist(), start=1):
        losses[seed] = 5.0 + difference
        if compare(losses, BASELINE, settings).clear:
            return seed
    return None


@pytest.mark.parametrize("settings", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_thing_compared_with_itself_is_rarely_better_or_worse(settings: int) -> None:
    """At most 5 % of 200 sweeps give any verdict, with 20 looks at each setting."""
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        noise = 0.01 * draw.standard_normal((settings, 20))
        wrong += any(seeds_until_clear(one, settings) is not None for one in noise)
    assert wrong <= WRONG * 200


def test_a_large_difference_is_found_within_few_seeds() -> None:
    draw = np.random.default_rng(0)
    seeds = [seeds_until_clear(0.01 * (draw.standard_normal(20) + 3)) or 99 for _ in range(200)]
    assert np.quantile(seeds, 0.9) <= 6


@pytest.mark.parametrize(("n", "mean"), [(2, 0.0), pytest.param(5, -0.5, marks=pytest.mark.slow)])
def test_the_bayes_factor_is_that_of_an_integral(n: int, mean: float) -> None:
    """Integrate the likelihood over log sigma (the right Haar prior) and over the effect."""
    x = np.random.default_rng(n).standard_normal(n) + mean
    log_sigma = np.linspace(-6, 9, 6001)[:, None]
    sigma = np.exp(log_sigma)

    def likelihood(effect: np.ndarray) -> np.ndarray:
        standard = x[None, None] / sigma[:, :, None] - effect[None, :, None]
        return np.exp(-0.5 * (standard**2).sum(-1) - n * log_sigma)

    effects = np.linspace(-30, 30, 1201)
    prior = np.exp(-0.5 * effects**2 / EFFECT_VARIANCE)
    with_effect = (likelihood(effects).sum(0) * prior).sum() / prior.sum()
    without = likelihood(np.zeros(1)).sum()
    assert log_bayes_factor(x.tolist()) == pytest.approx(math.log(with_effect / without), abs=1e-3)


@pytest.mark.parametrize("settings", [1, 2, 4, 9])
def test_the_smallest_difference_that_counts_is_where_the_bayes_factor_passes_its_bound(
    settings: int,
) -> None:
    bound = math.log(settings / WRONG)
    fewest = fewest_seeds(settings)
    for n in range(1, 21):
        noise = np.random.default_rng(n).standard_normal(n)
        noise -= noise.mean()
        deviation = float(noise.std(ddof=1)) if n > 1 else math.inf
        smallest = smallest_difference(n, deviation, settings)
        if n < fewest:
            assert smallest == math.inf
            assert log_bayes_factor((noise + 1e6).tolist()) < bound
            continue
        for sign in (-1, 1):
            assert log_bayes_factor((noise + 0.9999 * sign * smallest).tolist()) < bound
            assert log_bayes_factor((noise + 1.0001 * sign * smallest).tolist()) > bound
        losses = {seed: 5.0 + one for seed, one in enumerate(noise.tolist(), start=1)}
        assert compare(losses, BASELINE, settings).smallest == pytest.approx(smallest)


@pytest.mark.parametrize("mean", [-1e-4, 0.0, 1e-4])
def test_losses_that_show_nothing_do_not_veto_what_divergence_shows(mean: float) -> None:
    noise = [0.011, -0.013, 0.002, -0.007, 0.015, -0.008]  # with mean 0
    losses = {seed: 5.0 + mean + one for seed, one in enumerate(noise, start=1)}
    losses |= dict.fromkeys(range(7, 21), math.inf)
    assert compare(losses, BASELINE, 1).verdict == "worse"
    assert compare(BASELINE, losses, 1).verdict == "better"
    clearly_lower = {seed: loss - 1 for seed, loss in losses.items()}
    assert compare(clearly_lower, BASELINE, 1).verdict == "no verdict"


def diverging(rows: str) -> dict[int, float]:
    """Return losses by seed: x diverged, another digit is the loss."""
    return {seed: math.inf if one == "x" else float(one) for seed, one in enumerate(rows, 1)}


@pytest.mark.parametrize(
    ("losses", "baseline", "verdict", "cell", "settled"),
    [
        ("2x", "22", "no verdict from fewer than 3 seeds", "+0.0000", False),
        ("xxx", "222", "no difference that 3 seeds could show", "diverged", True),
        ("222", "xxx", "no difference that 3 seeds could show", "baseline diverged", True),
        ("xxxxxxxx", "22222222", "worse", "diverged", True),
        ("xxxxxxxxxx2", "22222222222", "worse", "+0.0000", True),
        ("222222222221", "xxxxxxxxxx22", "better", "-0.5000 ± 0.5000", True),
        ("xxxx2222", "2222xxxx", "no difference that 8 seeds could show", "diverged", True),
        ("1111x", "22222", "no verdict", "-1.0000 ± 0.0000", False),
        ("x1111", "x2222", "better", "-1.0000 ± 0.0000", True),
        ("2", "3", "no verdict from fewer than 3 seeds", "-1.0000", False),
    ],
)
def test_diverged_runs(losses: str, baseline: str, verdict: str, cell: str, settled: bool) -> None:
    found = compare(diverging(losses), diverging(baseline), 1)
    assert (found.verdict, found.cell, found.settled) == (verdict, cell, settled)
    assert found.diverged == [seed for seed, one in enumerate(losses, 1) if one == "x"]


def test_the_highest_value_of_another_metric_is_the_best() -> None:
    accuracies = {1: 0.51, 2: 0.61, 3: 0.41}
    baseline = {1: 0.30, 2: 0.40, 3: 0.20}
    assert compare(accuracies, baseline, 1, highest=True).verdict == "better"
    assert compare(accuracies, baseline, 1).verdict == "worse"
