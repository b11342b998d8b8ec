"""What a run looks like on a terminal: the curve of the loss, a bar, figures, what comes next.

Drawn anew for whatever width and height the terminal has at the moment; at most `WIDEST` columns.
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
# keys of a record, what stands before and after the figure, and how it is written
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
        self.open: list[float] = []  # losses of the point that is not whole yet
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Take in the next loss; one that is not finite leaves no trace."""
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
        rest = self.open  # another thread may go on meanwhile
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
    """The figures of a run, renderable by rich."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config, self.plan = config, plan
        self.step, self.figures = 0, dict[str, float]()
        self.curve = Curve()
        self.left: float | None = None  # seconds, when `told`
        self.told = time.monotonic()

    def begin(self, step: int, losses: Iterable[float]) -> None:
        """Forget what was shown; the run stands at `step`, with these losses behind it."""
        self.step, self.figures, self.curve = step, {}, Curve(losses)

    def take(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Show a record from now on; what it lacks stays as it was."""
        self.step = int(record["step"])
        self.figures |= record
        self.left, self.told = seconds_left, time.monotonic()
        if "train/loss" in record:
            self.curve.add(record["train/loss"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, ascii_only = min(options.max_width, WIDEST), options.ascii_only
        rows = CURVE_ROWS if console.height >= CURVE_FROM_ROWS else 1
        yield from self.curve_lines(width, rows, ASCII_BLOCKS if ascii_only else BLOCKS)
        yield self.bar(width, ascii_only)
        for forms in (LOSSES, SPEEDS):
            known = [form for form in forms if form[0] in self.figures]
            if known:
                told = [(a, form.format(self.figures[key]), b) for key, a, form, b in known]
                yield side_by_side(told, width)
        if self.step < self.plan.max_steps:
            yield side_by_side(list(self.coming()), width)

    def curve_lines(self, width: int, rows: int, blocks: str) -> Iterable[Text]:
        """The curve with its highest and lowest value; none before there are two."""
        points = self.curve.points(max(width - 9, 1))
        if len(points) < 2:
            return
        lines = draw(points, rows, blocks)
        marks = [f"{max(points):8.3f}", *[" " * 8] * (rows - 2), f"{min(points):8.3f}"][:rows]
        for mark, line in zip(marks if rows > 1 else marks[-1:], lines, strict=True):
            yield Text.assemble((mark, "dim"), " ", (line, "cyan"), no_wrap=True, overflow="crop")

    def bar(self, width: int, ascii_only: bool) -> Text:
        """How far the run is."""
        total, left = self.plan.max_steps, self.seconds_left()
        line = Text.assemble(("step ", "dim"), (f"{self.step:,}", "bold"), (f"/{total:,} ", "dim"))
        share = f" {self.step / total:.0%} "
        rest = "left ?" if left is None else f"left {clock(left)}"
        room = max(width - len(line) - len(share) - len(rest), 0)
        done, dash = round(room * self.step / total), "-" if ascii_only else "━"
        line.append(("=" if ascii_only else dash) * done, "green").append(
            dash * (room - done), "dim"
        )
        line.append(share).append(rest, "dim")
        line.no_wrap, line.overflow = True, "crop"
        return line

    def seconds_left(self) -> float | None:
        """Seconds to the end of the run, as estimated with the last record."""
        return None if self.left is None else max(self.left + self.told - time.monotonic(), 0.0)

    def coming(self) -> Iterable[tuple[str, str, str]]:
        """When the next evaluation and the next checkpoint are due."""
        left, steps_left = self.seconds_left(), self.plan.max_steps - self.step
        for name, due in (("evaluation", self.next_evaluation()), ("save", self.next_save())):
            steps = due - self.step
            after = f" ({clock(left * steps / steps_left)})" if left else ""
            yield f"{name} in ", f"{steps:,}", f" {'step' if steps == 1 else 'steps'}{after}"

    def next_evaluation(self) -> int:
        """Step of the next evaluation."""
        return next_multiple(self.step, self.config.eval.every, self.plan.max_steps)

    def next_save(self) -> int:
        """Step of the next checkpoint that is due by steps or by tokens."""
        due = next_multiple(self.step, self.config.checkpoint.every, self.plan.max_steps)
        if tokens := self.config.checkpoint.every_tokens:
            each = self.plan.tokens_per_step
            due = min(due, math.ceil((self.step * each // tokens + 1) * tokens / each))
        return due


def next_multiple(step: int, every: int, last: int) -> int:
    """The first multiple of `every` after `step`, or the last step; 0 for `every`: only that."""
    return min((step // every + 1) * every, last) if every else last


def clock(seconds: float) -> str:
    """`0:03:20`, `2 days, 1:00:00`."""
    return str(timedelta(seconds=round(seconds)))


def side_by_side(parts: Sequence[tuple[str, str, str]], width: int) -> Text:
    """Figures in one line, each with what stands before and after it; as many as fit."""
    line = Text(no_wrap=True, overflow="crop")
    for before, figure, after in parts:
        gap = "   " if line else ""
        if len(line) + len(gap + before + figure + after) > width:
            break
        line.append(gap + before, "dim").append(figure, "bold").append(after, "dim")
    return line
