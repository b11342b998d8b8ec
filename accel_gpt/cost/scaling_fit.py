"""Fit a scaling law to the rungs of a ladder, with a bootstrap for its intervals.

The fit minimizes the Huber loss of the error in log L, from a grid of starting points (Hoffmann et
al. 2022, appendix D.3). The shapes n, K and M are defined in scaling.py.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from accel_gpt.cost.scaling import Floats, Law, Size, log_loss, log_terms
from accel_gpt.errors import UserError

HUBER = 1e-3  # error in log L above which the Huber loss is linear; Hoffmann et al. 2022
FEWEST = 6  # rungs; a law in parameters and tokens has five constants
DRAWS = 200  # bootstrap draws; they give the ends of a 90% interval to a tenth of its width
STARTING_SHARES = (0.2, 0.5, 0.8)  # E divided by the lowest loss
STARTING_EXPONENTS = (0.3, 0.7, 1.5)  # published exponents are 0.05 to 0.8
LOWEST = -5.0  # lower bound of log E
STEEPEST = 3.0  # upper bound of an exponent; published exponents are 0.05 to 0.8
FLAT = 1e-3  # the loss does not fall with a size whose exponent is smaller
ROUNDS = 100  # iterations of the fit; assumption
# Largest factor between ratios of tokens to parameters that count as equal: rounding to whole steps
# changes the ratios.
SAME = 1.05


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
    and tokens. Raises `NoLawError` if there are too few runs.
    """
    ratios = [size.tokens / size.parameters for size in sizes]
    single = max(ratios) < SAME * min(ratios)
    names = ("flops",) if single else ("parameters", "tokens")
    needed = 3 if single else FEWEST
    if len(sizes) < needed:
        raise NoLawError(
            f"{len(sizes)} rungs are too few: a law in {listed(names)} needs {needed}; give "
            "more --depths or --ratios",
            remedy=True,
        )
    return names


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
    free = max(1, len(sizes) - len(best))  # degrees of freedom
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
    for name, exponent in zip(names, best[2::2].tolist(), strict=True):
        if exponent < FLAT:
            flat.append(name)
        elif exponent > STEEPEST - FLAT:
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
