"""Show the progress of a run or a command with rich: live on a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_gpt.config.plan import Plan
from accel_gpt.console import format_clock, write_err
from accel_gpt.launcher import is_main
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
        "eval/whole_val_loss": "whole val {:.4f}",
    }
)
PANEL_ROWS = (
    (
        "train/loss",
        "eval/val_loss",
        "eval/val_bits_per_byte",
        "train/lr",
        "train/grad_norm",
        "train/skipped",
    ),
    ("perf/tokens_per_second", "perf/mfu", "perf/memory_gb", "perf/step_ms", "tokens"),
)
PANEL_ONLY = ("train/skipped", "perf/memory_gb", "perf/step_ms", "tokens")
WIDEST = 100  # columns of the panel
FRAMES_PER_SECOND = 2
LINE_SECONDS = 10.0  # between two lines of progress
BAR_SECONDS = 0.2  # between two drawings of a bar
SHORTEST_PACE_SECONDS = 1.0  # shortest time from which a pace is estimated; assumption
SHOW_CURSOR = b"\x1b[?25h\n"  # the live panel hides the cursor
BLOCKS = " ▁▂▃▄▅▆▇█"  # from nothing to full, in eighths of a row
TALLEST_CURVE = 8  # rows
LABEL_COLUMNS = 9  # left of the curve
OTHER_ROWS = 5  # rows of a terminal that the curve leaves free, before it takes a third of the rest
LABEL = re.compile(r" *[a-z]+(?: [a-z]+)? {2,}(?=\S)")  # `data     ` before the text of a line
SMALLEST_LOSS = 1e-3  # smaller losses are drawn as this value, since the axis is logarithmic


def can_draw() -> bool:
    """Return whether standard error is a terminal that moves its cursor and shows UTF-8."""
    moves_cursor = os.environ.get("TERM") not in ("dumb", "unknown")
    return sys.stderr.isatty() and moves_cursor and "utf" in str(sys.stderr.encoding).lower()


def show_cursor() -> None:
    """Show the terminal's cursor again, before the process ends without cleaning up."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


def is_shown(level: str, text: str) -> bool:
    """Return whether `log.level` allows a line."""
    return level == "info" or text.startswith("WARNING")


def print_line(level: str, text: str) -> None:
    """Print a line on rank 0 if `log.level` allows it, before the run has its `Display`."""
    if is_main() and is_shown(level, text):
        write_err(wrapped(text))


def wrapped(text: str) -> str:
    """Break labelled lines between words if standard error is a terminal that is narrower.

    The text stays in its column, beside the label. Words that are longer than a row stay whole, as
    do lines without a label: they may be code.
    """
    if not sys.stderr.isatty():
        return text
    width = Console(stderr=True).width
    lines = []
    for line in text.split("\n"):
        label = LABEL.match(line)
        if label and len(line) > width > 2 * len(label[0]):
            parts = textwrap.wrap(
                line[len(label[0]) :],
                width - len(label[0]),
                break_long_words=False,
                break_on_hyphens=False,
            )
            line = label[0] + f"\n{' ' * len(label[0])}".join(parts)
        lines.append(line)
    return "\n".join(lines)


class LiveScreen(Live):
    """An area at the bottom of the terminal; it may lose its terminal."""

    def refresh(self) -> None:
        """Draw the area."""
        with contextlib.suppress(OSError):
            super().refresh()


# --------------------------------------------------------------------------- a task


