"""Draw the loss curves of a run as PNG; needs no display."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_gpt.report.curves import Floats, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# colors of page.css in light mode
COLORS = ("#2f63b8", "#d1432f", "#1b8a6b", "#8a4fbe", "#b8860b", "#0f8aa8", "#b83a7a", "#667085")
INK = "#1c2024"
NEIGHBORS = 60  # smoothing averages 1 / 60 of the points on each side, the page's default
MARGIN = 0.06  # space above and below the curves, as a share of their range


def loss_curves(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of train and val loss over tokens from the records of a metrics.jsonl."""
    from matplotlib.figure import Figure

    metrics = read_metrics(dict(record) for record in records)
    figure = Figure(figsize=(12, 7), dpi=100, facecolor="white")
    figure.subplots_adjust(left=0.1, right=0.975, top=0.965, bottom=0.105)
    axes = figure.add_subplot()
    style_axes(axes, "loss, nats per token")
    axes.set_xlabel("tokens", fontsize=14, color=INK)
    steps, stages = metrics.curve("data/stage")
    for step in steps[:-1][np.diff(stages) != 0]:  # the last one of each stage but the last
        edge = float(np.interp(step, metrics.steps, metrics.tokens))
        axes.axvline(edge, color="#b0b0b0", linewidth=1, linestyle=":")
    late: list[Floats] = []  # values after the first drop
    steps, losses = metrics.curve("train/loss")
    if len(losses):
        tokens = np.interp(steps, metrics.steps, metrics.tokens)
        means = smoothed(losses)
        marker = "o" if len(losses) == 1 else ""
        axes.plot(tokens, losses, color=COLORS[0], alpha=0.3, linewidth=1.2)
        axes.plot(tokens, means, color=COLORS[0], label="train loss", linewidth=2.2, marker=marker)
        late.append(means[len(means) // 16 :])
    steps, losses = metrics.curve("eval/val_loss")
    if len(losses):
        tokens = np.interp(steps, metrics.steps, metrics.tokens)
        axes.plot(tokens, losses, color=COLORS[1], label="val loss", linewidth=2.2, marker="o")
        late.append(losses[len(losses) // 16 :])
    if late:
        low = min(values.min() for values in late)
        high = max(values.max() for values in late)
        margin = MARGIN * (high - low or abs(high) or 1)
        axes.set_ylim(low - margin, high + margin)
        axes.legend(loc="upper right", frameon=False, fontsize=13, labelcolor=INK)
    figure.savefig(path, format="png", metadata={"Software": None})


def smoothed(values: Floats) -> Floats:
    """Return the means (n,) of `values` (n,) over the neighbors on both sides.

    Near the start, where a loss falls fast, fewer neighbors are used. Unlike an exponential mean,
    this mean does not lag behind.
    """
    index = np.arange(len(values))
    reach = np.minimum(len(values) // NEIGHBORS, index // 8)
    start = index - reach
    end = np.minimum(index + reach + 1, len(values))
    sums = np.append(0.0, np.cumsum(values))
    means: Floats = (sums[end] - sums[start]) / (end - start)
    return means


def style_axes(axes: "Axes", title: str) -> None:
    """Label the y axis, and set large tick labels and a light grid."""
    from matplotlib.ticker import FuncFormatter

    readable = FuncFormatter(lambda value, _: short(value))
    axes.set_ylabel(title, fontsize=14, color=INK)
    axes.xaxis.set_major_formatter(readable)
    axes.yaxis.set_major_formatter(readable)
    axes.grid(axis="y", color="#ecece8", linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12.5, length=0, pad=7, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")
    axes.margins(x=0.015, y=0.08)


def short(value: float) -> str:
    """Format a number with four digits and a suffix: 1500000 as 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
