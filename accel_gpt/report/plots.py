"""PNG files of the plots, 1,200 x 700 pixels, drawn by matplotlib without a display."""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_gpt.cost.scaling import LEVEL, Ladder, Size
from accel_gpt.report.payload import LOSS, clock_entry, plot_entry
from accel_gpt.training.run_folder import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# those of page.css in light mode
COLORS = ("#2f63b8", "#d1432f", "#1b8a6b", "#8a4fbe", "#b8860b", "#0f8aa8", "#b83a7a", "#667085")
INK, SOFT, GREY = "#1c2024", "#5f6770", "#9a9a94"
NEIGHBORS = 60  # smoothing averages 1 / 60 of the points on both sides, as the page does at first

Entry = Mapping[str, Any]  # a part of the payload


def draw_plots(content: Entry, folder: Path) -> list[str]:
    """Write `NAME.png` for each plot of a payload; returns the names."""
    for panel in content["panels"]:
        draw_plot(panel, content["runs"], content["reference"], folder / f"{panel['name']}.png")
    return [panel["name"] for panel in content["panels"]]


def loss_curves(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write train and val loss of the records of a metrics.jsonl as a PNG."""
    metrics = read_metrics(dict(record) for record in records)
    panel = plot_entry(replace(LOSS, keys=("train/loss", "eval/val_loss")), {"": metrics})
    draw_plot(panel, [{"clock": clock_entry(metrics)}], None, path)


def draw_plot(panel: Entry, runs: Sequence[Entry], reference: Entry | None, path: Path) -> None:
    """Write one plot over tokens, or over steps if a run has no token counts."""
    from matplotlib.figure import Figure

    clock = "tokens" if all("tokens" in run["clock"] for run in runs) else "step"
    figure = Figure(figsize=(12, 7), dpi=100, facecolor="white")
    figure.subplots_adjust(left=0.1, right=0.975, top=0.965, bottom=0.105)
    axes = figure.add_subplot()
    if panel["name"] == "loss" and reference:
        xs = clock_positions(reference, reference["s"], clock)
        axes.plot(xs, reference["v"], color=GREY, linewidth=2, label="reference")
    for curve in panel["curves"]:
        if len(runs) == 1 or curve["style"] != "dashed":  # which the page hides at first, too
            draw_curve(axes, panel, curve, runs[curve["run"]], clock)
    style_axes(axes, panel, clock)
    if panel["low"]:
        focus(axes, [guide["value"] for guide in panel["guides"]])
    for guide in panel["guides"]:
        axes.axhline(guide["value"], color=GREY, linestyle=":")
        annotate(axes, 0.99, guide["value"], guide["label"], axes.get_yaxis_transform(), "bottom")
    if not panel["curves"]:
        annotate(axes, 0.5, 0.5, "nothing recorded", axes.transAxes)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper right", frameon=False, fontsize=13, labelcolor=INK)
    figure.savefig(path, format="png", metadata={"Software": None})


def ladder_png(ladder: Ladder) -> bytes:
    """The rungs of a ladder over their FLOPs, the law of each size with its band; residuals."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure, drawn = Figure(figsize=(12, 8), dpi=100, facecolor="white"), io.BytesIO()
    figure.subplots_adjust(left=0.08, right=0.975, top=0.97, bottom=0.085, hspace=0.12)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    largest = max(size.flops for size in ladder.sizes)
    for number, depth in enumerate(ladder.depths):
        pairs = zip(ladder.rungs, ladder.sizes, strict=True)
        rungs = [(size, rung["loss"]) for rung, size in pairs if rung["depth"] == depth]
        one, color = rungs[0][0], COLORS[number % len(COLORS)]
        xs = np.geomspace(one.flops / 1.5, largest * 10, 60)
        sizes = [Size(one.parameters, x * one.tokens / one.flops, x) for x in xs]
        curve = np.array([ladder.law.predict(size) for size in sizes])
        above.plot(xs, curve[:, 0], color=color, linewidth=1.8)
        above.fill_between(xs, curve[:, 1], curve[:, 2], color=color, alpha=0.13, linewidth=0)
        look = {"color": color, "marker": "o", "linestyle": "", "markeredgecolor": "white"}
        points = [size.flops for size, _ in rungs]
        label = f"depth {depth}: {one.parameters:,} parameters"
        above.plot(points, [loss for _, loss in rungs], label=label, markersize=9, **look)
        residuals = [100 * (loss / ladder.law.predict(size).loss - 1) for size, loss in rungs]
        below.plot(points, residuals, markersize=9, **look)
    for axes, name in ((above, "val loss, nats per token"), (below, "residual, %")):
        style_axes(axes, {"title": name, "unit": "", "log": False}, "step")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    above.set_xlabel("")
    below.set_xlabel("FLOPs", fontsize=14, color=INK)
    below.axhline(0, color=GREY, linewidth=1)
    title = f"lines: the law of each size; bands: {LEVEL:.0%} of runs"
    above.legend(frameon=False, fontsize=13, labelcolor=INK, title=title, title_fontsize=13)
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def clock_positions(owner: Entry, steps: Sequence[float], clock: str) -> Any:
    """The values (n,) of a clock of a run or reference at steps (n,)."""
    return np.interp(steps, owner["clock"]["step"], owner["clock"][clock])


def draw_curve(axes: "Axes", panel: Entry, curve: Entry, run: Entry, clock: str) -> None:
    """Draw evaluations as dots, a frequent metric raw and smoothed."""
    steps, values = curve["s"], curve["v"]
    look: dict[str, Any] = {"color": COLORS[curve["color"] % len(COLORS)]}
    if curve["style"] == "line":
        if panel["smooth"]:
            axes.plot(clock_positions(run, steps, clock), values, alpha=0.3, linewidth=1.2, **look)
            steps, values = curve.get("ms", steps), smoothed(curve.get("m", values))
        look |= {"linewidth": 2.2, "zorder": 3, "marker": "o" if len(values) == 1 else ""}
    elif curve["style"] == "dashed":
        look |= {"linestyle": "--"}
    elif len(values) <= 60:
        look |= {"marker": "o", "markersize": 6, "markeredgecolor": "white", "zorder": 4}
    xs = clock_positions(run, steps, clock)
    axes.plot(xs, values, label=curve["label"] or panel["title"], **look)
    if curve["best"]:
        label_best(axes, xs, values, look["color"])


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over the neighbors on both sides, over fewer at the start, where a loss falls fast.

    Unlike an exponential mean it does not lag behind.
    """
    widest = len(values) // NEIGHBORS
    sums = [0.0, *itertools.accumulate(values)]
    out = []
    for i in range(len(values)):
        reach = min(widest, i // 8)
        start, end = i - reach, min(i + reach + 1, len(values))
        out.append((sums[end] - sums[start]) / (end - start) if reach else values[i])
    return out


def label_best(axes: "Axes", xs: Sequence[float], values: Sequence[float], color: str) -> None:
    """Write the lowest value beside its point."""
    value = min(values)
    x = xs[list(values).index(value)]
    left = x > (min(xs) + max(xs)) / 2
    axes.annotate(
        f"{value:.4f}",
        (x, value),
        xytext=(-4 if left else 4, 12),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=13,
        fontweight="bold",
        color=color,
        zorder=5,
    )


def style_axes(axes: "Axes", panel: Entry, clock: str) -> None:
    """Label the axes; large ticks, a light grid."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    readable = FuncFormatter(lambda value, _: short(value))
    axes.set_xlabel("tokens" if clock == "tokens" else "steps", fontsize=14, color=INK)
    axes.set_ylabel(", ".join(filter(None, (panel["title"], panel["unit"]))), fontsize=14)
    if panel["log"]:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(readable)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(readable)
    axes.yaxis.set_major_formatter(readable)
    axes.grid(axis="y", color="#ecece8", linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12.5, length=0, pad=7, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")
    axes.margins(x=0.015, y=0.08)


def focus(axes: "Axes", guides: Sequence[float]) -> None:
    """Leave out the drop in the first 6 % if the rest is hard to read with it, as the page does."""
    if not axes.get_lines():
        return
    xs, values = np.concatenate([line.get_xydata() for line in axes.get_lines()]).T
    late = values[xs > xs.min() + 0.06 * np.ptp(xs)]
    if len(late) < 20 or values.max() <= late.max() + 0.35 * np.ptp(late):
        return
    low, high = min([values.min(), *guides]), max([late.max(), *guides])
    margin = 0.06 * (high - low or abs(high) or 1)
    axes.set_ylim(low - margin, high + margin)
    annotate(
        axes, 0.6, 0.985, f"the first values, up to {values.max():.2f}, lie above", axes.transAxes
    )


def annotate(
    axes: "Axes", x: float, y: float, text: str, coordinates: Any, va: str = "top"
) -> None:
    """Write a small note that ends at `x`."""
    axes.text(x, y, text, transform=coordinates, ha="right", va=va, fontsize=11, color=SOFT)


def short(value: float) -> str:
    """A number with four digits and a unit: 1500000 as 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
