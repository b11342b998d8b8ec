"""Figures of a run: `metrics.jsonl`, `metrics.csv`, trackers, and what a person sees.

One record a step: `step`, `tokens`, `time` and any of the keys of `COLUMNS`; keys never change
their meaning. Only the main process writes.
"""

import contextlib
import csv
import errno
import io
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator

from accel_gpt.config import Config
from accel_gpt.files import sync, write_all, write_file
from accel_gpt.parse import to_flat, to_plain, to_yaml
from accel_gpt.run.checkpoint import TrainState
from accel_gpt.untrusted import load_json

# metrics.csv, and with it the keys of metrics.jsonl; progress in percent of the run. Mixtures have
# data/epochs/NAME and eval/val_loss/NAME in metrics.jsonl besides; log.batch_hash, data/batch_hash.
COLUMNS = (
    "step",
    "progress",
    "tokens",
    "tokens_this_launch",
    "time",
    "train/loss",
    "train/perplexity",
    "train/lr",
    "train/grad_norm",
    "train/skipped",
    "train/spikes",
    "data/epochs",
    "perf/tokens_per_second",
    "perf/step_ms",
    "perf/mfu",
    "perf/memory_gb",
    "eval/train_loss",
    "eval/val_loss",
    "eval/val_perplexity",
    "eval/val_bits_per_byte",
)
CSV_ONLY = ("progress", "tokens_this_launch", "train/perplexity")
Record = dict[str, float]


class MetricsLog:
    """The two files of figures, cut back to the step that a run resumes from."""

    def __init__(self, out_dir: Path, step: int, tokens: int, max_steps: int) -> None:
        self.jsonl, self.csv = out_dir / "metrics.jsonl", out_dir / "metrics.csv"
        self.tokens_before, self.max_steps = tokens, max_steps
        self.lock = threading.Lock()  # of the thread that saves
        self.waiting: dict[Path, str] = {self.jsonl: "", self.csv: ""}  # what the disk refused
        kept = "".join(kept_lines(self.jsonl, step))
        write_file(self.jsonl, [kept.encode()])
        kept = csv_line(COLUMNS) + "".join(kept_rows(self.csv, step))
        write_file(self.csv, [kept.encode()])

    def write(self, record: Record) -> None:
        """Append one record to both files; one that finds no room goes there with a later one.

        Raises `OSError` where it waits.
        """
        finite = {k: v if math.isfinite(v) else None for k, v in record.items()}  # JSON has no inf
        line = json.dumps(finite) + "\n"
        loss = record.get("train/loss")
        row: dict[str, float] = {
            **record,
            "progress": round(100 * record["step"] / self.max_steps, 2),
            "tokens_this_launch": record["tokens"] - self.tokens_before,
        }
        if loss is not None:
            row["train/perplexity"] = math.exp(min(loss, 700))
        with self.lock:
            self.waiting[self.jsonl] += line
            self.waiting[self.csv] += csv_line([row.get(column, "") for column in COLUMNS])
            self.append()

    def append(self) -> None:
        """Write what waits; `OSError` where there is no room."""
        for path, text in self.waiting.items():
            append(path, text)
            self.waiting[path] = ""

    def sync(self) -> None:
        """Force both files to disk: before a checkpoint, which must not know more than they do."""
        with self.lock:
            if any(self.waiting.values()):
                raise OSError(errno.ENOSPC, "figures wait for room", str(self.jsonl))
        sync(self.jsonl)
        sync(self.csv)


