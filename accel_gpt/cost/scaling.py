"""Predict the loss of a run by a law of its size, from the rungs of a ladder. No torch.

L = E + A / N^a + B / D^b (Hoffmann et al. 2022, equation 2), N parameters of blocks and head, D
tokens; if all rungs have one ratio D / N, L = E + A / C^a, C FLOPs. `accel-gpt ladder` fits it
(`scaling_fit.py`) and writes it into ladder.json, which `accel-gpt plan --ladder` reads.

Shapes: n rungs or points, K sizes that the law has (N and D, or C), M bootstrap draws. A row of
coefficients (1 + 2 K,) is (log E, log A, a, log B, b), the sizes over their `center`.
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
LEVEL = 0.9  # of all intervals
INTERVAL = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # its ends, as quantiles
# A prediction is a guess if a size lies farther beyond the rungs than the rungs lie apart, but at
# least the first and at most the second of these times; assumption
FAR = (2, 10)
NOISY = 0.006  # of a rung around the law: predictions missed above it, docs/explanation/ladder.md
EPOCHS = 4  # text that is repeated so often is worth as much as new; Muennighoff et al. 2023
SIZES = ("parameters", "tokens", "flops")  # fields of `Size`
SEED = 0  # of the noise of predictions


class Size(NamedTuple):
    """What the law knows of a run."""

    parameters: int  # N, of blocks and head
    tokens: int  # D
    flops: float  # C, of the run


class Prediction(NamedTuple):
    """A loss in nats per token, and the interval in which a run's will lie."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law with its bootstrap draws."""

    sizes: Sequence[str]  # names of the fields of `Size` that it has
    center: Sequence[float]  # (K,)
    fit: Sequence[float]  # (1 + 2 K,)
    noise: float  # standard deviation of a rung's log loss around the law
    draws: Sequence[Sequence[float]]  # (M, 2 + 2 K): the noise of a draw, its coefficients

    def features(self, sizes: Sequence[Size]) -> Floats:
        """Return the logarithms (n, K) of the sizes that the law has, over its center."""
        rows = []
        for size in sizes:
            rows.append([float(getattr(size, name)) for name in self.sizes])
        return np.asarray(np.log(np.array(rows) / np.array(self.center)))

    def predict(self, size: Size, error: float = 0.0) -> Prediction:
        """Predict the loss of a run of that size; `error`: a further relative standard error."""
        x = self.features([size])[0]
        draws = np.array(self.draws)
        spread = np.hypot(draws[:, 0], error)
        noise = spread * np.random.default_rng(SEED).standard_normal(len(draws))
        losses = np.exp(log_loss(draws[:, 1:], x) + noise)
        low, high = np.quantile(losses, INTERVAL).tolist()
        loss = float(np.exp(log_loss(np.array(self.fit), x)))
        return Prediction(loss, low, high)

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """Return E, A, a (and B, b) in nats, parameters, tokens or FLOPs, with their intervals."""
        rows = np.vstack([self.fit, np.array(self.draws)[:, 1:]])  # of the fit, then of the draws
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
    """Return log L (...,) of coefficients (..., 1 + 2 K) at features (..., K)."""
    return np.asarray(np.logaddexp.reduce(log_terms(coefficients, features), axis=-1))


def log_terms(coefficients: Floats, features: Floats) -> Floats:
    """Return the logarithms (..., 1 + K) of E and of what each size adds to it."""
    added = coefficients[..., 1::2] - coefficients[..., 2::2] * features
    first = np.broadcast_to(coefficients[..., :1], (*added.shape[:-1], 1))
    return np.concatenate([first, added], axis=-1)


@dataclass(frozen=True)
class Ladder:
    """What ladder.json holds."""

    title: str
    law: Law
    rungs: Sequence[Mapping[str, Any]]  # by compute: depth, ratio, seed, sizes, loss, ...
    left_out: Sequence[str]  # rungs that diverged
    config: Mapping[str, Any]  # the keys that are set; model.depth: whether all follows from it
    data: Mapping[str, Any]  # fingerprints, vocab_size, folder, train_tokens or None
    bits_per_byte: float | None  # of a loss of one nat per token
    windows: float  # relative standard error of a loss by the choice of the evaluated sequences

    def content(self) -> dict[str, Any]:
        """Return what ladder.json holds; the constants of the law are for readers."""
        constants = {name: list(value) for name, value in self.law.constants().items()}
        return asdict(self) | {"constants": constants}

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the rungs."""
        return [Size(*(rung[name] for name in SIZES)) for rung in self.rungs]

    @property
    def depths(self) -> list[int]:
        """Depths of the rungs, each once, ascending."""
        return sorted({rung["depth"] for rung in self.rungs})

    def warnings(self, size: Size) -> list[str]:
        """Say what makes a prediction for a run of that size a guess."""
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
            found.append(f"the rungs lie {self.law.noise:.1%} around the law")
        epochs = size.tokens / (self.data["train_tokens"] or math.inf)
        if epochs > EPOCHS:
            found.append(f"its text is read {epochs:,.0f} times")
        return found


def read_ladder(folder: str | Path) -> Ladder:
    """Read the ladder in a folder, or in the file itself; `UserError` if there is none."""
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
            f"--ladder {folder} cannot be read: {error.strerror}; expected the folder of accel-gpt "
            "ladder, which writes ladder.json when its rungs are trained"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is not a ladder: {error}") from None
    return ladder
