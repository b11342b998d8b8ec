"""Predict the loss of a run with a scaling law, fitted to the rungs of a ladder. No torch.

L = E + A / N^a + B / D^b (Hoffmann et al. 2022, equation 2), with N parameters of blocks and head,
and D tokens. If all rungs have the same ratio D / N, L = E + A / C^a with C FLOPs. `accel-gpt
ladder` fits the law (`scaling_fit.py`) and writes ladder.json; `accel-gpt plan --ladder` reads it.

Shapes: n runs, K sizes in the law (2 for N and D, 1 for C), M bootstrap draws. Coefficients
(1 + 2 K,) are (log E, log A, a, log B, b), for sizes divided by `center`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accel_gpt.errors import UserError
from accel_gpt.files import read_json

Floats = npt.NDArray[np.float64]

FILE = "ladder.json"
LEVEL = 0.9  # probability of each interval
INTERVAL = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # the quantiles at the ends of an interval
# Smallest and largest factor beyond the rungs from which a prediction is a guess. Between them, the
# factor is the ratio of the largest to the smallest rung. Predictions for 4.2 times the FLOPs were
# within 1% unless the rungs were noisy, those for 4.6 and more were not
# (docs/explanation/ladder.md).
FAR = (2, 4.2)
# Relative deviation of the rungs from the law; predictions above it failed
# (docs/explanation/ladder.md).
NOISY = 0.006
EPOCHS = 4  # up to here, repeated text is worth as much as new text; Muennighoff et al. 2023
SIZES = ("parameters", "tokens", "flops")  # fields of `Size`
SEED = 0  # seed of the noise of predictions


class Size(NamedTuple):
    """The size of a run, from which a law predicts the loss."""

    parameters: int  # N, parameters of blocks and head
    tokens: int  # D
    flops: float  # C, FLOPs of the whole run


class Prediction(NamedTuple):
    """A predicted loss in nats per token, and the ends of its interval."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law with its bootstrap draws."""

    sizes: Sequence[str]  # the K fields of `Size` in the law
    center: Sequence[float]  # (K,), geometric mean of each size over the rungs
    fit: Sequence[float]  # (1 + 2 K,), fitted coefficients
    noise: float  # standard deviation of the log loss of the rungs around the law
    draws: Sequence[Sequence[float]]  # (M, 2 + 2 K): the noise of a draw, then its coefficients

    def features(self, sizes: Sequence[Size]) -> Floats:
        """Compute the features (n, K) of the law: logarithms of sizes divided by `center`."""
        rows = []
        for size in sizes:
            rows.append([float(getattr(size, name)) for name in self.sizes])
        return np.asarray(np.log(np.array(rows) / np.array(self.center)))

    def predict(self, size: Size, error: float = 0.0) -> Prediction:
        """Predict the loss of a run; `error` is an additional relative standard error."""
        x = self.features([size])[0]
        draws = np.array(self.draws)
        spread = np.hypot(draws[:, 0], error)
        noise = spread * np.random.default_rng(SEED).standard_normal(len(draws))
        losses = np.exp(log_loss(draws[:, 1:], x) + noise)
        low, high = np.quantile(losses, INTERVAL).tolist()
        loss = float(np.exp(log_loss(np.array(self.fit), x)))
        return Prediction(loss, low, high)

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """Compute E, A, a (and B, b) of the law without `center`, each with its interval.

        Losses are in nats per token.
        """
        rows = np.vstack([self.fit, np.array(self.draws)[:, 1:]])  # (1 + M, 1 + 2 K)
        values = {"E": np.exp(rows[:, 0])}
        for k, center in enumerate(self.center):
            factor = rows[:, 1 + 2 * k]
            exponent = rows[:, 2 + 2 * k]
            name = "AB"[k]
            values[name] = np.exp(factor + exponent * math.log(center))
            values[name.lower()] = exponent
        found = {}
        for name, column in values.items():
            low, high = np.quantile(column[1:], INTERVAL).tolist()
            found[name] = (float(column[0]), low, high)
        return found


def log_loss(coefficients: Floats, features: Floats) -> Floats:
    """Compute log L (...,) from coefficients (..., 1 + 2 K) and features (..., K)."""
    return np.asarray(np.logaddexp.reduce(log_terms(coefficients, features), axis=-1))


def log_terms(coefficients: Floats, features: Floats) -> Floats:
    """Compute the logarithms (..., 1 + K) of the terms of L: E, and one term for each size."""
    added = coefficients[..., 1::2] - coefficients[..., 2::2] * features
    first = np.broadcast_to(coefficients[..., :1], (*added.shape[:-1], 1))
    return np.concatenate([first, added], axis=-1)


@dataclass(frozen=True)
class Ladder:
    """The content of ladder.json."""

    title: str
    law: Law
    rungs: Sequence[Mapping[str, Any]]  # sorted by compute: depth, ratio, seed, sizes, loss, ...
    left_out: Sequence[str]  # the reasons, one for each rung that failed or diverged
    config: Mapping[str, Any]  # the dotted keys that the config sets
    data: Mapping[str, Any]  # fingerprint, vocab_size, folder, train_tokens (or None), ...
    bits_per_byte: float | None  # bits per byte at a loss of one nat per token; None: unknown
    windows: float  # relative standard error of the loss, from the choice of evaluated sequences

    def content(self) -> dict[str, Any]:
        """Return the content as JSON, with the constants of the law for human readers."""
        constants = {name: list(value) for name, value in self.law.constants().items()}
        return asdict(self) | {"constants": constants}

    @property
    def sizes(self) -> list[Size]:
        """The size of each rung."""
        return [Size(*(rung[name] for name in SIZES)) for rung in self.rungs]

    @property
    def depths(self) -> list[int]:
        """The distinct depths of the rungs, in ascending order."""
        return sorted({rung["depth"] for rung in self.rungs})

    def warnings(self, size: Size) -> list[str]:
        """List the reasons why the prediction for a run of that size is a guess."""
        found = []
        for name, value in size._asdict().items():
            known = [getattr(one, name) for one in self.sizes]
            low = min(known)
            high = max(known)
            far = min(max(high / low, FAR[0]), FAR[1])
            if value > far * high:
                found.append(f"{value / high:,.1f} times the {name} of the largest rung")
            elif value < low / far:
                found.append(f"1/{low / value:,.1f} of the {name} of the smallest rung")
        if self.law.noise > NOISY:
            found.append(f"the rungs deviate from the law by {self.law.noise:.1%}")
        epochs = size.tokens / (self.data["train_tokens"] or math.inf)
        if epochs > EPOCHS:
            found.append(f"the run reads its text {epochs:,.0f} times")
        return found


def read_ladder(folder: str | Path) -> Ladder:
    """Read a ladder from its file, or from the folder that holds ladder.json.

    Raises `UserError` if the file cannot be read or is not a ladder.
    """
    path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
    try:
        found = read_json(path)
        found.pop("constants", None)
        ladder = Ladder(**found | {"law": Law(**found["law"])})
        values = [*ladder.law.fit, *ladder.law.center, ladder.law.noise, ladder.windows]
        if not np.isfinite(np.array([*values, *np.ravel(ladder.law.draws)])).all():
            raise ValueError("a value is not a number")
        ladder.warnings(ladder.sizes[0])
    except OSError as error:
        raise UserError(
            f"--ladder {folder} cannot be read: {error.strerror}; give the folder in which "
            "accel-gpt ladder has written ladder.json"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path} is not a ladder: {error}; give a file that accel-gpt ladder has written"
        ) from None
    return ladder
