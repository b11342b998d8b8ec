"""What a run prints: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.console import EvaluationProgress, ProgressLine
from accel_gpt.training.state import TrainState

if TYPE_CHECKING:
    from accel_gpt.training.panel import Panel

SHOW_CURSOR = b"\x1b[?25h\n"  # which a live panel hides
FORMS: Mapping[str, str] = MappingProxyType(  # of metrics
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
PANEL_ONLY = ("train/skipped", "perf/memory_gb", "perf/step_ms", "tokens")


class Display:
    """A live panel on a terminal, plain lines elsewhere.

    Prints on rank 0 alone; with `log.level: warning` warnings alone.
    """

    def __init__(self, active: bool, config: Config, plan: Plan) -> None:
        self.active, self.config, self.plan = active, config, plan
        self.verbose = active and config.log.level == "info"
        self.panel: Panel | None = None
        self.line = ProgressLine(terminal=False)
        self.evaluation = EvaluationProgress()

    def __enter__(self) -> Self:
        drawable = sys.stderr.isatty() and "utf" in str(sys.stderr.encoding).lower()
        drawable &= os.environ.get("TERM") not in ("dumb", "unknown")  # it moves its cursor
        if self.verbose and (drawable or in_notebook()):
            from accel_gpt.training.panel import Panel

            self.panel = Panel(self.config, self.plan)
            self.panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.panel:
            self.panel.stop()
            self.panel = None

    def log(self, text: str) -> None:
        """Print a line that stays."""
        if not (self.verbose or (self.active and text.startswith("WARNING"))):
            return
        with contextlib.suppress(OSError):  # of a log on a full disk, a terminal that is gone
            if self.panel:
                self.panel.print(text)
            else:
                sys.stderr.write(f"{text}\n")

    def acknowledge(self, text: str) -> None:
        """Print a line at every `log.level`; a panel draws it until the end."""
        if not self.active:
            return
        with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
            if self.panel:
                self.panel.acknowledge(text)
            else:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """Print or draw the metrics of one record."""
        if self.panel:
            self.panel.update(record, seconds_left)
        if self.panel is None or "eval/val_loss" in record:
            keys = [key for key in FORMS if key in record and key not in PANEL_ONLY]
            metrics = " | ".join(FORMS[key].format(record[key]) for key in keys)
            left = timedelta(seconds=min(round(seconds_left), 10**12))
            self.log(f"step {record['step']:,}/{self.plan.max_steps:,} | {metrics} | left {left}")

    def evaluated(self, done: int, total: int) -> None:
        """Print or draw that `done` batches of an evaluation were computed."""
        text = self.evaluation.words(done, total)
        if self.panel:
            self.panel.doing = text
        elif self.verbose:
            self.line.show(text)

    def advance(self, step: int) -> None:
        """Draw that a step was completed."""
        if self.panel:
            self.panel.step, self.panel.doing = step, ""
        self.line.clear()

    def resume(self, step: int, losses: Iterable[float]) -> None:
        """Begin at a step, with the losses of the run until then."""
        if self.panel:
            self.panel.resume(step, losses)


def in_notebook() -> bool:
    """Whether a notebook shows what this process prints."""
    return "ipykernel.zmqshell" in sys.modules


def show_cursor() -> None:
    """Show the terminal's cursor again, before a process ends at once."""
    if sys.__stderr__ and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)


def last_words(config: Config, plan: Plan, state: TrainState, signal_name: str | None) -> str:
    """What the run reached, where it is, and what to do next."""
    out, val = shlex.quote(config.out_dir), state.val_loss
    files = ", ".join(sorted(path.name for path in Path(config.out_dir).glob("[!.]*")))
    length = "train.max_tokens" if config.train.max_tokens else "train.max_steps"
    spent = timedelta(seconds=round(state.seconds))
    loss = "" if val is None else f", val loss {val:.4f}"
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
    allow = f" and --checkpoint.allow_change {length}" * (config.schedule.name != "constant")
    return (
        f"{state.step:,} steps, {state.tokens:,} tokens in {spent}{loss}\n"
        f"  run         {out} ({files})\n"
        f'  try         accel-gpt sample {out} --prompt "..."\n'
        f"  curves      accel-gpt report {out}\n"
        f"  go on       the same command with a larger {length}{allow}"
    )
