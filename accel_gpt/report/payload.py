"""What is drawn: the plots of a report as plain data, for the page and for PNG files alike.

    runs        [{name, clock {step, tokens, seconds}, flops_per_token, marks [{step, kind, text}]}]
    panels      [{name, title, unit, log, smooth, low, guides [{value, label}],
                  curves [{run, key, name, label, color, style, best, s, v, ms, m}]}]
    reference   {clock, flops_per_token, s, v}, or null

`s` are steps and `v` values. A curve with more than `MOST_POINTS` is thinned: `v` has the lowest
and the highest value of each bucket; `m` has the means, which are smoothed, at the steps `ms`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.report.runs import NamedRun
from accel_gpt.training.run_folder import Floats, Metrics

MOST_POINTS = 1600  # of a curve, drawn on some 1,200 pixels
MOST_MARKS = 400  # of a run


@dataclass(frozen=True)
class Plot:
    """One plot. A key that ends with a slash stands for all keys that begin with it."""

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    log: bool = False  # the axis of the values
    factor: float = 1.0  # from what is recorded to `unit`
    smooth: bool = False
    low: bool = False  # lower is better: the best value is labelled, the first drop may be cut

    def present(self, metrics: Metrics) -> list[str]:
        """The keys that are recorded."""
        found: list[str] = []
        for key in self.keys:
            found += metrics.keys(key) if key.endswith("/") else [key] * (key in metrics.columns)
        return found


LOSSES = ("train/loss", "eval/train_loss", "eval/val_loss")
LOSS = Plot("loss", "Loss", "nats per token", LOSSES, smooth=True, low=True)
PLOTS = (
    LOSS,
    Plot("val_sets", "Val loss by set", "nats per token", ("eval/val_loss/",), low=True),
    Plot("bits_per_byte", "Val bits per byte", "", ("eval/val_bits_per_byte",), low=True),
    Plot("hellaswag", "HellaSwag", "% acc_norm", ("eval/hellaswag_acc_norm",), factor=100),
    Plot("lr", "Learning rate", "", ("train/lr",)),
    Plot("grad_norm", "Gradient norm", "", ("train/grad_norm",), log=True, smooth=True),
    Plot("throughput", "Throughput", "tokens/s", ("perf/tokens_per_second",), smooth=True),
    Plot("mfu", "MFU", "% of the peak", ("perf/mfu",), factor=100, smooth=True),
    Plot("memory", "Peak memory", "GB", ("perf/memory_gb",)),
)
# of curves in a plot of several keys; of a report of one run, in which val has the same everywhere
NAMES = MappingProxyType(
    {"train/loss": "train", "eval/train_loss": "train, evaluated", "eval/val_loss": "val"}
)
COLORS = MappingProxyType({"eval/val_loss": 1, "eval/val_bits_per_byte": 1, "eval/train_loss": 2})
HELLASWAG = (
    (25.0, "random", ""),
    (29.55, "GPT-2 124M", "https://github.com/karpathy/build-nanogpt/blob/master/hellaswag.py"),
    (33.7, "GPT-3 124M", "https://arxiv.org/abs/2005.14165"),
)
"""acc_norm in percent: one of four endings; completion style; table H.1, zero-shot."""


def payload(runs: Sequence[NamedRun], reference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that is drawn, as the module describes it."""
    by_name = {run.name: run.metrics for run in runs}
    plots = [plot_entry(plot, by_name, reference) for plot in PLOTS]
    return {
        "runs": [
            {
                "name": run.name,
                "clock": clock_entry(run.metrics),
                "flops_per_token": run.flops_per_token,
                "marks": all_marks(run)[:MOST_MARKS],
            }
            for run in runs
        ],
        "panels": [plot for plot in plots if plot["curves"]],
        "reference": reference_entry(reference),
    }


def clock_entry(metrics: Metrics) -> dict[str, Any]:
    """Steps, tokens and seconds at up to `MOST_POINTS` records; without a clock that is unknown."""
    kept = np.unique(np.linspace(0, max(len(metrics.steps) - 1, 0), MOST_POINTS).astype(int))
    clocks = {"step": metrics.steps, "tokens": metrics.tokens, "seconds": metrics.seconds}
    known = {name: v for name, v in clocks.items() if len(v) and np.isfinite(v).all()}
    return {name: six_digits(values[kept]) for name, values in known.items()}


