"""Convert the metrics of runs to the JSON data that `page.js` draws.

    runs        [{name, clock {step, tokens, flops, seconds}, marks [{step, kind, text}],
                  stages [{step, label, text}], machines [{step, kind, label, text}]}]
    panels      [{name, title, unit, log, smooth, low, zero,
                  curves [{run, key, name, label, color, style, s, v, ms, m}]}]

`s` are steps and `v` values. A curve with more than `MOST_POINTS` is thinned: `v` has the lowest
and the highest value of each bucket. `m` has the means of the buckets at the steps `ms`, for
smoothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.config.plan import plural
from accel_gpt.report.curves import Floats, Metrics
from accel_gpt.report.machines import bands
from accel_gpt.report.runs import NamedRun
from accel_gpt.runs.folder import is_benchmark

MOST_POINTS = 1600  # points per curve, for about 1,200 pixels
MOST_MARKS = 400  # marks per run


@dataclass(frozen=True)
class Plot:
    """A plot of the page. A key that ends with a slash matches all keys with that prefix."""

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    log: bool = False  # logarithmic axis of the values
    factor: float = 1.0  # converts a recorded value to `unit`
    smooth: bool = False
    low: bool = False  # the first drop of its values may be cut off
    zero: bool = False  # the axis of the values begins at 0

    def recorded_keys(self, metrics: Metrics) -> list[str]:
        """Return the keys of the plot that a run recorded."""
        found: list[str] = []
        for key in self.keys:
            if key.endswith("/"):
                found += metrics.keys(key)
            elif key in metrics.columns:
                found.append(key)
        return found


LOSSES = ("train/loss", "eval/train_loss", "eval/val_loss")
LOSS = Plot("loss", "Loss", "nats per token", LOSSES, smooth=True, low=True)
PLOTS = (
    LOSS,
    Plot("val_sets", "Val loss by set", "nats per token", ("eval/val_loss/",), low=True),
    Plot("bits_per_byte", "Val bits per byte", "", ("eval/val_bits_per_byte",), low=True),
    Plot("lr", "Learning rate", "", ("train/lr",)),
    Plot("grad_norm", "Gradient norm", "", ("train/grad_norm",), log=True, smooth=True),
    Plot("updates", "Size of updates", "share of the weights", ("train/update_ratio/",), log=True),
    Plot("throughput", "Throughput", "tokens/s", ("perf/tokens_per_second",), smooth=True),
    Plot("mfu", "MFU", "% of the peak", ("perf/mfu",), factor=100, smooth=True),
    Plot("memory", "Peak memory", "GB", ("perf/memory_gb",), zero=True),
)
# prefixes of metrics that --code does not bring
OURS = (
    "eval/",
    "data/",
    "perf/",
    "launch/",
    "train/skipped",
    "train/spikes",
    "train/update_ratio/",
)
# names of the curves in a plot with several keys
NAMES = MappingProxyType(
    {"train/loss": "train", "eval/train_loss": "train, evaluated", "eval/val_loss": "val"}
)
# color indices for a report of one run; val has the same color in every plot
COLORS = MappingProxyType({"eval/val_loss": 1, "eval/val_bits_per_byte": 1, "eval/train_loss": 2})


def payload(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the data of the page, in the format of the module's docstring."""
    plots = [plot_entry(plot, runs) for plot in (*PLOTS, *further_plots(runs))]
    return {
        "runs": [
            {
                "name": run.name,
                "clock": clock_entry(run),
                "marks": all_marks(run)[:MOST_MARKS],
                "stages": [
                    {"step": stage.first_step, "label": stage.label, "text": stage.text}
                    for stage in run.stages
                ],
                "machines": [band._asdict() for band in bands(run)],
            }
            for run in runs
        ],
        "panels": [plot for plot in plots if plot["curves"]],
    }


def further_plots(runs: Sequence[NamedRun]) -> list[Plot]:
    """Return a plot for each result of a benchmark, and for each metric of a file of --code.

    Metrics with a common prefix, such as train/weight_norm/0 and train/weight_norm/1, share a plot.
    """
    listed = {key for plot in PLOTS for key in plot.keys}
    names: dict[str, None] = {}
    for key in dict.fromkeys(key for run in runs for key in sorted(run.metrics.columns)):
        group, slash, _ = key.rpartition("/")
        if is_benchmark(key):
            names[key] = None
        elif key not in listed and not key.startswith(OURS):
            names[group + slash if "/" in group else key] = None
    plots = []
    for number, name in enumerate(names):
        title = name.strip("/").removeprefix("train/").removeprefix("eval/")
        plots.append(Plot(f"further_{number}", title, "", (name,)))
    return plots


