"""What a run looks like on a terminal: the curve of the loss, a bar, metrics, what is due next.

Drawn for whatever width and height the terminal has at the moment; at most `WIDEST` columns.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan

WIDEST = 100  # columns; a terminal that is made narrower then wraps less of what is drawn
BLOCKS, ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#%"  # from nothing to full, in eighths of a row
CURVE_ROWS, CURVE_FROM_ROWS = 3, 14  # the curve has one row where the terminal is lower
FINEST = 400  # points of a curve that are kept at most
SMALLEST_LOSS = 1e-3  # of a curve, as its axis is logarithmic
# keys of a record, the text before the value, its format, the text after it
LOSSES = (
    ("train/loss", "loss ", "{:.4f}", ""),
    ("eval/val_loss", "val ", "{:.4f}", ""),
    ("eval/val_bits_per_byte", "", "{:.4f}", " bits/byte"),
    ("train/lr", "lr ", "{:.2e}", ""),
    ("train/grad_norm", "norm ", "{:.2f}", ""),
    ("train/skipped", "skipped ", "{:,.0f}", ""),
)
SPEEDS = (
    ("perf/tokens_per_second", "", "{:,.0f}", " tok/s"),
    ("perf/mfu", "MFU ", "{:.1%}", ""),
    ("perf/memory_gb", "", "{:.2f}", " GB"),
    ("perf/step_ms", "", "{:,.1f}", " ms/step"),
    ("tokens", "", "{:,.0f}", " tokens"),
)


class Curve:
    """The losses of the whole run in at most `FINEST` points, each the mean of as many losses."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.means: list[float] = []
        self.per_point = 1
        self.open: list[float] = []  # losses of the point that is not complete yet
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Add the next loss; one that is not finite is ignored."""
        if not math.isfinite(loss):
            return
        self.open.append(loss)
        if len(self.open) < self.per_point:
            return
        self.means.append(sum(self.open) / len(self.open))
        self.open = []
        if len(self.means) == FINEST:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(a + b) / 2 for a, b in pairs]
            self.per_point *= 2

    def points(self, width: int) -> list[float]:
        """The run from its start to now as at most `width` means of as many losses."""
        rest = self.open  # the training thread may replace it meanwhile
        points = self.means + ([sum(rest) / len(rest)] if rest else [])
        per_column = math.ceil(len(points) / width)
        columns = (points[i : i + per_column] for i in range(0, len(points), per_column or 1))
        return [sum(column) / len(column) for column in columns]


def draw(points: Sequence[float], rows: int, blocks: str) -> list[str]:
    """Columns of blocks as high as the logarithms of `points`, the lowest point one eighth."""
    logs = [math.log(max(point, SMALLEST_LOSS)) for point in points]
    low, high = min(logs), max(logs)
    unit = (8 * rows - 1) / (high - low) if high > low else 0.0
    heights = [1 + round((value - low) * unit) for value in logs]
    return [
        "".join(blocks[min(max(height - 8 * row, 0), 8)] for height in heights)
        for row in reversed(range(rows))
    ]


class Panel:
    """The metrics of a run, renderable by rich."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config, self.plan = config, plan
        self.step, self.metrics = 0, dict[str, float]()
        self.curve = Curve()
        self.left: float | None = None  # seconds, at the time `updated`
        self.updated = time.monotonic()

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Begin at `step`, with the losses of the run until then."""
        self.step, self.metrics, self.curve = step, {}, Curve(losses)

    def update(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Show a record from now on; the metrics that it lacks stay."""
        self.step = int(record["step"])
        self.metrics |= record
        self.left, self.updated = seconds_left, time.monotonic()
        if "train/loss" in record:
            self.curve.add(record["train/loss"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, ascii_only = min(options.max_width, WIDEST), options.ascii_only
        rows = CURVE_ROWS if console.height >= CURVE_FROM_ROWS else 1
        yield from self.curve_lines(width, rows, ASCII_BLOCKS if ascii_only else BLOCKS)
        yield self.bar(width, ascii_only)
        for forms in (LOSSES, SPEEDS):
            known = [form for form in forms if form[0] in self.metrics]
            if known:
                values = [(a, form.format(self.metrics[key]), b) for key, a, form, b in known]
                yield side_by_side(values, width)
        if self.step < self.plan.max_steps:
            yield side_by_side(list(self.due()), width)

    def curve_lines(self, width: int, rows: int, blocks: str) -> Iterable[Text]:
        """The curve with its highest and lowest value; none before there are two."""
        points = self.curve.points(max(width - 9, 1))
        if len(points) < 2:
            return
        marks = [""] * (rows - 1) + [f"{min(points):.3f}"]
        if rows > 1:
            marks[0] = f"{max(points):.3f}"
        for mark, line in zip(marks, draw(points, rows, blocks), strict=True):
            yield Text.assemble(
                (f"{mark:>8}", "dim"), " ", (line, "cyan"), no_wrap=True, overflow="crop"
            )

    def bar(self, width: int, ascii_only: bool) -> Text:
        """How far the run is."""
        total, left = self.plan.max_steps, self.seconds_left()
        line = Text.assemble(
            *(("step ", "dim"), (f"{self.step:,}", "bold"), (f"/{total:,} ", "dim")),
            no_wrap=True, overflow="crop",
        )  # fmt: skip
        share = f" {self.step / total:.0%} "
        rest = "left ?" if left is None else f"left {clock(left)}"
        room = max(width - len(line) - len(share) - len(rest), 0)
        done = round(room * self.step / total)
        full, empty = ("=", "-") if ascii_only else ("━", "━")
        line.append(full * done, "green").append(empty * (room - done), "dim")
        return line.append(share).append(rest, "dim")

    def seconds_left(self) -> float | None:
        """Seconds to the end of the run, as estimated with the last record."""
        return None if self.left is None else max(self.left + self.updated - time.monotonic(), 0.0)

    def due(self) -> Iterable[tuple[str, str, str]]:
        """When the next evaluation and the next checkpoint are due, by steps or by tokens."""
        last = self.plan.max_steps
        save = next_multiple(self.step, self.config.checkpoint.every, last)
        if tokens := self.config.checkpoint.every_tokens:
            each = self.plan.tokens_per_step
            save = min(save, math.ceil((self.step * each // tokens + 1) * tokens / each))
        evaluation = next_multiple(self.step, self.config.eval.every, last)
        left = self.seconds_left()
        for name, due in (("evaluation", evaluation), ("save", save)):
            steps = due - self.step
            after = f" ({clock(left * steps / (last - self.step))})" if left else ""
            yield f"{name} in ", f"{steps:,}", f" {'step' if steps == 1 else 'steps'}{after}"


def next_multiple(step: int, every: int, last: int) -> int:
    """The first multiple of `every` after `step`, or the last step; 0 for `every`: only that."""
    return min((step // every + 1) * every, last) if every else last


def clock(seconds: float) -> str:
    """`0:03:20`, `2 days, 1:00:00`."""
    return str(timedelta(seconds=round(seconds)))


def side_by_side(parts: Sequence[tuple[str, str, str]], width: int) -> Text:
    """Values in one line, each with the text before and after it; as many as fit."""
    line = Text(no_wrap=True, overflow="crop")
    for before, value, after in parts:
        gap = "   " if line else ""
        if len(line) + len(gap + before + value + after) > width:
            break
        line.append(gap + before, "dim").append(value, "bold").append(after, "dim")
    return line
