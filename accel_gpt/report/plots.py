"""Pictures of a run, drawn by matplotlib without a display and without its global state."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, VAL, INK, FAINT = "#3b6fb5", "#d1495b", "#2b2b2b", "#8a8a8a"
NEIGHBOURS = 60  # the smoothed curve looks 1 / 60 of the records ahead and back
CUT_FROM = 50  # records from which on the first fall may leave the frame

Curve = tuple[list[float], list[float]]


def loss_curves(records: Sequence[Mapping[str, float]], path: Path) -> None:
    """Write the loss of `records` (lines of a metrics.jsonl) as a PNG of 1,200 x 700 pixels.

    Train loss as it was logged and smoothed, val loss as points; nats per token over tokens, or
    over steps where the tokens are not told. What is not a finite number is left out.
    """
    from matplotlib.figure import Figure

    clock = "tokens" if all(finite(record.get("tokens")) for record in records) else "step"
    train, val = (curve(records, clock, key) for key in ("train/loss", "eval/val_loss"))
    figure = Figure(figsize=(12, 7), dpi=100, facecolor="white")
    figure.subplots_adjust(left=0.075, right=0.975, top=0.965, bottom=0.105)
    axes = figure.add_subplot()
    if train[0]:
        smooth = smoothed(train[1])
        point = "o" if len(smooth) == 1 else ""
        axes.plot(*train, marker=point, color=TRAIN, alpha=0.3, linewidth=1.2)
        name = "train" if smooth == train[1] else "train, smoothed"
        axes.plot(train[0], smooth, marker=point, color=TRAIN, linewidth=2.4, label=name, zorder=3)
    if val[0]:
        points: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": "white"}
        axes.plot(*val, color=VAL, linewidth=1.4, label="val", zorder=4, **points)
    dress(axes, clock)
    cut = frame(axes, train[1], val[1])
    if cut:
        first = f"not shown: the beginning, from {train[1][0]:.2f}"
        corner: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        axes.text(0.985, 0.875, first, fontsize=11, color=FAINT, **corner)
    if val[0]:
        label_best(axes, val)
    if train[0] or val[0]:
        axes.legend(loc="upper right", frameon=False, fontsize=13, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no losses recorded", transform=axes.transAxes, ha="center")
    figure.savefig(path, format="png", metadata={"Software": None})


def finite(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def curve(records: Sequence[Mapping[str, float]], clock: str, key: str) -> Curve:
    """The finite values of `key`, and where on the clock each lies."""
    both = [r for r in records if finite(r.get(clock)) and finite(r.get(key))]
    return [float(r[clock]) for r in both], [float(r[key]) for r in both]


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over the neighbours on both sides, fewer at the beginning, where the loss falls fast.

    Unlike an exponential mean it does not lag behind what it smooths.
    """
    widest = len(values) // NEIGHBOURS
    sums = [0.0, *itertools.accumulate(values)]
    out = []
    for i in range(len(values)):
        reach = min(widest, i // 8)
        start, end = i - reach, min(i + reach + 1, len(values))
        out.append((sums[end] - sums[start]) / (end - start) if reach else values[i])
    return out


def dress(axes: "Axes", clock: str) -> None:
    """Names of the axes, large readable ticks, a quiet grid."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("tokens seen" if clock == "tokens" else "steps", fontsize=14, color=INK)
    axes.set_ylabel("loss, nats per token", fontsize=14, color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color="#e4e4e4", linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12.5, length=0, pad=7, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")
    axes.margins(x=0.015, y=0.08)


def frame(axes: "Axes", train: Sequence[float], val: Sequence[float]) -> bool:
    """Choose the range of losses so that the long end is readable; whether it cuts the beginning.

    The first 3 % of a long run, in which the loss falls from ln(vocabulary), may be above it.
    """
    if len(train) < CUT_FROM:
        return False
    late = [*train[max(1, len(train) * 3 // 100) :], *val[1:]]
    low, high = min(late), max(late)
    if low == high or max(train) <= high + 0.35 * (high - low):
        return False
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    return True


def label_best(axes: "Axes", val: Curve) -> None:
    """Write the lowest val loss beside its point."""
    value = min(val[1])
    where = val[0][val[1].index(value)]
    left = where > (min(val[0]) + max(val[0])) / 2
    axes.annotate(
        f"{value:.4f}",
        (where, value),
        xytext=(-4 if left else 4, 12),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=13,
        fontweight="bold",
        color=VAL,
        zorder=5,
    )


def short(value: float) -> str:
    """1500000 as 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
