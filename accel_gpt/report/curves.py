"""Read the records of a run as curves: steps and values of each metric. N: records."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.runs.folder import number

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """The records of a run as columns, in their order; `nan` if tokens or seconds are unknown."""

    steps: Floats  # (N,) completed updates, ascending
    tokens: Floats  # (N,)
    seconds: Floats  # (N,) since the run's first start
    # key -> indices of the n records that have it (n,), their values (n,)
    columns: dict[str, tuple[npt.NDArray[np.int64], Floats]]

    def curve(self, key: str) -> tuple[Floats, Floats]:
        """Return the steps and values of a key, each (n,); empty if it was never recorded."""
        rows, values = self.columns.get(key, (np.zeros(0, np.int64), np.zeros(0)))
        return self.steps[rows], values

    def last(self, key: str) -> float | None:
        """Return the last value of a key; None if it was never recorded."""
        values = self.curve(key)[1]
        return float(values[-1]) if len(values) else None

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        return sorted(key for key in self.columns if key.startswith(prefix))


def read_metrics(records: Iterator[dict[str, Any]]) -> Metrics:
    """Collect the finite numbers in `records` as columns."""
    steps = array("d")
    tokens = array("d")
    seconds = array("d")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for row, record in enumerate(records):
        steps.append(number(record.pop("step", None)))
        tokens.append(number(record.pop("tokens", None)))
        seconds.append(number(record.pop("time", None)))
        for key, value in record.items():
            value = value if type(value) is float else number(value)
            if not math.isfinite(value):
                continue
            if key not in columns:
                columns[key] = (array("q"), array("d"))
            rows, values = columns[key]
            rows.append(row)
            values.append(value)
    return Metrics(
        steps=np.array(steps),
        tokens=np.array(tokens),
        seconds=np.array(seconds),
        columns={
            key: (np.array(rows), np.array(values)) for key, (rows, values) in columns.items()
        },
    )
