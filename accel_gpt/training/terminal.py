"""What a run prints: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.console import printable

if TYPE_CHECKING:
    import rich.live

    from accel_gpt.training.panel import Panel
    from accel_gpt.training.state import TrainState

SHOW_CURSOR = b"\x1b[?25h\n"  # which a live panel hides
FRAME_SECONDS = 0.25  # between two frames, where something has changed
TICK_SECONDS = 1.0  # between two frames, where nothing has but the clock


class Display:
    """A live panel on a terminal, plain lines elsewhere.

    Prints on rank 0 alone; with `log.level: warning` warnings alone.
    """

    def __init__(self, active: bool, config: Config, plan: Plan) -> None:
        self.active, self.config, self.plan = active, config, plan
        self.verbose = active and config.log.level == "info"
        self.panel: Panel | None = None
        self.live: rich.live.Live | None = None
        self.stack = contextlib.ExitStack()
        self.changed, self.over = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        if self.verbose and is_terminal():
            from rich.console import Console
            from rich.live import Live

            from accel_gpt.training.panel import Panel

            self.panel = Panel(self.config, self.plan)
            live = Live(self.panel, console=Console(stderr=True), auto_refresh=False)
            self.stack.enter_context(live)
            self.stack.enter_context(logging_through(sys.stderr))
            self.live = live
            self.thread = threading.Thread(target=self.refresh, name="display", daemon=True)
            self.thread.start()
            self.stack.callback(self.stop_drawing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live and self.panel:
            self.live.transient = not self.panel.metrics  # an empty panel does not stay
        with contextlib.suppress(OSError):  # of a terminal that is gone
            self.stack.close()
        self.live = None

    def stop_drawing(self) -> None:
        """End the thread that draws."""
        self.over.set()
        self.changed.set()
        self.thread.join()

    def refresh(self) -> None:
        """Draw the panel after a change, at most every `FRAME_SECONDS`, and at every tick."""
        assert self.live
        while not self.over.wait(FRAME_SECONDS):
            self.changed.wait(TICK_SECONDS - FRAME_SECONDS)
            self.changed.clear()
            with contextlib.suppress(OSError):
                self.live.refresh()

    def log(self, text: str) -> None:
        """Print a line that stays."""
        if not (self.verbose or (self.active and text.startswith("WARNING"))):
            return
        text = printable(text)
        with contextlib.suppress(OSError):  # of a log on a full disk, a terminal that is gone
            if self.live:
                self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                sys.stderr.write(f"{text}\n")

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Print or draw the metrics of one record."""
        if self.panel:
            self.panel.update(record, seconds_left)
            self.changed.set()
        if self.panel is None or "eval/val_loss" in record:
            left = timedelta(seconds=min(round(seconds_left), 10**12))
            step, last = int(record["step"]), self.plan.max_steps
            self.log(f"step {step:,}/{last:,} | {describe(record)} | left {left}")

    def advance(self, step: int) -> None:
        """Draw that a step was completed."""
        if self.panel:
            self.panel.step = step
            self.changed.set()

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Begin at a step, with the losses of the run until then."""
        if self.panel:
            self.panel.resume(step, losses)


def is_terminal() -> bool:
    """Whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextmanager
def logging_through(stream: Any) -> Iterator[None]:
    """Send the log messages of libraries to `stream`, as they would tear the panel."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]
    outputs = (sys.__stderr__, sys.__stdout__)
    moved = []
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in outputs:
            moved.append((handler, handler.setStream(stream)))
    try:
        yield
    finally:
        for handler, before in moved:
            handler.setStream(before)


def show_cursor() -> None:
    """Show the terminal's cursor again, before a process ends at once."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


def describe(record: Mapping[str, float]) -> str:
    """The metrics of a record in one line."""
    forms = {
        "train/loss": "loss {:.4f}",
        "train/lr": "lr {:.2e}",
        "train/grad_norm": "norm {:.2f}",
        "perf/tokens_per_second": "{:,.0f} tok/s",
        "perf/mfu": "MFU {:.1%}",
        "eval/train_loss": "train {:.4f}",
        "eval/val_loss": "val {:.4f}",
        "eval/val_bits_per_byte": "{:.4f} bits/byte",
        "eval/whole_val_loss": "whole val {:.4f}",
        "eval/hellaswag_acc_norm": "HellaSwag {:.1%}",
    }
    return " | ".join(form.format(record[key]) for key, form in forms.items() if key in record)


def last_words(config: Config, state: "TrainState", signal_name: str | None) -> str:
    """What the run reached, where it is, and what to do next."""
    out, val = config.out_dir, state.val_loss
    length = "train.max_tokens" if config.train.max_tokens else "train.max_steps"
    spent = timedelta(seconds=round(state.seconds))
    loss = "" if val is None else f", val loss {val:.4f}"
    if signal_name:
        return (
            f"{signal_name}: saved at step {state.step:,} after {spent}{loss}; "
            "launch the same command again to continue"
        )
    return (
        f"{state.step:,} steps, {state.tokens:,} tokens in {spent}{loss}\n"
        f"  run         {out} (metrics.csv, metrics.jsonl, samples/, checkpoints/)\n"
        f'  try         accel-gpt sample {out} --prompt "..."\n'
        f"  curves      tensorboard --logdir {out}\n"
        f"  go on       the same command with a larger {length} and "
        f"--checkpoint.allow_change {length}"
    )
