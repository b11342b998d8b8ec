"""Show the progress of a run or a command with rich: live on a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from accel_gpt.console import format_clock, write_err
from accel_gpt.runs.folder import is_benchmark

FORMS: Mapping[str, str] = MappingProxyType(  # key of a metric -> its text
    {
        "train/loss": "loss {:.4f}",
        "train/lr": "lr {:.2e}",
        "train/grad_norm": "norm {:.2f}",
        "train/skipped": "skipped {:,.0f}",
        "perf/tokens_per_second": "{:,.0f} tok/s",
        "perf/mfu": "MFU {:.1%}",
        "perf/memory_gb": "{:.2f} GB",
        "perf/step_ms": "{:,.1f} ms/step",
        "tokens": "{:,.0f} tokens",
        "eval/train_loss": "train {:.4f}",
        "eval/val_loss": "val {:.4f}",
        "eval/val_bits_per_byte": "{:.4f} bits/byte",
    }
)
VAL_SET = "eval/val_loss/"  # begin of the keys of named val sets
PANEL_ROWS = (  # a record changes the rows whose first key it has
    ("train/loss", "train/lr", "train/grad_norm", "train/skipped"),
    ("eval/val_loss", "eval/val_bits_per_byte"),
    ("perf/tokens_per_second", "perf/mfu", "perf/memory_gb", "perf/step_ms", "tokens"),
)
PANEL_ONLY = ("train/skipped", "perf/memory_gb", "perf/step_ms", "tokens")
WIDEST = 100  # columns of the panel
FRAMES_PER_SECOND = 2
LINE_SECONDS = 10.0  # between two lines of progress
LINE_COLUMNS = 200  # at most, in a line of progress
BAR_SECONDS = 0.2  # between two drawings of a bar
SHOW_CURSOR = b"\x1b[?25h\n"  # the live panel hides the cursor
BLOCKS = " ▁▂▃▄▅▆▇█"  # from nothing to full, in eighths of a row
TALLEST_CURVE = 8  # rows
LABEL_COLUMNS = 9  # left of the curve
OTHER_ROWS = 6  # rows of a terminal that the curve leaves free, before it takes a third of the rest


def can_draw() -> bool:
    """Return whether standard error is a terminal that moves its cursor and shows UTF-8."""
    moves_cursor = os.environ.get("TERM") not in ("dumb", "unknown")
    return sys.stderr.isatty() and moves_cursor and "utf" in str(sys.stderr.encoding).lower()


def show_cursor() -> None:
    """Show the terminal's cursor again, before the process ends without cleaning up."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


class LiveScreen(Live):
    """An area at the bottom of the terminal; it may lose its terminal."""

    def refresh(self) -> None:
        """Draw the area."""
        with contextlib.suppress(OSError):
            super().refresh()


# --------------------------------------------------------------------------- a task