class Progress:
    """Shows the progress of a task on standard error: a bar on a terminal, else a line every 10 s.

    `unit`: the plural noun of the counts; `bytes` are shown in MB and MB/s. `total` None: unknown.
    `done`: the count at the start. `bar` False: print lines on a terminal too. The clock restarts
    if the count falls back to its start or below, as in the next part of a task.
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
        self.task = task
        self.unit = unit
        self.total = total
        self.done = done
        self.active = active
        self.first = done  # the count at `started`
        self.started = time.monotonic()
        self.shown = self.started
        self.live: Live | None = None
        if active and bar and can_draw():
            self.live = LiveScreen(
                console=Console(stderr=True),
                auto_refresh=False,  # no thread: `prepare` forks
                redirect_stdout=sys.stdout.isatty(),  # a stdout that goes to a file stays there
                transient=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            with contextlib.suppress(OSError):  # the terminal is gone
                self.live.stop()

    def advance(self, amount: int) -> None:
        """Add to the count."""
        self.update(self.done + amount, self.total)

    def update(self, done: int, total: int | None) -> None:
        """Set the count and the total; show them, at most once per interval."""
        self.done = done
        self.total = total
        now = time.monotonic()
        if done <= self.first:
            self.first = done
            self.started = now
        if not self.active or now - self.shown < (BAR_SECONDS if self.live else LINE_SECONDS):
            return
        self.shown = now
        if self.live is None:
            write_err(self.text())
            return
        console = self.live.console
        row = progress_row(self.task, done, total, self.details(), min(console.width, WIDEST))
        with contextlib.suppress(OSError):  # the terminal is gone
            self.live.start()
            console.show_cursor(True)  # a killed process could not show it again
            self.live.update(row, refresh=True)

    def text(self) -> str:
        """Return the progress as a line: `tokenizing: 12.0 of 40.0 MB, 2.0 MB/s, left 0:00:14`."""
        return f"{self.task}: {self.details()}"

    def details(self) -> str:
        """Return counts, pace of bytes, and time left; the time spent if the total is unknown."""
        spent = time.monotonic() - self.started
        pace = (self.done - self.first) / max(spent, SHORTEST_PACE_SECONDS)  # per second
        if self.unit == "bytes":
            total = "" if self.total is None else f" of {self.total / 1e6:,.1f}"
            counts = f"{self.done / 1e6:,.1f}{total} MB, {pace / 1e6:,.1f} MB/s"
        else:
            total = "" if self.total is None else f" of {self.total:,}"
            counts = f"{self.done:,}{total} {self.unit}"
        if self.total is None:
            return f"{counts}, {format_clock(spent)}"
        if pace == 0 or spent < SHORTEST_PACE_SECONDS:
            return counts
        left = max(self.total - self.done, 0) / pace
        return f"{counts}, left {format_clock(left)}"


# --------------------------------------------------------------------------- a run


class Display:
    """A live panel on a terminal from the first record on, plain lines elsewhere.

    Prints only on rank 0. With `log.level: warning`, prints only warnings.
    """

    def __init__(self, active: bool, level: str, plan: Plan) -> None:
        self.active = active
        self.level = level
        self.max_steps = plan.max_steps
        self.verbose = active and level == "info"
        self.live: Live | None = None
        self.evaluation: Progress | None = None  # of the evaluation in progress
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.losses: list[float] = []
        self.ends_at = math.inf  # estimate, by `time.monotonic`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            with contextlib.suppress(OSError):  # the terminal is gone
                self.live.stop()
            self.live = None

    def log(self, text: str) -> None:
        """Print a line that stays."""
        if self.active and is_shown(self.level, text):
            self.print(text)

    def acknowledge(self, text: str) -> None:
        """Print a line at every `log.level`."""
        if self.active:
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line, above the panel if there is one."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, or the terminal is gone
            if self.live is None:
                write_err(wrapped(text))
                sys.stderr.flush()
            else:
                self.live.console.print(
                    wrapped(text), markup=False, emoji=False, highlight=False, soft_wrap=True
                )

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Set the step and the losses of the run so far."""
        self.step = step
        self.metrics = {}
        self.losses = [loss for loss in losses if math.isfinite(loss)]

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Print or draw the metrics of a record. The panel keeps the metrics that it lacks."""
        self.step = int(record["step"])
        self.metrics |= record
        self.ends_at = time.monotonic() + seconds_left
        loss = record.get("train/loss", math.nan)
        if math.isfinite(loss):
            self.losses.append(loss)
        if self.live is None and self.verbose and can_draw():
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
            for key in filter(is_benchmark, record):
                metrics += f" | {key.removeprefix('eval/')} {record[key]:.4f}"
            left = format_clock(seconds_left)
            self.log(f"step {record['step']:,}/{self.max_steps:,} | {metrics} | left {left}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Print or draw that `done` of `total` batches of an evaluation were computed."""
        if self.evaluation is None:
            as_lines = self.verbose and self.live is None
            self.evaluation = Progress("evaluating", "batches", active=as_lines, bar=False)
        self.evaluation.update(done, total)

    def show_step(self, step: int) -> None:
        """Draw a completed step; its evaluation is over."""
        self.evaluation = None
        self.step = step

    # ----------------------------------------------------------------------- the panel

    def panel(self) -> Group:
        """Return what the panel shows: loss curve, progress bar, and the latest metrics."""
        console = self.live.console if self.live else Console(stderr=True)
        width = min(console.width, WIDEST)
        height = min((console.height - OTHER_ROWS) // 3, TALLEST_CURVE)
        curve = loss_curve(self.losses, width - LABEL_COLUMNS, height)
        rows: list[RenderableType] = [*curve, self.bar(width)]
        for keys in PANEL_ROWS:
            known = [FORMS[key].format(self.metrics[key]) for key in keys if key in self.metrics]
            rows.append(figures(known))
        if self.evaluation:
            rows.append(figures([self.evaluation.text()]))
        return Group(*rows)

    def bar(self, width: int) -> Table:
        """Return the progress bar, with the step before it and the time left behind it."""
        left = max(self.ends_at - time.monotonic(), 0.0)
        return progress_row(
            before=f"step {self.step:,}/{self.max_steps:,}",
            done=self.step,
            total=self.max_steps,
            after=f"{self.step / self.max_steps:.0%} left {format_clock(left)}",
            width=width,
        )


def progress_row(before: str, done: int, total: int | None, after: str, width: int) -> Table:
    """Return a progress bar between two texts; it pulses if the total is unknown."""
    row = Table.grid(padding=(0, 1), expand=False)
    row.width = width
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(figures([before]), ProgressBar(total=total, completed=done), figures([after]))
    return row


def figures(parts: Sequence[str]) -> Text:
    """Join parts into a dim text with bold numbers."""
    text = Text("   ".join(parts), "dim")
    text.highlight_regex(r"\d[\d.,:e%+-]*", "bold not dim")
    return text


def loss_curve(losses: Sequence[float], width: int, height: int) -> list[Text]:
    """Return the lines of a loss curve on a logarithmic axis, with its highest and lowest value.

    It fills `width` columns and `height` rows. If there are more losses than columns, each column
    is the mean of equally many losses; the last may have fewer. If there are fewer losses, the
    curve is straight between them. The lowest column is one eighth of a row high. Returns no lines
    for fewer than two losses, columns or rows.
    """
    size = math.ceil(len(losses) / max(width, 1)) or 1
    points = [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]
    if len(points) < 2 or height < 2:
        return []
    logs = stretched([math.log(max(point, SMALLEST_LOSS)) for point in points], width)
    span = max(logs) - min(logs) or 1.0
    unit = (8 * height - 1) / span  # eighths of a row
    heights = [1 + round((value - min(logs)) * unit) for value in logs]
    labels = [f"{max(points):.3f}", *[""] * (height - 2), f"{min(points):.3f}"]
    lines = []
    for row, label in zip(reversed(range(height)), labels, strict=True):
        blocks = "".join(BLOCKS[min(max(eighths - 8 * row, 0), 8)] for eighths in heights)
        line = Text.assemble((f"{label:>8} ", "dim"), (blocks, "cyan"), no_wrap=True)
        lines.append(line)
    return lines


def stretched(values: Sequence[float], width: int) -> list[float]:
    """Return `width` values at equal distances on the straight lines through `values`."""
    found = []
    for column in range(width):
        place = column * (len(values) - 1) / (width - 1)
        before = min(int(place), len(values) - 2)
        share = place - before
        found.append((1 - share) * values[before] + share * values[before + 1])
    return found
