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
    """What the seeds of a setting show: setting minus baseline, so below 0 is better."""

    differences: Mapping[int, float]  # by seed, without the seeds with which a run diverged
    seeds: int  # with which both runs ended
    diverged: Sequence[int]  # seeds with which the setting diverged
    baseline_diverged: Sequence[int]
    mean: float  # inf: no differences
    standard_error: float | None
    smallest: float  # mean that would be clear with this deviation; inf: none, or no deviation
    log_bayes_factor: float
    verdict: str

    @property
    def clear(self) -> bool:
        """Return whether the setting is better or worse."""
        return self.verdict in ("better", "worse")

    @property
    def settled(self) -> bool:
        """Return whether more seeds are useless: the answer is clear, or runs always diverge."""
        return self.clear or (self.seeds >= FEWEST and not self.differences)

    @property
    def cell(self) -> str:
        """Return the mean difference with its standard error, or what there is."""
        if self.differences:
            error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
            return f"{self.mean:+.4f}{error}"
        if self.diverged:
            return "diverged"
        return "baseline diverged" if self.baseline_diverged else ""


def compare(
    losses: Mapping[int, float],
    baseline: Mapping[int, float],
    settings: int,
    highest: bool = False,
) -> Comparison:
    """Compare losses by seed, inf if the run diverged; `settings`: number that the sweep compares.

    `highest`: the values are of another metric, and a high one is good. With each setting, the
    verdict takes a Bayes factor of `settings` / WRONG.
    """
    seeds = [seed for seed in losses if seed in baseline]
    diverged = {seed for seed in seeds if math.isinf(losses[seed])}
    baseline_diverged = {seed for seed in seeds if math.isinf(baseline[seed])}
    trained = [seed for seed in seeds if seed not in diverged | baseline_diverged]
    differences = {seed: losses[seed] - baseline[seed] for seed in trained}
    n = len(differences)
    mean = statistics.fmean(differences.values()) if n else math.inf
    deviation = statistics.stdev(differences.values()) if n > 1 else math.inf
    worse = len(diverged - baseline_diverged)
    better = len(baseline_diverged - diverged)
    from_losses = log_bayes_factor([*differences.values()])
    from_divergence = log_sign_factor(worse, better)
    evidence = from_losses + from_divergence
    effects = set()  # -1: better, 1: worse
    if from_losses > 0:
        effects.add(math.copysign(1, -mean if highest else mean))
    if worse != better:  # one such seed is no evidence, but a reason to call nothing better
        effects.add(math.copysign(1, worse - better))
    verdict = f"no difference that {len(seeds)} seeds could show"
    if len(seeds) < FEWEST:
        verdict = f"no verdict from fewer than {FEWEST} seeds"
    elif evidence >= math.log(settings / WRONG):
        verdict = "no verdict"  # lower losses, but it diverges more often; or the reverse
        if len(effects) == 1:
            verdict = "better" if effects == {-1} else "worse"
    return Comparison(
        differences=differences,
        seeds=len(seeds),
        diverged=sorted(diverged),
        baseline_diverged=sorted(baseline_diverged),
        mean=mean,
        standard_error=deviation / math.sqrt(n) if n > 1 else None,
        smallest=smallest_difference(n, deviation, settings),
        log_bayes_factor=evidence,
        verdict=verdict,
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


def smallest_difference(seeds: int, deviation: float, settings: int) -> float:
    """Return the smallest mean difference that gives a verdict; inf if none does.

    `deviation`: standard deviation of the differences. `log_bayes_factor` of the sum of squares
    around the mean, R = (seeds - 1) deviation^2, and of q = seeds mean^2 is solved for the mean:
    (q + R) / (q share + R) >= factor.
    """
    if seeds < fewest_seeds(settings):
        return math.inf
    share = 1 / (1 + seeds * EFFECT_VARIANCE)
    factor = ((settings / WRONG) ** 2 / share) ** (1 / seeds)
    squares = (factor - 1) / (1 - factor * share) * (seeds - 1) * deviation**2
    return math.sqrt(squares / seeds)


def fewest_seeds(settings: int) -> int:
    """Return with how many seeds a difference can give a verdict, if it is large enough.

    The Bayes factor of equal differences is (1 + seeds x EFFECT_VARIANCE)^((seeds - 1) / 2).
    """
    seeds = FEWEST
    while (1 + seeds * EFFECT_VARIANCE) ** ((seeds - 1) / 2) <= settings / WRONG:
        seeds += 1
    return seeds


def log_sign_factor(worse: int, better: int) -> float:
    """Return the log of how much likelier the counts are with an effect than without.

    The counts are seeds with which only one of the two runs diverged. The Bayes factor of a sign
    test: a uniform prior on the share of `worse`, against one half. It too is a martingale with
    mean 1. So is its product with the Bayes factor of the differences: a seed changes one of them.
    """
    n = worse + better
    return n * math.log(2) - math.log((n + 1) * math.comb(n, worse))