class Stopwatch:
    """Seconds of the whole run, and of training alone between two log lines."""

    def __init__(
        self, seconds_before: float, step: int, settle: Callable[[], object] = int
    ) -> None:
        self.settle = settle  # waits until the device has done what it was given
        self.origin = time.monotonic() - seconds_before
        self.launched, self.first_step = time.monotonic(), step
        self.step, self.since, self.paused = step, time.monotonic(), 0.0

    def elapsed(self) -> float:
        """Seconds since the run's first start, those before a resume included."""
        return time.monotonic() - self.origin

    def left(self, step: int, max_steps: int) -> float:
        """Seconds to the end at the pace of this launch, pauses included."""
        pace = (time.monotonic() - self.launched) / max(step - self.first_step, 1)
        return pace * (max_steps - step)

    def lap(self, step: int) -> float:
        """Seconds of training per step since the last lap, without pauses."""
        now = time.monotonic()
        seconds = (now - self.since - self.paused) / max(step - self.step, 1)
        self.step, self.since, self.paused = step, now, 0.0
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is not training: evaluation, samples, checkpoints."""
        self.settle()
        start = time.monotonic()
        yield
        self.paused += time.monotonic() - start


def write_samples(accelerator: Accelerator, out_dir: Path, step: int, text: str) -> None:
    """Keep the samples of a step in the trackers and as `samples/step_00001000.txt`."""
    accelerator.log({"samples": as_code(text)}, step=step)
    if accelerator.is_main_process:
        folder = out_dir / "samples"
        folder.mkdir(exist_ok=True)
        (folder / f"step_{step:08d}.txt").write_text(text + "\n", encoding="utf-8")


def kept_lines(path: Path, step: int) -> list[str]:
    """Whole lines of a metrics.jsonl up to `step`; a torn last line is dropped."""
    kept = []
    for line in read_lines(path):
        try:
            record = load_json(line)
            if record["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # not of ours
            continue
    return kept


def kept_rows(path: Path, step: int) -> list[str]:
    """Whole rows of a metrics.csv up to `step`, without its header."""
    numbered = re.compile(r"[0-9]{1,18}(?=,)")
    rows = ((numbered.match(line), line) for line in read_lines(path))
    return [line for number, line in rows if number and int(number[0]) <= step]


def read_lines(path: Path) -> list[str]:
    """Lines that end with a newline, of a file that may be missing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def csv_line(values: Any) -> str:
    """One row of CSV."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()


def append(path: Path, text: str) -> None:
    """Add to a file, all or nothing; closed again at once so that a reader sees whole lines."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            write_all(file, memoryview(text.encode()))
        except OSError:
            file.truncate(before)
            raise


def start_trackers(accelerator: Accelerator, config: Config, step: int) -> None:
    """Open Accelerate's trackers; TensorBoard forgets what lies beyond the resumed step."""
    others = [name for name in config.log.trackers if name != "tensorboard"]
    plain = {key: str(value) for key, value in to_flat(to_plain(config)).items()}
    accelerator.init_trackers(
        "accel_gpt",
        config=plain if others else None,  # as hyperparameters, TensorBoard shows an extra run
        init_kwargs={"tensorboard": {"purge_step": step + 1}},
    )
    accelerator.log({"config": as_code(to_yaml(config))}, step=step)


def as_code(text: str) -> str:
    """Text that TensorBoard, which reads Markdown, shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class Display:
    """A progress bar on a terminal, plain lines elsewhere; silent but on the main process."""

    def __init__(self, active: bool, max_steps: int) -> None:
        self.active, self.max_steps = active, max_steps
        self.bar: Any = None

    def __enter__(self) -> Self:
        if self.active and sys.stderr.isatty():
            self.bar = start_bar(self.max_steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self.active:
            with contextlib.suppress(OSError):  # of a log on a full disk
                sys.stderr.write(f"{text}\n")

    def show(self, record: Mapping[str, float], seconds_left: float) -> None:
        """The figures of one record."""
        line, step = describe(record), int(record["step"])
        left = timedelta(seconds=round(seconds_left))
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step, line=line, left=left)
        if self.bar is None or "eval/val_loss" in record:
            self.say(f"step {step:,}/{self.max_steps:,} | {line} | left {left}")


def start_bar(max_steps: int) -> Any:
    """The live progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TextColumn("left {task.fields[left]}"),
        console=Console(stderr=True),
    )
    bar.add_task("train", total=max_steps, line="", left="?")
    bar.start()
    return bar


def describe(record: Mapping[str, float]) -> str:
    """The figures of a record as a person reads them."""
    forms = {
        "train/loss": "loss {:.4f}",
        "train/lr": "lr {:.2e}",
        "train/grad_norm": "norm {:.2f}",
        "perf/tokens_per_second": "{:,.0f} tok/s",
        "perf/mfu": "MFU {:.1%}",
        "eval/train_loss": "train {:.4f}",
        "eval/val_loss": "val {:.4f}",
        "eval/val_bits_per_byte": "{:.4f} bits/byte",
    }
    return " | ".join(form.format(record[key]) for key, form in forms.items() if key in record)


def last_words(config: Config, state: TrainState, signal_name: str | None) -> str:
    """What was reached, where it lies and what to do next."""
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
        f"  train on    the same command with a larger {length} and "
        f"--checkpoint.allow_change {length}"
    )