def clock_entry(run: NamedRun) -> dict[str, Any]:
    """Return the known clocks (step, tokens, FLOPs, seconds) at up to `MOST_POINTS` records."""
    metrics = run.metrics
    rates = np.array(run.stage_flops())[run.stage_of(metrics.steps)]
    flops = np.cumsum(np.diff(metrics.tokens, prepend=0) * rates)
    last = max(len(metrics.steps) - 1, 0)
    kept = np.unique(np.linspace(0, last, MOST_POINTS).astype(int))
    clocks = {
        "step": metrics.steps,
        "tokens": metrics.tokens,
        "flops": flops,
        "seconds": metrics.seconds,
    }
    entry = {}
    for name, values in clocks.items():
        if len(values) and np.isfinite(values).all():
            entry[name] = nine_digits(values[kept])
    return entry


def plot_entry(plot: Plot, runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the entry of one plot, with the curves of all runs."""
    keys = list(dict.fromkeys(key for run in runs for key in plot.recorded_keys(run.metrics)))
    keys.sort(key=lambda key: plot.keys.index(key) if key in plot.keys else 0)
    single = len(runs) == 1
    curves = []
    for index, key in enumerate(keys):
        several = len(plot.keys) > 1 or key not in plot.keys
        name = NAMES.get(key, key.split("/", 2)[-1]) if several else ""
        style = "dots" if key.startswith("eval/") else "line"
        if key == "eval/train_loss":
            style = "dotted"
        for number, run in enumerate(runs):
            if key not in run.metrics.columns:
                continue
            if not single:
                color = number
            elif plot.keys[0].endswith("/"):
                color = index
            else:
                color = COLORS.get(key, 0)
            curve: dict[str, Any] = {
                "run": number,
                "key": key,
                "name": name,
                "label": name if single else ", ".join(filter(None, (run.name, name))),
                "color": color,
                "style": style,
            }
            curves.append(curve | curve_points(run.metrics, key, plot))
    return {
        "name": plot.name,
        "title": plot.title,
        "unit": plot.unit,
        "log": plot.log,
        "smooth": plot.smooth,
        "low": plot.low,
        "zero": plot.zero,
        "curves": curves,
    }


def curve_points(metrics: Metrics, key: str, plot: Plot) -> dict[str, Any]:
    """Return steps and values of a curve, thinned if it has more than `MOST_POINTS`."""
    steps, values = metrics.curve(key)
    values = np.clip(values, -1e200, 1e200) * plot.factor  # means and axes must not overflow
    if len(values) <= MOST_POINTS:
        return {"s": nine_digits(steps), "v": nine_digits(values)}
    kept = thin(values, MOST_POINTS)
    points = {"s": nine_digits(steps[kept]), "v": nine_digits(values[kept])}
    if plot.smooth:
        points["ms"] = nine_digits(bucket_means(steps, MOST_POINTS // 2))
        points["m"] = nine_digits(bucket_means(values, MOST_POINTS // 2))
    return points


def all_marks(run: NamedRun) -> list[dict[str, Any]]:
    """Return marks at the resumes, the skipped updates and the loss spikes of a run."""
    marks: list[dict[str, Any]] = []
    for step in run.resumes():
        marks.append({"step": step, "kind": "resume", "text": f"resumed at step {step:,}"})
    marks += count_marks(run, "train/skipped", "skip", "skipped update")
    marks += count_marks(run, "train/spikes", "spike", "loss spike")
    return marks


def count_marks(run: NamedRun, key: str, kind: str, noun: str) -> list[dict[str, Any]]:
    """Return a mark at each record in which the counter `key` grew."""
    marks = []
    steps, counts = run.metrics.curve(key)
    counts_before = np.concatenate([[0.0], counts[:-1]])
    steps_before = np.concatenate([[0.0], steps[:-1]])
    for i in np.flatnonzero(counts > counts_before):
        first = int(steps_before[i]) + 1
        last = int(steps[i])
        where = f"step {last:,}" if first >= last else f"steps {first:,} to {last:,}"
        text = f"{plural(int(counts[i] - counts_before[i]), noun)}, {where}"
        marks.append({"step": last, "kind": kind, "text": text})
    return marks


# --------------------------------------------------------------------------- many points


def thin(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Return indices (m,), m <= `most`, of the values to draw.

    They are the first and the last value, and the minimum and the maximum of each bucket, so that
    no spike is lost.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for start, end in itertools.pairwise(bucket_edges(len(values), most // 2 - 1)):
        bucket = values[start:end]
        kept |= {start + int(bucket.argmin()), start + int(bucket.argmax())}
    return np.array(sorted(kept))


def bucket_means(values: Floats, buckets: int) -> Floats:
    """Return the mean of each bucket, shape (buckets,)."""
    edges = bucket_edges(len(values), buckets)
    return np.asarray(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


def bucket_edges(count: int, buckets: int) -> list[int]:
    """Return the starts of `buckets` equal buckets of `count` values, and the end of the last."""
    return [count * i // buckets for i in range(buckets + 1)]


def nine_digits(values: Floats) -> list[float | int]:
    """Round values to nine significant digits; whole numbers below 1e15 become exact integers.

    The page rounds them again, to four decimals: with fewer digits it would differ from the tables.
    """
    return [int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.9g}") for v in values.tolist()]