def plot_entry(
    plot: Plot, runs: Mapping[str, Metrics], reference: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One plot of runs by their names."""
    keys = list(dict.fromkeys(key for metrics in runs.values() for key in plot.present(metrics)))
    keys.sort(key=lambda key: plot.keys.index(key) if key in plot.keys else 0)
    curves, single = [], len(runs) == 1
    for place, key in enumerate(keys):
        several = len(plot.keys) > 1 or key not in plot.keys
        name = NAMES.get(key, key.split("/", 2)[-1]) if several else ""
        dots = key.startswith("eval/") and key != "eval/train_loss"
        for number, (run, metrics) in enumerate(runs.items()):
            if key not in metrics.columns:
                continue
            own_color = place if plot.name == "val_sets" else COLORS.get(key, 0)
            curve: dict[str, Any] = {
                "run": number,
                "key": key,
                "name": name,
                "label": name if single else ", ".join(filter(None, (run, name))),
                "color": own_color if single else number,
                "style": "dots" if dots else "dashed" if key.startswith("eval/") else "line",
                "best": single and dots and plot.low and plot.name != "val_sets",
            }
            curves.append(curve | points(metrics, key, plot))
    fields = ("name", "title", "unit", "log", "smooth", "low")
    entry = {field: getattr(plot, field) for field in fields}
    return entry | {"guides": guides(plot, reference), "curves": curves}


def points(metrics: Metrics, key: str, plot: Plot) -> dict[str, Any]:
    """Steps and values of a curve, thinned."""
    steps, values = metrics.curve(key)
    values = np.clip(values, -1e200, 1e200) * plot.factor  # so that no mean or axis overflows
    if len(values) <= MOST_POINTS:
        return {"s": six_digits(steps), "v": six_digits(values)}
    kept = thin(values, MOST_POINTS)
    found = {"s": six_digits(steps[kept]), "v": six_digits(values[kept])}
    if plot.smooth:
        buckets = MOST_POINTS // 2
        found |= {
            "ms": six_digits(bucket_means(steps, buckets)),
            "m": six_digits(bucket_means(values, buckets)),
        }
    return found


def guides(plot: Plot, reference: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Horizontal lines to compare with."""
    if plot.name == "hellaswag":
        return [{"value": value, "label": f"{name} {value:g} %"} for value, name, _ in HELLASWAG]
    if plot.name == "loss" and reference:
        return [
            {"value": point["val_loss"], "label": f"{point['label']}: {point['val_loss']:.2f}"}
            for point in reference["points"]
        ]
    return []


def reference_entry(reference: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The curve of a reference; None without one."""
    if not reference or not reference["curve"]["step"]:
        return None
    curve = reference["curve"]
    return {
        "clock": {key: curve[key] for key in ("step", "tokens", "seconds")},
        "flops_per_token": reference["flops_per_token"],
        "s": curve["step"],
        "v": curve["val_loss"],
    }


def all_marks(run: NamedRun) -> list[dict[str, Any]]:
    """Where the run was resumed, where updates were skipped, and where the loss spiked."""
    found: list[dict[str, Any]] = []
    for step, times in run.resumes():
        text = f"resumed at step {step:,}" + (f", {times} times" if times > 1 else "")
        found.append({"step": step, "kind": "resume", "text": text})
    for key, kind, one, several in (
        ("train/skipped", "skip", "skipped update", "skipped updates"),
        ("train/spikes", "spike", "loss spike", "loss spikes"),
    ):
        steps, counts = run.metrics.curve(key)
        before = np.concatenate([[0.0], counts[:-1]])
        since = np.concatenate([[0.0], steps[:-1]])
        for i in np.flatnonzero(counts > before):
            count, first, last = int(counts[i] - before[i]), int(since[i]) + 1, int(steps[i])
            where = f"step {last:,}" if first >= last else f"steps {first:,} to {last:,}"
            text = f"{count:,} {one if count == 1 else several}, {where}"
            found.append({"step": last, "kind": kind, "text": text})
    return found


def is_thinned(run: NamedRun) -> bool:
    """Whether a curve has more points than are drawn."""
    return any(len(rows) > MOST_POINTS for rows, _ in run.metrics.columns.values())


# --------------------------------------------------------------------------- many points


def thin(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Indices (m,), m <= `most`, of values that look the same when drawn.

    The smallest and the largest value of each bucket, so that no spike is lost, the first and the
    last.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for start, end in itertools.pairwise(bucket_edges(len(values), most // 2 - 1)):
        bucket = values[start:end]
        kept |= {start + int(bucket.argmin()), start + int(bucket.argmax())}
    return np.array(sorted(kept))


def bucket_means(values: Floats, buckets: int) -> Floats:
    """The mean of each bucket, shape (buckets,)."""
    edges = bucket_edges(len(values), buckets)
    return np.asarray(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


def bucket_edges(count: int, buckets: int) -> list[int]:
    """Where buckets of equally many values begin, and the end of the last one."""
    return [count * i // buckets for i in range(buckets + 1)]


def six_digits(values: Floats) -> list[float | int]:
    """Values with six digits, which is more than a plot shows; whole numbers stay whole."""
    return [int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}") for v in values.tolist()]