class Progress:
    """Shows the progress of a task on standard error: a bar on a terminal, else a line every 10 s.

    `unit`: the plural noun of the counts; `bytes` are shown in MB. `total` None: unknown. `done`:
    the count at the start. `bar` False: print lines on a terminal too. The clock restarts if the
    count falls back to its start or below, as in the next part of a task.
    """

    def __init__(
        self,
        task: str,
        unit: str,
        total: int | None = None,
        done: int = 0,
        active: bool = True,
        bar: bool = True,
    ) -> None:
        self.unit = unit
        self.active = active
        self.first = done  # the count at the start
        self.shown = time.monotonic()
        self.is_bar = active and bar and can_draw()
        bars = [BarColumn()] if self.is_bar else []
        counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()]
        if unit != "bytes":
            counts = [MofNCompleteColumn(), TextColumn(unit)]
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            *bars,
            *counts,
            TimeRemainingColumn(),
            console=Console(stderr=True, width=None if self.is_bar else LINE_COLUMNS),
            auto_refresh=False,  # no thread: `prepare` forks
            redirect_stdout=sys.stdout.isatty(),  # a stdout that goes to a file stays there
            transient=True,
            get_time=lambda: time.monotonic(),
        )
        self.bar.add_task(task, total=total, completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_bar:
            with contextlib.suppress(OSError):  # the terminal is gone
                self.bar.stop()

    def advance(self, amount: int) -> None:
        """Add to the count."""
        (task,) = self.bar.tasks
        self.update(int(task.completed) + amount, None if task.total is None else int(task.total))

    def update(self, done: int, total: int | None) -> None:
        """Set the count and the total; show them, at most once per interval."""
        (task,) = self.bar.tasks
        if done <= self.first:
            self.first = done
            self.bar.reset(task.id, total=total, completed=done)
        self.bar.update(task.id, total=total, completed=done)
        now = time.monotonic()
        if not self.active or now - self.shown < (BAR_SECONDS if self.is_bar else LINE_SECONDS):
            return
        self.shown = now
        with contextlib.suppress(OSError):  # the terminal is gone
            if not self.is_bar:
                self.bar.console.print(self.bar.get_renderable())
                return
            self.bar.start()
            self.bar.console.show_cursor(True)  # a killed process could not show it again
            self.bar.refresh()


# --------------------------------------------------------------------------- a run


class Display:
    """A live panel on a terminal from the first record on, plain lines elsewhere.

    Prints nothing unless it is `active`, as on rank 0.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self.live: Live | None = None
        self.evaluation: Progress | None = None  # of the evaluation in progress
        self.figures: dict[str, tuple[int, str]] = {}  # first key of a row -> step, text
        self.losses: list[tuple[int, float]] = []  # step, loss
        self.end: float | None = None  # expected time of the last step
        self.steps = RichProgress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            expand=True,
        )
        self.task = self.steps.add_task("", left="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.evaluation = None
        if self.live:
            with contextlib.suppress(OSError):  # the terminal is gone
                self.live.stop()
            self.live = None

    def log(self, text: str) -> None:
        """Print a line that stays, above the panel if there is one."""
        if not self.active:
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk, or the terminal is gone
            if self.live is None:
                write_err(text)
                sys.stderr.flush()
            else:
                self.live.console.print(
                    text, markup=False, emoji=False, highlight=False, soft_wrap=True
                )

    def resume(self, losses: Iterable[tuple[int, float]]) -> None:
        """Set the losses of the run so far, each with its step."""
        self.losses = [(step, loss) for step, loss in losses if math.isfinite(loss)]

    def show(self, record: Mapping[str, float], max_steps: int, seconds_left: float | None) -> None:
        """Print or draw the metrics of a record.

        The bar stands at the record, as the metrics do: to read a loss at each step, the host would
        wait for the device. Metrics of an earlier record are shown with its step.
        """
        step = int(record["step"])
        self.evaluation = None
        self.end = None if seconds_left is None else time.monotonic() + seconds_left
        self.steps.update(self.task, completed=step, total=max_steps)
        for row in PANEL_ROWS:
            if row[0] in record:
                known = [FORMS[key].format(record[key]) for key in row if key in record]
                self.figures[row[0]] = step, "   ".join(known)
        loss = record.get("train/loss", math.nan)
        if math.isfinite(loss):
            self.losses.append((step, loss))
        if self.live is None and self.active and can_draw():
            self.live = LiveScreen(
                get_renderable=self.panel,
                console=Console(stderr=True),
                refresh_per_second=FRAMES_PER_SECOND,
            )
            with contextlib.suppress(OSError):  # the terminal is gone
                self.live.start()
        if self.live is None or "eval/val_loss" in record:
            keys = [key for key in FORMS if key in record and key not in PANEL_ONLY]
            if self.live:  # the panel shows the others
                keys = [key for key in keys if key.startswith("eval/")]
            metrics = " | ".join(FORMS[key].format(record[key]) for key in keys)
            for key in record:
                if key.startswith(VAL_SET):
                    metrics += f" | val {key.removeprefix(VAL_SET)} {record[key]:.4f}"
            for key in filter(is_benchmark, record):
                metrics += f" | {key.removeprefix('eval/')} {record[key]:.4f}"
            left = "" if seconds_left is None else f" | left {format_clock(seconds_left)}"
            self.log(f"step {step:,}/{max_steps:,} | {metrics}{left}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Print or draw that `done` of `total` batches of an evaluation were computed."""
        if self.evaluation is None:
            as_lines = self.active and self.live is None
            self.evaluation = Progress("evaluating", "batches", active=as_lines, bar=False)
        self.evaluation.update(done, total)

    # ----------------------------------------------------------------------- the panel

    def panel(self) -> Group:
        """Return what the panel shows: loss curve, progress bar, and the latest metrics."""
        console = self.live.console if self.live else Console(stderr=True)
        width = min(console.width, WIDEST)
        height = min((console.height - OTHER_ROWS) // 3, TALLEST_CURVE)
        (bar,) = self.steps.tasks
        curve = loss_curve(self.losses, int(bar.total or 0), width - LABEL_COLUMNS, height)
        if self.end is not None:
            left = format_clock(max(self.end - time.monotonic(), 0.0))
            self.steps.update(self.task, left=left)
        rows: list[RenderableType] = [*curve, Constrain(self.steps.get_renderable(), width)]
        for step, text in self.figures.values():
            of = "" if step == bar.completed else f"step {step:,}: "
            figures = Text(of + text, "dim")
            figures.highlight_regex(r"\d[\d.,:e%+-]*", "bold not dim")
            rows.append(Constrain(figures, width))
        if self.evaluation:
            rows.append(self.evaluation.bar.get_renderable())
        return Group(*rows)


def loss_curve(
    losses: Sequence[tuple[int, float]], max_steps: int, width: int, height: int
) -> list[Text]:
    """Return the lines of a loss curve; the axis begins at 0, and its top is the highest column.

    All `width` columns are `max_steps` steps, so the curve grows with the run. A column is the mean
    of its losses, or lies on the line between its neighbors. Returns no lines for fewer than two
    columns with losses, for fewer than two rows, or if no loss is positive.
    """
    points = []  # column, mean
    first = 0  # of the losses in a column
    for column in range(width):
        last_step = 1 + column * (max_steps - 1) // max(width - 1, 1)
        end = bisect_left(losses, (last_step + 1,))
        if end > first:
            points.append((column, fmean([loss for _, loss in losses[first:end]])))
        first = end
    top = max((mean for _, mean in points), default=0.0)
    if len(points) < 2 or height < 2 or top <= 0:
        return []
    values = [0.0] * points[0][0]
    for (start, value), (end, following) in pairwise(points):
        for column in range(start, end):
            values.append(value + (following - value) * (column - start) / (end - start))
    values.append(points[-1][1])
    heights = [math.ceil(8 * height * value / top) for value in values]  # in eighths of a row
    lines = []
    labels = [f"{top:.3f}", *[""] * (height - 2), "0"]
    for row, label in zip(reversed(range(height)), labels, strict=True):
        blocks = "".join(BLOCKS[min(max(eighths - 8 * row, 0), 8)] for eighths in heights)
        line = Text.assemble((f"{label:>8} ", "dim"), (blocks, "cyan"), no_wrap=True)
        lines.append(line)
    return lines
