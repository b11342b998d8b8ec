"""Figures of a run: `metrics.jsonl` and `metrics.csv`.

One record a step: `step`, `tokens`, `time` and any of the keys of `COLUMNS`; keys never change
their meaning. Only the main process writes.
"""

import csv
import errno
import io
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_gpt.errors import require
from accel_gpt.files import sync, write_all, write_file
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
    "eval/train_loss_se",
    "eval/val_loss_se",
    "eval/val_bits_per_byte_se",
    "eval/hellaswag_acc",
    "eval/hellaswag_acc_norm",
)
CSV_ONLY = ("progress", "tokens_this_launch", "train/perplexity")
Record = dict[str, float]


def without_inf(record: Record) -> dict[str, float | None]:
    """What JSON can hold of a record: None for what is not finite."""
    return {k: v if math.isfinite(v) else None for k, v in record.items()}


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
        line = json.dumps(without_inf(record)) + "\n"
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
    """Lines that end with a newline, of a file that may be missing; of no pipe or device."""
    require(not path.is_dir(), f"{path} is a folder, expected a file; move it away")
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def losses(path: Path) -> Iterator[float]:
    """The training losses in a metrics.jsonl of which `kept_lines` are left."""
    for line in read_lines(path):
        if type(loss := load_json(line).get("train/loss")) in (int, float):
            yield loss


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
