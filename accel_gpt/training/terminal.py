"""Show the progress of a run: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, plural
from accel_gpt.console import Progress, can_draw, format_clock, in_notebook, write_err
from accel_gpt.launcher import is_main
from accel_gpt.training.panel import FORMS, Panel
from accel_gpt.training.state import TrainState

SHOW_CURSOR = b"\x1b[?25h\n"  # the live panel hides the cursor
PANEL_ONLY = ("train/skipped", "perf/memory_gb", "perf/step_ms", "tokens")


class Display:
    """A live panel on a terminal, plain lines elsewhere.

    Prints only on rank 0. With `log.level: warning`, prints only warnings.
    """

    def __init__(self, active: bool, config: Config, plan: Plan) -> None:
        self.active = active
        self.config = config
        self.plan = plan
        self.verbose = active and config.log.level == "info"
        self.panel: Panel | None = None
        self.evaluation: Progress | None = None  # of the evaluation in progress

    def __enter__(self) -> Self:
        if self.verbose and (can_draw() or in_notebook()):
            self.panel = Panel(self.config, self.plan)
            self.panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.panel:
            self.panel.stop()
            self.panel = None

    def log(self, text: str) -> None:
        """Print a line that stays."""
        if not (self.active and is_shown(self.config, text)):
            return
        with contextlib.suppress(OSError):  # the disk of a log is full, or the terminal is gone
            if self.panel:
                self.panel.print(text)
            else:
                write_err(text)

    def acknowledge(self, text: str) -> None:
        """Print a line at every `log.level`; a panel shows it until the end."""
        if not self.active:
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            if self.panel:
                self.panel.acknowledge(text)
            else:
                write_err(text)
                sys.stderr.flush()

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Print or draw the metrics of a record."""
        if self.panel:
            self.panel.update(record, seconds_left)
        if self.panel is None or "eval/val_loss" in record:
            keys = [key for key in FORMS if key in record and key not in PANEL_ONLY]
            metrics = " | ".join(FORMS[key].format(record[key]) for key in keys)
            left = format_clock(seconds_left)
            self.log(f"step {record['step']:,}/{self.plan.max_steps:,} | {metrics} | left {left}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Print or draw that `done` of `total` batches of an evaluation were computed."""
        if self.evaluation is None:
            as_lines = self.verbose and self.panel is None
            self.evaluation = Progress("evaluating", unit="batches", active=as_lines)
        self.evaluation.update(done, total)
        if self.panel:
            self.panel.activity = self.evaluation.text()

    def show_step(self, step: int) -> None:
        """Draw a completed step; its evaluation is over."""
        self.evaluation = None
        if self.panel:
            self.panel.step = step
            self.panel.activity = ""

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Set the step and the losses of the run so far."""
        if self.panel:
            self.panel.resume(step, losses)


def is_shown(config: Config, text: str) -> bool:
    """Return whether `log.level` allows a line."""
    return config.log.level == "info" or text.startswith("WARNING")


def print_line(config: Config, text: str) -> None:
    """Print a line on rank 0 if `log.level` allows it, before the run has its `Display`."""
    if is_main() and is_shown(config, text):
        write_err(text)


def show_cursor() -> None:
    """Show the terminal's cursor again, before the process ends without cleaning up."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


def summarize_run(config: Config, plan: Plan, state: TrainState, signal_name: str | None) -> str:
    """Return the last lines of a launch: the result, the folder of the run and the next steps."""
    out = shlex.quote(config.out_dir)
    spent = format_clock(state.seconds)
    loss = "" if state.val_loss is None else f", val loss {state.val_loss:.4f}"
    if signal_name:
        return (
            f"{signal_name}: saved at step {state.step:,} after {spent}{loss}; "
            "launch the same command again to continue"
        )
    if state.step < plan.max_steps:
        return (
            f"train.stop_at: saved at step {state.step:,} of {plan.max_steps:,} after {spent}"
            f"{loss}; launch again without it to continue"
        )
    files = ", ".join(sorted(path.name for path in Path(config.out_dir).glob("[!.]*")))
    length = "train.max_tokens" if config.train.max_tokens else "train.max_steps"
    allow = ""
    if config.schedule.name != "constant":
        allow = f" and --checkpoint.allow_change {length}"
    return (
        f"{plural(state.step, 'step')}, {state.tokens:,} tokens in {spent}{loss}\n"
        f"  run         {out} ({files})\n"
        f'  try         accel-gpt sample {out} --prompt "..."\n'
        f"  curves      accel-gpt report {out}\n"
        f"  use it      accel-gpt export {out} --to FOLDER for transformers, or --gguf FILE for "
        "llama.cpp and Ollama\n"
        f"  train more  the same command with a larger {length}{allow}"
    )
