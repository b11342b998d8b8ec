"""Each plot of a report as a PNG, for slides and papers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_gpt.report.figures import Floats, thin
from accel_gpt.report.panels import PANELS, Panel, color, key_name, style
from accel_gpt.report.payload import guides
from accel_gpt.report.plots import FAINT, INK, TRAIN, VAL, dress, frame, label_best, short, smoothed
from accel_gpt.report.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (TRAIN, VAL, "#1b8a6b", "#8a4fbe", "#b8860b", "#0f8aa8", "#b83a7a", "#667085")
LINES = MappingProxyType({"dots": "-", "dashed": "--"})
MOST_POINTS = 4000  # of a curve


def draw_all(
    runs: Sequence[RunFolder], folder: Path, reference: Mapping[str, Any] | None
) -> list[str]:
    """Write `NAME.png`, 1,200 x 700 pixels, for each plot that the runs have figures for; NAMEs."""
    drawn = []
    for panel in PANELS:
        if any(panel.present(run.figures) for run in runs):
            draw(panel, runs, folder / f"{panel.name}.png", reference)
            drawn.append(panel.name)
    return drawn


def draw(
    panel: Panel, runs: Sequence[RunFolder], path: Path, reference: Mapping[str, Any] | None
) -> None:
    """One plot over tokens, or over steps where a run does not tell tokens."""
    from matplotlib.figure import Figure

    told = all((run.figures.tokens >= 0).all() for run in runs)
    clock = "tokens" if told else "step"
    figure = Figure(figsize=(12, 7), dpi=100, facecolor="white")
    figure.subplots_adjust(left=0.1, right=0.975, top=0.965, bottom=0.105)
    axes = figure.add_subplot()
    if panel.name == "loss" and reference and reference["curve"]["step"]:
        curve = reference["curve"]
        axes.plot(curve[clock], curve["val_loss"], color="#a8a8a8", linewidth=2, label="reference")
    for number, run in enumerate(runs):
        keys = panel.present(run.figures)
        for key in keys:
            if len(runs) == 1:
                draw_curve(axes, panel, run, key, clock, color(panel, key, keys), key_name(key))
            elif style(key) != "dashed":
                name = f"{run.name}, {key_name(key)}" if len(keys) > 1 else run.name
                draw_curve(axes, panel, run, key, clock, number, name)
    finish(axes, panel, clock, reference)
    if panel.name == "loss" and len(runs) == 1:
        finish_loss(axes, runs[0], clock)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper right", frameon=False, fontsize=13, labelcolor=INK)
    figure.savefig(path, format="png", metadata={"Software": None})


def finish(axes: "Axes", panel: Panel, clock: str, reference: Mapping[str, Any] | None) -> None:
    """Names, ticks and lines to compare with."""
    from matplotlib.ticker import FuncFormatter

    dress(axes, clock)
    axes.set_ylabel(", ".join(filter(None, (panel.title, panel.unit))), fontsize=14, color=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if panel.log:
        axes.set_yscale("log")
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted(FuncFormatter(lambda value, _: short(value)))
    for guide in guides(panel, reference):
        axes.axhline(guide["value"], color="#a8a8a8", linestyle=":")
        given: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 11, "color": FAINT}
        place = axes.get_yaxis_transform()
        axes.text(0.99, guide["value"], guide["label"], transform=place, **given)


def draw_curve(
    axes: "Axes", panel: Panel, run: RunFolder, key: str, clock: str, number: int, name: str
) -> None:
    """One curve; what is logged often raw and smoothed, what is evaluated with points."""
    xs, values = on_clock(run, key, clock)
    values = values * panel.factor
    kept = thin(values, MOST_POINTS)
    given: dict[str, Any] = {"color": COLORS[number % len(COLORS)], "label": name}
    if style(key) != "line":
        dots: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": "white"}
        few = dots if len(values) <= 60 and style(key) == "dots" else {}
        axes.plot(xs[kept], values[kept], linestyle=LINES[style(key)], **given, **few)
        return
    smooth = smoothed(values.tolist()) if panel.smooth else values.tolist()
    if panel.smooth:
        axes.plot(xs[kept], values[kept], color=given["color"], alpha=0.3, linewidth=1.2)
    some = range(0, len(smooth), -(-len(smooth) // MOST_POINTS))
    axes.plot([xs[i] for i in some], [smooth[i] for i in some], linewidth=2.2, zorder=3, **given)


def on_clock(run: RunFolder, key: str, clock: str) -> tuple[Floats, Floats]:
    """Where the values of a key lie on a clock, and the values."""
    rows, values = run.figures.columns[key]
    return (run.figures.tokens if clock == "tokens" else run.figures.steps)[rows], values


def finish_loss(axes: "Axes", run: RunFolder, clock: str) -> None:
    """Frame the long end of the loss of one run, and write its best val loss."""
    train, val = run.figures.curve("train/loss")[1], run.figures.curve("eval/val_loss")[1]
    if frame(axes, train.tolist(), val.tolist()):
        corner: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        first = f"not shown: the beginning, from {train[0]:.2f}"
        axes.text(0.985, 0.8, first, fontsize=11, color=FAINT, **corner)
    if len(val):
        label_best(axes, (on_clock(run, "eval/val_loss", clock)[0].tolist(), val.tolist()))
