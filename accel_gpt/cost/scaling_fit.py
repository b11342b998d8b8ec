"""Fit a scaling law to the rungs of a ladder, with a bootstrap for its intervals.

The fit minimizes the Huber loss of the error in log L, from a grid of starting points (Hoffmann et
al. 2022, appendix D.3). The shapes n, K and M are defined in scaling.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from types import MappingProxyType

import numpy as np

from accel_gpt.config.plan import plural
from accel_gpt.cost.scaling import Floats, Law, Size, log_loss, log_terms
from accel_gpt.errors import UserError

HUBER = 1e-3  # error in log L above which the Huber loss is linear; Hoffmann et al. 2022
# By the number of sizes in the law. Two values of a size cannot tell the floor E from its power
# law. One rung more than there are constants, 3 or 5, shows how far runs are from the law.
FEWEST_VALUES: Mapping[int, int] = MappingProxyType({1: 4, 2: 3})  # different values of each size
FEWEST_RUNGS: Mapping[int, int] = MappingProxyType({1: 4, 2: 6})
DRAWS = 200  # bootstrap draws; they give the ends of a 90% interval to a tenth of its width
STARTING_SHARES = (0.2, 0.5, 0.8)  # E divided by the lowest loss
STARTING_EXPONENTS = (0.3, 0.7, 1.5)  # published exponents are 0.05 to 0.8
LOWEST = -5.0  # lower bound of log E
STEEPEST = 3.0  # upper bound of an exponent; published exponents are 0.05 to 0.8
FLAT = 1e-3  # of the lowest loss: the loss does not fall with a size whose term changes by less
ROUNDS = 100  # iterations of the fit; assumption
# Sizes and ratios count as equal below this factor: rounding to whole steps changes them.
SAME = 1.05
# of `ladder`, that give more values of a size
OPTIONS: Mapping[str, str] = MappingProxyType(
    {"parameters": "--depths", "tokens": "--ratios", "flops": "--depths or --ratios"}
)


class NoLawError(UserError):
    """No law can be fitted to the rungs of a ladder.

    `flat` lists the sizes (parameters, tokens or flops) with which the loss does not fall. `remedy`
    tells whether the message says what to do.
    """

    def __init__(self, message: str, flat: Sequence[str] = (), remedy: bool = False) -> None:
        super().__init__(message)
        self.flat = flat
        self.remedy = remedy


def law_terms(sizes: Sequence[Size]) -> tuple[str, ...]:
    """Choose the sizes in the law of n runs.

    The law is in FLOPs if all runs have the same ratio of tokens to parameters, else in parameters
    and tokens. Raises `NoLawError` if the runs do not determine its constants.
    """
    ratios = [size.tokens / size.parameters for size in sizes]
    names = ("flops",) if count_values(ratios) <= 1 else ("parameters", "tokens")
    for name in names:
        found = count_values([getattr(size, name) for size in sizes])
        needed = FEWEST_VALUES[len(names)]
        if found < needed:
            raise NoLawError(
                f"the rungs have {plural(found, 'value')} of {listed([name])}, but a law in "
                f"{listed(names)} needs {needed}; give more {OPTIONS[name]}",
                remedy=True,
            )
    needed = FEWEST_RUNGS[len(names)]
    found = count_sizes(sizes)
    if found < needed:
        raise NoLawError(
            f"there are {found} rungs of different sizes, but a law in {listed(names)} needs "
            f"{needed}; give more --depths or --ratios",
            remedy=True,
        )
    return names


def count_sizes(sizes: Sequence[Size]) -> int:
    """Count the different sizes: runs with another seed repeat one."""
    lengths: defaultdict[int, list[int]] = defaultdict(list)  # tokens, by parameters
    for size in sizes:
        lengths[size.parameters].append(size.tokens)
    return sum(count_values(tokens) for tokens in lengths.values())


def count_values(numbers: Sequence[float]) -> int:
    """Count the different numbers; neighbours that differ by less than a factor `SAME` are one."""
    ordered = sorted(numbers)
    steps = sum(after >= SAME * before for before, after in pairwise(ordered))
    return len(ordered[:1]) + steps


def fit_law(sizes: Sequence[Size], losses: Sequence[float]) -> Law:
    """Fit a law to n runs and their losses in nats; raises `NoLawError` if no law fits."""
    names = law_terms(sizes)
    center = []
    for name in names:
        logarithms = [np.log(getattr(size, name)) for size in sizes]
        center.append(float(np.exp(np.mean(logarithms))))
    features = Law(names, center, (), 0.0, ()).features(sizes)
    targets = np.log(losses)
    best = best_fit(features, targets, names)
    fitted = log_loss(best, features)
    free = len(sizes) - len(best)  # degrees of freedom
    noise = np.sqrt(np.sum((targets - fitted) ** 2) / free)
    # Each draw takes a noise from its distribution given the residuals, and new points around the
    # fit. With few rungs, intervals are therefore as wide as with Student's t-distribution.
    generator = np.random.default_rng(0)
    spread = noise * np.sqrt(free / generator.chisquare(free, (DRAWS, 1)))
    drawn = fitted + spread * generator.standard_normal((DRAWS, len(fitted)))
    coefficients, _ = minimize(features, drawn, np.tile(best, (DRAWS, 1)))
    draws = np.hstack([spread, coefficients])
    return Law(
        sizes=names,
        center=center,
        fit=eight_digits(best),
        noise=eight_digits([noise])[0],
        draws=[eight_digits(draw) for draw in draws],
    )


def eight_digits(values: Floats | Sequence[float]) -> list[float]:
    """Round to eight digits, since the last digits of a fit depend on the machine."""
    return [float(f"{value:.8g}") for value in values]


def best_fit(features: Floats, targets: Floats, names: Sequence[str]) -> Floats:
    """Fit the coefficients (1 + 2 K,) from all starting points, and return the best ones.

    `names` (K,) are the names of the sizes in `features`. Raises `NoLawError` if the best exponents
    are at a bound, or the fit does not converge.
    """
    K = features.shape[1]
    starts = []
    for share, *exponents in product(STARTING_SHARES, *[STARTING_EXPONENTS] * K):
        rest = np.log((np.exp(np.median(targets)) - share * np.exp(targets.min())) / K)
        start = [np.log(share) + targets.min()]
        for exponent in exponents:
            start += [rest, exponent]
        starts.append(start)
    found, costs = minimize(features, np.tile(targets, (len(starts), 1)), np.array(starts))
    best = found[np.argmin(costs)]
    flat = []
    steep = []
    terms = np.exp(log_terms(best, features) - targets.min())[:, 1:]  # (n, K), of the lowest loss
    for k, name in enumerate(names):
        if terms[:, k].max() - terms[:, k].min() < FLAT:
            flat.append(name)
        elif best[2 + 2 * k] > 0.999 * STEEPEST:
            steep.append(name)
    if flat:
        raise NoLawError(f"the loss of the rungs does not fall with their {listed(flat)}", flat)
    if steep:
        raise NoLawError(
            f"the loss of the rungs falls faster with their {listed(steep)} than a power law does"
        )
    if not np.isfinite(costs.min()):
        raise NoLawError("the fit to the losses of the rungs does not converge")
    return np.asarray(best)


def listed(sizes: Sequence[str]) -> str:
    """Join the names of sizes with "and"."""
    return " and ".join(name.replace("flops", "FLOPs") for name in sizes)


def minimize(features: Floats, targets: Floats, starts: Floats) -> tuple[Floats, Floats]:
    """Fit coefficients (M, 1 + 2 K) to each of the `targets` (M, n); also return the costs (M,).

    This is the Levenberg-Marquardt method. Each iteration updates the weights of the squared errors
    for the Huber loss.
    """
    found = starts.copy()
    damping = np.full((len(starts), 1, 1), 1e-3)
    K = features.shape[1]
    unit = np.eye(starts.shape[1])
    low = [LOWEST, *[-np.inf, 0.0] * K]
    high = [np.inf, *[np.inf, STEEPEST] * K]

    def cost(coefficients: Floats) -> tuple[Floats, Floats]:
        error = log_loss(coefficients[:, None], features) - targets
        clipped = np.clip(error, -HUBER, HUBER)
        return np.sum(clipped * (error - clipped / 2), 1), error

    costs, error = cost(found)
    for _ in range(ROUNDS):
        slopes = jacobian(found[:, None], features)  # (M, n, 1 + 2 K)
        weighted = slopes * (HUBER / np.maximum(np.abs(error), HUBER))[..., None]
        square = np.swapaxes(weighted, 1, 2) @ slopes
        square += damping * square * unit + 1e-12 * unit
        gradient = np.swapaxes(weighted, 1, 2) @ error[..., None]
        step = np.linalg.solve(square, gradient)[..., 0]
        tried = np.clip(found - step, low, high)
        tried_costs, tried_error = cost(tried)
        better = tried_costs < costs
        found[better] = tried[better]
        costs[better] = tried_costs[better]
        error[better] = tried_error[better]
        damping = np.clip(damping * np.where(better, 0.3, 5.0)[:, None, None], 1e-12, 1e12)
    return found, costs


def jacobian(coefficients: Floats, features: Floats) -> Floats:
    """Compute the Jacobian (..., n, 1 + 2 K) of log L in the coefficients (..., 1 + 2 K)."""
    terms = log_terms(coefficients, features)
    shares = np.exp(terms - np.logaddexp.reduce(terms, axis=-1, keepdims=True))
    found = np.empty((*shares.shape[:-1], coefficients.shape[-1]))
    found[..., 0] = shares[..., 0]
    found[..., 1::2] = shares[..., 1:]
    found[..., 2::2] = -shares[..., 1:] * features
    return found
