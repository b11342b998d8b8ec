"""Print what a run does: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.console import Progress, can_draw, format_clock, in_notebook, write_err
from accel_gpt.launcher import is_main
from accel_gpt.training.panel import FORMS, Panel
from accel_gpt.training.state import TrainState

SHOW_CURSOR = b"\x1b[?25h\n"  # which a live panel hides
PANEL_ONLY = ("train/skipped", "perf/memory_gb", "perf/step_ms", "tokens")


class Display:
    """A live panel on a terminal, plain lines elsewhere.

    Prints on rank 0 alone; with `log.level: warning` warnings alone.
    """

    def __init__(self, active: bool, config: Config, plan: Plan) -> None:
        self.active = active
        self.config = config
        self.plan = plan
        self.verbose = active and config.log.level == "info"
        self.panel: Panel | None = None
        self.evaluation: Progress | None = None  # of the evaluation under way

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
        with contextlib.suppress(OSError):  # of a log on a full disk, a terminal that is gone
            if self.panel:
                self.panel.print(text)
            else:
                write_err(text)

    def acknowledge(self, text: str) -> None:
        """Print a line at every `log.level`; a panel draws it until the end."""
        if not self.active:
            return
        with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
            if self.panel:
                self.panel.acknowledge(text)
            else:
                write_err(text)
                sys.stderr.flush()

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Print or draw the metrics of one record."""
        if self.panel:
            self.panel.update(record, seconds_left)
        if self.panel is None or "eval/val_loss" in record:
            keys = [key for key in FORMS if key in record and key not in PANEL_ONLY]
            metrics = " | ".join(FORMS[key].format(record[key]) for key in keys)
            left = format_clock(seconds_left)
            self.log(f"step {record['step']:,}/{self.plan.max_steps:,} | {metrics} | left {left}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Print or draw that `done` batches of an evaluation were computed."""
        if self.evaluation is None:
            in_lines = self.verbose and self.panel is None
            self.evaluation = Progress("evaluating", unit="batches", active=in_lines)
        self.evaluation.update(done, total)
        if self.panel:
            self.panel.doing = self.evaluation.text()

    def show_step(self, step: int) -> None:
        """Draw that a step was completed, with its evaluation."""
        self.evaluation = None
        if self.panel:
            self.panel.step = step
            self.panel.doing = ""

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Continue at a step, with the losses of the run until then."""
        if self.panel:
            self.panel.resume(step, losses)


def is_shown(config: Config, text: str) -> bool:
    """Return whether `log.level` lets a line be printed."""
    return config.log.level == "info" or text.startswith("WARNING")


def print_line(config: Config, text: str) -> None:
    """Print a line on rank 0 before a run has its `Display`, if `log.level` lets it."""
    if is_main() and is_shown(config, text):
        write_err(text)


def show_cursor() -> None:
    """Show the terminal's cursor again, before a process ends at once."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


def summarize_run(config: Config, plan: Plan, state: TrainState, signal_name: str | None) -> str:
    """Return the last lines of a launch: what the run reached, where it is, what to do next."""
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
        f"{state.step:,} steps, {state.tokens:,} tokens in {spent}{loss}\n"
        f"  run         {out} ({files})\n"
        f'  try         accel-gpt sample {out} --prompt "..."\n'
        f"  curves      accel-gpt report {out}\n"
        f"  use it      accel-gpt export {out} --to FOLDER for transformers, or --gguf FILE for "
        "llama.cpp and Ollama\n"
        f"  go on       the same command with a larger {length}{allow}"
    )
