"""The figures of a run as columns, read from a `metrics.jsonl` that anybody may have written.

A record that is not whole, as the last one of a run that is writing, is left out. N: records.
"""

import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel_gpt.files import load_json, open_file

LONGEST_LINE = 1 << 20  # bytes; ours have some hundred
MOST_KEYS = 500  # of one run; ours have some dozen
LARGEST_STEP = 1e15

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """What was recorded, by step; `nan` where tokens or seconds are not known."""

    steps: Floats  # (N,) completed updates, ascending
    tokens: Floats  # (N,)
    seconds: Floats  # (N,) of the whole run
    columns: dict[str, tuple[npt.NDArray[np.int64], Floats]]  # key -> records (n,), values (n,)

    def curve(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values (n,) of a key; empty where it was never recorded."""
        rows, values = self.columns.get(key, (np.zeros(0, np.int64), np.zeros(0)))
        return self.steps[rows], values

    def last(self, key: str) -> float | None:
        """The newest value of a key."""
        values = self.curve(key)[1]
        return float(values[-1]) if len(values) else None

    def named(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        return sorted(key for key in self.columns if key.startswith(prefix))


def read_figures(path: Path) -> Figures:
    """The records of a metrics.jsonl, which may be missing, by step; values are finite numbers."""
    clocks = tuple(array("d") for _ in range(3))
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for record in read_records(path):
        row = len(clocks[0])
        for clock, key in zip(clocks, ("step", "tokens", "time"), strict=True):
            clock.append(number(record.pop(key, None)))
        for key, value in record.items():
            figure = value if type(value) is float else number(value)
            if figure - figure != 0:  # not finite
                continue
            column = columns.get(key)
            if column is None:
                if len(columns) == MOST_KEYS:
                    continue
                column = columns[key] = (array("q"), array("d"))
            column[0].append(row)
            column[1].append(figure)
    steps, tokens, seconds = (np.array(clock) for clock in clocks)
    order = np.argsort(steps, kind="stable")  # what was evaluated later comes at the end
    rank = np.argsort(order, kind="stable")
    sorted_columns = {}
    for key, (rows, values) in columns.items():
        places = rank[np.array(rows)]
        by_step = np.argsort(places)
        sorted_columns[key] = (places[by_step], np.array(values)[by_step])
    steps = steps[order]
    tokens, seconds = (filled_in(steps, clock[order]) for clock in (tokens, seconds))
    return Figures(steps, tokens, seconds, sorted_columns)


def read_records(path: Path) -> Iterator[dict[str, object]]:
    """Objects with a step in the whole lines of a file."""
    try:
        file = open_file(path)
    except OSError:
        return
    with file:
        while line := file.readline(LONGEST_LINE):
            if not line.endswith(b"\n"):
                continue
            try:
                record = load_json(line.decode(), any_number=True)
            except ValueError:
                continue
            if type(record) is dict and 0 <= number(record.get("step")) < LARGEST_STEP:
                yield record


def number(value: object) -> float:
    """A number of JSON as a float; `nan` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def filled_in(steps: Floats, clock: Floats) -> Floats:
    """`clock` (N,), what a record does not tell taken from the steps around it."""
    known = np.isfinite(clock)
    if known.all() or not known.any():
        return clock
    return np.interp(steps, steps[known], clock[known])


def thin(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Indices (m,), m <= `most`, of values that show the same picture: two of each bucket.

    The smallest and the largest of it in their order, so that no spike is lost; all of few values.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for start, end in itertools.pairwise(bounds(len(values), most // 2 - 1)):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept))


def bounds(count: int, buckets: int) -> list[int]:
    """Where buckets of equally many values begin, and the end of the last."""
    return [count * i // buckets for i in range(buckets + 1)]


def means(values: Floats, buckets: int) -> Floats:
    """(buckets,): the mean of each bucket of `bounds`."""
    edges = bounds(len(values), buckets)
    sums = np.add.reduceat(values, edges[:-1])
    return np.asarray(sums / np.diff(edges))
