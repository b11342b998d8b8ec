"""The live panel of a run on a terminal: the loss curve, a bar, metrics, what is due next.

Drawn for whatever width and height the terminal has at the moment; at most `WIDEST` columns.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.text import Text

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, plural
from accel_gpt.console import write_err
from accel_gpt.training.terminal import FORMS, in_notebook

WIDEST = 100  # columns; a terminal that is made narrower then wraps less of what is drawn
FRAMES_PER_SECOND = 2
BLOCKS = " ▁▂▃▄▅▆▇█"  # from nothing to full, in eighths of a row
CURVE_ROWS = 3
SMALLEST_LOSS = 1e-3  # of a curve, as its axis is logarithmic
LOSSES = (
    "train/loss",
    "eval/val_loss",
    "eval/val_bits_per_byte",
    "train/lr",
    "train/grad_norm",
    "train/skipped",
)
SPEEDS = ("perf/tokens_per_second", "perf/mfu", "perf/memory_gb", "perf/step_ms", "tokens")


class Screen(Live):
    """Draws a panel below what is printed, from a thread; goes on where the terminal is gone."""

    def refresh(self) -> None:
        """Draw."""
        with contextlib.suppress(OSError):
            super().refresh()


class Panel(JupyterMixin):
    """The metrics of a run, renderable by rich, between `start` and `stop` on stderr or in the cell
    of a notebook.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config, self.plan = config, plan
        self.step, self.metrics, self.losses = 0, dict[str, float](), list[float]()
        self.doing = ""  # besides training
        self.notice = ""  # that the run is about to stop
        self.left: float | None = None  # seconds, at the time `updated`
        self.updated = time.monotonic()
        console = Console(stderr=True)
        self.screen = Screen(self, console=console, refresh_per_second=FRAMES_PER_SECOND)
        self.stack = contextlib.ExitStack()
        self.cell: Any = None  # of a notebook, where it is drawn

    def start(self) -> None:
        """Draw from now on."""
        if in_notebook():
            from IPython.display import display

            self.cell = display(self, display_id=True)
            return
        self.stack.enter_context(self.screen)
        self.stack.enter_context(logging_to_stderr())

    def stop(self) -> None:
        """Draw no more; an empty panel does not stay."""
        if self.cell:
            self.cell.update(self)
        self.screen.transient = not self.metrics
        with contextlib.suppress(OSError):  # of a terminal that is gone
            self.stack.close()

    def print(self, text: str) -> None:
        """Print a line that stays, above the panel."""
        if self.cell:
            write_err(text)
            return
        self.screen.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def acknowledge(self, text: str) -> None:
        """Draw at once, and from now on, that the run is about to stop."""
        self.notice = text
        if self.cell:
            write_err(text)
        else:
            self.screen.refresh()

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Begin at `step`, with the losses of the run until then."""
        self.step, self.metrics, self.losses = step, {}, [*filter(math.isfinite, losses)]

    def update(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Show a record from now on; the metrics that it lacks stay."""
        self.step = int(record["step"])
        self.metrics |= record
        self.left, self.updated = seconds_left, time.monotonic()
        self.losses += filter(math.isfinite, [record.get("train/loss", math.nan)])
        if self.cell:
            self.cell.update(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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

    def curve(self, width: int) -> Iterable[Text]:
        """The loss from the start to now, its highest and lowest value beside it; nothing before
        there are two values.
        """
        points = means(self.losses, max(width - 9, 1))
        if len(points) < 2:
            return
        marks = (f"{max(points):.3f}", "", f"{min(points):.3f}")
        for mark, line in zip(marks, draw(points), strict=True):
            yield one_line((f"{mark:>8} ", "dim"), (line, "cyan"))

    def bar(self, width: int) -> Text:
        """How far the run is."""
        total, left = self.plan.max_steps, self.seconds_left()
        line = one_line(("step ", "dim"), (f"{self.step:,}", "bold"), (f"/{total:,} ", "dim"))
        share = f" {self.step / total:.0%} "
        rest = "left ?" if left is None else f"left {clock(left)}"
        room = max(width - len(line) - len(share) - len(rest), 0)
        done = round(room * self.step / total)
        # two characters: without colors they alone tell how far it is
        line.append("━" * done, "green").append("─" * (room - done), "dim")
        return line.append(share).append(rest, "dim")

    def seconds_left(self) -> float | None:
        """Seconds to the end of the run, as estimated with the last record."""
        return None if self.left is None else max(self.left + self.updated - time.monotonic(), 0.0)

    def due(self) -> list[str]:
        """When the next evaluation and the next checkpoint are due, by steps or by tokens."""
        last, left = self.plan.max_steps, self.seconds_left()
        save = next_multiple(self.step, self.config.checkpoint.every, last)
        if tokens := self.config.checkpoint.every_tokens:
            each = self.plan.tokens_per_step
            save = min(save, math.ceil((self.step * each // tokens + 1) * tokens / each))
        evaluation = next_multiple(self.step, self.config.eval.every, last)
        lines = [self.doing] if self.doing else []
        for name, due in (("evaluation", evaluation), ("save", save)):
            steps = due - self.step
            after = f" ({clock(left * steps / (last - self.step))})" if left else ""
            lines.append(f"{name} in {plural(steps, 'step')}{after}")
        return lines


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Send the messages of libraries to `sys.stderr` as it is now: they would tear the panel."""
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


def means(losses: Sequence[float], width: int) -> list[float]:
    """At most `width` means, each of as many losses but the last."""
    size = math.ceil(len(losses) / width) or 1
    return [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]


def draw(points: Sequence[float], rows: int = CURVE_ROWS) -> list[str]:
    """Columns of blocks as high as the logarithms of `points`, the lowest point one eighth."""
    logs = [math.log(max(point, SMALLEST_LOSS)) for point in points]
    low, high = min(logs), max(logs)
    unit = (8 * rows - 1) / (high - low) if high > low else 0.0
    heights = [1 + round((value - low) * unit) for value in logs]
    return [
        "".join(BLOCKS[min(max(height - 8 * row, 0), 8)] for height in heights)
        for row in reversed(range(rows))
    ]


def next_multiple(step: int, every: int, last: int) -> int:
    """The first multiple of `every` after `step`, or the last step; 0 for `every`: only that."""
    return min((step // every + 1) * every, last) if every else last


def clock(seconds: float) -> str:
    """`0:03:20`, `2 days, 1:00:00`."""
    return str(timedelta(seconds=round(seconds)))


def side_by_side(parts: Sequence[str], width: int) -> Text:
    """As many of the parts as fit into a line, their numbers bold."""
    line = ""
    for part in parts:
        longer = f"{line}   {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    text = one_line((line, "dim"))
    text.highlight_regex(r"\d[\d.,:e%+-]*", "bold not dim")
    return text


def one_line(*parts: tuple[str, str]) -> Text:
    """A line of texts with their styles, cut where the terminal ends."""
    return Text.assemble(*parts, no_wrap=True, overflow="crop")
