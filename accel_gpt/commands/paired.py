"""Compare the losses of a setting with the losses of a baseline, paired by seed.

The test is sequential: you may look at it after each seed, and add seeds at will.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WRONG = 0.05  # largest share of sweeps of equal settings in which a setting seems better or worse
# Variance of an effect, in variances of a difference; assumption: it is several times the noise
EFFECT_VARIANCE = 9.0
FEWEST = 3  # seeds; with two, the Bayes factor is below 1 / WRONG for any differences


@dataclass(frozen=True)
class Comparison:
    """What the differences of a setting show: setting minus baseline, so below 0 is better."""

    differences: Mapping[int, float]  # by seed, without the seeds with which a run diverged
    mean: float  # inf: only the setting diverged, -inf: only the baseline, nan: no differences
    standard_error: float | None
    log_bayes_factor: float
    verdict: str
    reason: str  # if the mean is not the reason
    left_out: str  # seeds with which both diverged

    @property
    def clear(self) -> bool:
        """Return whether the setting is better or worse."""
        return self.verdict in ("better", "worse")

    @property
    def diverged(self) -> bool:
        """Return whether one of the two diverged with a seed with which the other did not."""
        return math.isinf(self.mean)

    @property
    def cell(self) -> str:
        """Return the mean difference with its standard error, or what there is."""
        if not math.isfinite(self.mean):
            return "diverged" if self.diverged else ""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.mean:+.4f}{error}"


def compare(
    losses: Mapping[int, float], baseline: Mapping[int, float], settings: int
) -> Comparison:
    """Compare losses by seed, inf if the run diverged; `settings`: number that the sweep compares.

    With each setting, the verdict takes a Bayes factor of `settings` / WRONG.
    """
    differences = {seed: losses[seed] - baseline[seed] for seed in losses if seed in baseline}
    finite = {seed: value for seed, value in differences.items() if math.isfinite(value)}
    one_diverged = {seed: value for seed, value in differences.items() if math.isinf(value)}
    both_diverged = [str(seed) for seed, value in differences.items() if math.isnan(value)]
    n = len(finite)
    mean = statistics.fmean(finite.values()) if n else math.nan
    evidence = log_bayes_factor([*finite.values()])
    verdict = "better" if mean < 0 else "worse"
    reason = ""
    if one_diverged:
        seed, mean = next(iter(one_diverged.items()))
        verdict = "better" if mean < 0 else "worse"
        reason = f"{'the baseline' if mean < 0 else 'it'} diverged with seed {seed}"
    elif n < FEWEST:
        verdict = "no verdict"
        seeds = "one seed" if n == 1 else f"{n} seeds"
        if n:
            reason = f"{seeds} cannot show a difference; give --seed 1,2,3,4,5"
    elif evidence < math.log(settings / WRONG):
        verdict = f"no difference that {n} seeds could show"
    return Comparison(
        differences=finite,
        mean=mean,
        standard_error=statistics.stdev(finite.values()) / math.sqrt(n) if n > 1 else None,
        log_bayes_factor=evidence,
        verdict=verdict,
        reason=reason,
        left_out=f"; both diverged with seed {', '.join(both_diverged)}" if both_diverged else "",
    )


def log_bayes_factor(differences: Sequence[float]) -> float:
    """Return the log of how much likelier the differences are with an effect than without.

    The Bayes factor of a t-test: a normal prior on the effect, and the right Haar measure on the
    standard deviation (Gönen et al. 2005, "The Bayesian two-sample t test", here for one sample).
    Sums of squares stand in place of t, which equal differences do not have. Without an effect it
    is a martingale with mean 1 (Lai 1976, "On confidence sequences"; Hendriksen, de Heide &
    Grünwald 2021, "Optional stopping with Bayes factors"). By Ville's inequality it then reaches
    1 / WRONG with a probability of at most WRONG, however often you look.
    """
    n = len(differences)
    squares = sum(difference**2 for difference in differences)
    share = 1 / (1 + n * EFFECT_VARIANCE)
    if squares == 0:
        return math.log(share) / 2
    explained = sum(differences) ** 2 / n
    rest = squares - (1 - share) * explained
    return (math.log(share) + n * math.log(squares / rest)) / 2
