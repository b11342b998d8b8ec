"""Draw the live panel of a run: loss curve, progress bar, metrics and what is due next.

The panel fits the current width of the terminal, at most `WIDEST` columns. rich is imported when a
panel is made, since the import takes 20 ms.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, plural
from accel_gpt.console import format_clock, in_notebook, write_err

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.padding import Padding
    from rich.text import Text

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
        "eval/hellaswag_acc_norm": "HellaSwag {:.1%}",
    }
)
WIDEST = 100  # columns; a narrower panel wraps less if the terminal shrinks
FRAMES_PER_SECOND = 2
BLOCKS = " ▁▂▃▄▅▆▇█"  # from nothing to full, in eighths of a row
CURVE_ROWS = 3
SMALLEST_LOSS = 1e-3  # smaller losses are drawn as this value, since the axis is logarithmic
LOSSES = (
    "train/loss",
    "eval/val_loss",
    "eval/val_bits_per_byte",
    "train/lr",
    "train/grad_norm",
    "train/skipped",
)
SPEEDS = ("perf/tokens_per_second", "perf/mfu", "perf/memory_gb", "perf/step_ms", "tokens")


class Panel:
    """The metrics of a run, drawn by rich on stderr, or in the cell of a notebook."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.losses: list[float] = []
        self.activity = ""  # an evaluation in progress
        self.notice = ""  # says that the run is about to stop
        self.left: float | None = None  # seconds, at the time `updated`
        self.updated = time.monotonic()
        self.screen = make_screen(self)
        self.stack = contextlib.ExitStack()
        self.cell: Any = None  # the output cell of a notebook

    def start(self) -> None:
        """Start to draw."""
        if in_notebook():
            from IPython.display import display

            self.cell = display(self.in_cell(), display_id=True)
            return
        self.stack.enter_context(self.screen)
        self.stack.enter_context(logging_to_stderr())

    def stop(self) -> None:
        """Stop drawing; clear a panel without metrics."""
        if self.cell:
            self.cell.update(self.in_cell())
        self.screen.transient = not self.metrics
        with contextlib.suppress(OSError):  # the terminal is gone
            self.stack.close()

    def in_cell(self) -> "Padding":
        """Return this panel for display in a notebook."""
        from rich.padding import Padding

        return Padding(self, 0)

    def print(self, text: str) -> None:
        """Print a line above the panel; the line stays."""
        if self.cell:
            write_err(text)
            return
        self.screen.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def acknowledge(self, text: str) -> None:
        """Show at once, and until the end, that the run is about to stop."""
        self.notice = text
        if self.cell:
            write_err(text)
        else:
            self.screen.refresh()

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Set the step and the losses of the run so far."""
        self.step = step
        self.metrics = {}
        self.losses = [loss for loss in losses if math.isfinite(loss)]

    def update(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Show a new record; keep the former values of metrics that it lacks."""
        self.step = int(record["step"])
        self.metrics |= record
        self.left = seconds_left
        self.updated = time.monotonic()
        loss = record.get("train/loss", math.nan)
        if math.isfinite(loss):
            self.losses.append(loss)
        if self.cell:
            self.cell.update(self.in_cell())

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Yield the lines of the panel."""
        width = min(options.max_width, WIDEST)
        yield from self.curve(width)
        yield self.bar(width)
        for keys in (LOSSES, SPEEDS):
            known = [FORMS[key].format(self.metrics[key]) for key in keys if key in self.metrics]
            if known:
                yield side_by_side(known, width)
        if self.notice:
            yield one_line((self.notice, "bold"))
        if self.step < self.plan.max_steps:
            yield side_by_side(self.due(), width)

    def curve(self, width: int) -> Iterable["Text"]:
        """Yield the lines of the loss curve, labelled with its highest and lowest value.

        Yields nothing for fewer than two values.
        """
        points = mean_losses(self.losses, max(width - 9, 1))
        if len(points) < 2:
            return
        marks = (f"{max(points):.3f}", "", f"{min(points):.3f}")
        for mark, line in zip(marks, draw_columns(points), strict=True):
            yield one_line((f"{mark:>8} ", "dim"), (line, "cyan"))

    def bar(self, width: int) -> "Text":
        """Return the progress bar."""
        total = self.plan.max_steps
        left = self.seconds_left()
        line = one_line(("step ", "dim"), (f"{self.step:,}", "bold"), (f"/{total:,} ", "dim"))
        share = f" {self.step / total:.0%} "
        rest = "left ?" if left is None else f"left {format_clock(left)}"
        room = max(width - len(line) - len(share) - len(rest), 0)
        done = round(room * self.step / total)
        # two different characters, for terminals without colors
        line.append("━" * done, "green").append("─" * (room - done), "dim")
        return line.append(share).append(rest, "dim")

    def seconds_left(self) -> float | None:
        """Return the seconds to the end of the run, estimated at the last record."""
        if self.left is None:
            return None
        return max(self.left + self.updated - time.monotonic(), 0.0)

    def due(self) -> list[str]:
        """Return when the next evaluation and the next checkpoint are due."""
        last = self.plan.max_steps
        left = self.seconds_left()
        lines = [self.activity] if self.activity else []
        evaluation = next_multiple(self.step, self.config.eval.every, last)
        for name, due in (("evaluation", evaluation), ("save", self.next_save())):
            steps = due - self.step
            after = ""
            if left:
                after = f" ({format_clock(left * steps / (last - self.step))})"
            lines.append(f"{name} in {plural(steps, 'step')}{after}")
        return lines

    def next_save(self) -> int:
        """Return the step of the next checkpoint, by steps or by tokens."""
        save = next_multiple(self.step, self.config.checkpoint.every, self.plan.max_steps)
        every = self.config.checkpoint.every_tokens
        if not every:
            return save
        tokens_per_step = self.plan.tokens_per_step
        next_tokens = (self.step * tokens_per_step // every + 1) * every
        return min(save, math.ceil(next_tokens / tokens_per_step))


def make_screen(panel: Panel) -> "Live":
    """Make the area at the bottom of the terminal in which a thread draws `panel`.

    The thread ignores errors of a terminal that is gone.
    """
    from rich.console import Console
    from rich.live import Live

    class Screen(Live):
        def refresh(self) -> None:
            with contextlib.suppress(OSError):
                super().refresh()

    return Screen(panel, console=Console(stderr=True), refresh_per_second=FRAMES_PER_SECOND)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Send log messages of libraries to the current `sys.stderr`, above the panel."""
    loggers = (logging.root, *logging.root.manager.loggerDict.values())
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    redirected = [
        (handler, handler.setStream(sys.stderr))
        for handler in handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.__stderr__, sys.__stdout__)
    ]
    try:
        yield
    finally:
        for handler, before in redirected:
            handler.setStream(before)


def mean_losses(losses: Sequence[float], width: int) -> list[float]:
    """Return the means of at most `width` groups of consecutive losses.

    All groups have the same size, except that the last may be smaller.
    """
    size = math.ceil(len(losses) / width) or 1
    return [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]


def draw_columns(points: Sequence[float], rows: int = CURVE_ROWS) -> list[str]:
    """Draw `points` as columns of blocks on a logarithmic axis; return the lines.

    The lowest column is one eighth of a row high.
    """
    logs = [math.log(max(point, SMALLEST_LOSS)) for point in points]
    low = min(logs)
    high = max(logs)
    unit = (8 * rows - 1) / (high - low) if high > low else 0.0  # eighths of a row
    heights = [1 + round((value - low) * unit) for value in logs]
    lines = []
    for row in reversed(range(rows)):
        eighths = [min(max(height - 8 * row, 0), 8) for height in heights]
        lines.append("".join(BLOCKS[each] for each in eighths))
    return lines


def next_multiple(step: int, every: int, last: int) -> int:
    """Return the first multiple of `every` after `step`, at most `last`; `last` if `every` is 0."""
    return min((step // every + 1) * every, last) if every else last


def side_by_side(parts: Sequence[str], width: int) -> "Text":
    """Join as many parts as fit into one line, with bold numbers."""
    line = ""
    for part in parts:
        longer = f"{line}   {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    text = one_line((line, "dim"))
    text.highlight_regex(r"\d[\d.,:e%+-]*", "bold not dim")
    return text


def one_line(*parts: tuple[str, str]) -> "Text":
    """Make one line of (text, style) parts; crop it at the width of the terminal."""
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=True, overflow="crop")
