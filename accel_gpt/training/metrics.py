"""Write the metrics of a run to `metrics.jsonl` and `metrics.csv`; measure speed and time.

A step has at most one record: `step`, `tokens`, `time` and any keys of `COLUMNS`. The meaning of a
key never changes. Only rank 0 writes.
"""

import csv
import errno
import io
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from accel_gpt.config.plan import Plan
from accel_gpt.errors import UserError, require
from accel_gpt.files import append_all_or_nothing, strict_json, sync, write_file
from accel_gpt.launch.devices import peak_flops
from accel_gpt.launch.machine import device_name, memory_gb
from accel_gpt.launch.unsupported import REPLICATED
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.sharding import is_sharded
from accel_gpt.model.sizes import flops_at_length, mfu
from accel_gpt.runs.folder import RunFolder, is_number

# Columns of metrics.csv. `progress` is in percent of the run. All columns except progress,
# tokens_this_launch and train/perplexity are also keys of metrics.jsonl. data/stage counts from 1;
# only runs with stages have it. metrics.jsonl also has data/epochs/NAME and eval/val_loss/NAME for
# mixtures, train/update_ratio/PART, the results of benchmarks, and `OF_LAUNCH`.
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
    "data/stage",
    "perf/tokens_per_second",
    "perf/step_ms",
    "perf/mfu",
    "perf/memory_gb",
    "perf/data_wait_ms",
    "perf/slowest_rank",
    "perf/evaluation_s",
    "perf/samples_s",
    "perf/save_s",
    "eval/train_loss",
    "eval/train_perplexity",
    "eval/train_bits_per_byte",
    "eval/val_loss",
    "eval/val_perplexity",
    "eval/val_bits_per_byte",
    "eval/train_loss_se",
    "eval/train_bits_per_byte_se",
    "eval/val_loss_se",
    "eval/val_bits_per_byte_se",
)
# The first record of each launch has these: its number in run.json, from 1, and what goes on.
OF_LAUNCH = ("launch/number", "launch/device", "launch/price", "launch/gap_s")
Record = dict[str, float]


def checked_record(found: object, place: str, others: Collection[str] = ()) -> Record:
    """Return the metrics that a function of --code returned, as plain numbers.

    `place`: of the function, for errors. Raises `UserError` unless it returned {name: number}, with
    names that no other metric has; `others`: further such names.
    """
    if not isinstance(found, Mapping):
        raise UserError(f"{place} returned {type(found).__name__}; return {{name: number}}")
    record = {}
    for name, value in found.items():
        require(
            name not in (*COLUMNS, *OF_LAUNCH) and name not in others,
            f"{place} returned {name!r}, the name of another metric",
        )
        require(isinstance(name, str), f"{place} returned {name!r}; the name must be a text")
        try:
            record[name] = float(value.full_tensor() if is_sharded(value) else value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{place} returned {name} as {value!r:.60}; return a number") from None
    return record


class MetricsLog:
    """The two metrics files, cut back to the step from which the run resumes."""

    def __init__(self, out_dir: Path, step: int, tokens: int) -> None:
        self.jsonl = out_dir / "metrics.jsonl"
        self.csv = out_dir / "metrics.csv"
        self.tokens_before = tokens
        self.lock = threading.Lock()  # the thread that saves calls `sync`
        self.unwritten: dict[Path, bytes] = {self.jsonl: b"", self.csv: b""}  # while a disk is full
        for path in (self.jsonl, self.csv):
            require(not path.is_dir(), f"{path} is a folder, not a file; move it away")
        run = RunFolder(out_dir)
        records = [record for record in run.records() if record["step"] <= step]
        rows = [row for row in run.csv_records() if int(row["step"]) <= step]
        self.losses: list[tuple[int, float]] = []  # steps and training losses up to `step`
        for record in records:
            if is_number(record.get("train/loss")):
                self.losses.append((record["step"], record["train/loss"]))
        write_file(self.jsonl, [as_jsonl(records)])
        write_file(self.csv, [as_csv(rows)])

    def write(self, record: Mapping[str, Any], max_steps: int) -> None:
        """Append one record of a run of `max_steps` steps to both files.

        Raises `OSError` if the disk is full; the next call then writes this record too.
        """
        loss = record.get("train/loss")
        row = {
            **record,
            "progress": round(100 * record["step"] / max_steps, 2),
            "tokens_this_launch": record["tokens"] - self.tokens_before,
        }
        if loss is not None:
            row["train/perplexity"] = math.exp(min(loss, 700))
        with self.lock:
            self.unwritten[self.jsonl] += as_jsonl([record])
            self.unwritten[self.csv] += as_csv([row], header=False)
            for path, content in self.unwritten.items():
                if path == self.csv and not path.exists():  # a user has removed it
                    content = as_csv([]) + content
                append_all_or_nothing(path, content)
                self.unwritten[path] = b""

    def sync(self) -> None:
        """Sync both files to disk, before a checkpoint of the same step becomes valid.

        Raises `OSError` if a record is not written yet.
        """
        with self.lock:
            if any(self.unwritten.values()):
                raise OSError(errno.ENOSPC, "metrics wait for room", str(self.jsonl))
        for path in (self.jsonl, self.csv):
            if path.exists():  # a user may have removed it
                sync(path)


class Speed:
    """Computes tokens per second, and MFU if the device's peak FLOP/s are known."""

    def __init__(self, gpt: LanguageModel, plan: Plan, accelerator: Accelerator) -> None:
        self.plan = plan
        self.device = accelerator.device
        self.gpt = gpt
        self.flops_per_token = gpt.flops_per_token()
        self.dtype = accelerator.mixed_precision
        if self.dtype == "no":
            tf32 = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
            self.dtype = "tf32" if tf32 else "fp32"
        self.peak = peak_flops(device_name(self.device), self.dtype)

    def metrics(self, seconds_per_step: float, step: int) -> Record:
        """Return the perf/ keys of a record at a completed `step`, whose stage has all its steps.

        MFU is a fraction of the peak of all devices.
        """
        plan = self.plan.at(step - 1)
        rate = plan.tokens_per_step / seconds_per_step
        metrics = {
            "perf/tokens_per_second": rate,
            "perf/step_ms": 1000 * seconds_per_step,
            "perf/memory_gb": memory_gb(self.device),
        }
        if self.peak:
            metrics["perf/mfu"] = mfu(rate, self.flops_at(plan), self.peak, plan.world_size)
        return metrics

    def flops_at(self, plan: Plan) -> float:
        """Return the FLOPs per token of a stage; an own module has one number for all lengths."""
        if not isinstance(self.gpt, GPT):
            return self.flops_per_token
        return flops_at_length(self.flops_per_token, self.gpt.config, plan.block_size)


class Stopwatch:
    """Measures the time of the whole run in seconds, and the training time between two laps."""

    def __init__(self, device: torch.device, step: int, seconds_before: float) -> None:
        now = time.monotonic()
        self.device = device
        self.first_start = now - seconds_before
        self.launched = now
        self.first_step = step
        self.step = step  # at the last lap
        self.since = now  # time of the last lap
        self.paused = 0.0  # seconds of pauses since the last lap
        self.pauses: dict[str, float] = {}  # their seconds since `take_pauses`, by what was done
        self.timed_steps = 0  # of all laps but the first, in which a launch compiles
        self.timed_seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds of the timed steps, without pauses."""
        return self.timed_seconds / self.timed_steps

    def elapsed(self) -> float:
        """Return the seconds of all launches, pauses included."""
        return time.monotonic() - self.first_start

    def left(self, step: int, max_steps: int) -> float | None:
        """Estimate the seconds to the end from the pace of this launch, pauses included.

        Returns None before the second step of the launch, since the first one may compile.
        """
        if step <= self.first_step + 1:
            return None
        pace = (time.monotonic() - self.launched) / (step - self.first_step)
        return pace * (max_steps - step)

    def lap(self, step: int) -> float:
        """Return the seconds per step since the last lap, without pauses; start a new lap."""
        now = time.monotonic()
        steps = step - self.step
        seconds = now - self.since - self.paused
        if self.step > self.first_step:
            self.timed_steps += steps
            self.timed_seconds += seconds
        self.step = step
        self.since = now
        self.paused = 0.0
        return seconds / max(steps, 1)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Enclose work that is not training: evaluation, samples, checkpoints."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.monotonic()
        yield
        self.paused += time.monotonic() - start

    @contextmanager
    def spend(self, name: Literal["evaluation", "samples", "save"]) -> Iterator[None]:
        """Enclose a part of a pause, and count its seconds under a name."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.pauses[name] = self.pauses.get(name, 0.0) + seconds

    def take_pauses(self) -> Record:
        """Return the seconds of each part of the pauses since the last call."""
        taken = {f"perf/{name}_s": seconds for name, seconds in self.pauses.items()}
        self.pauses = {}
        return taken


class RankClock:
    """Compare the ranks of a step: the seconds until the end of their first forward pass.

    They include the wait for the batch, but no wait for another rank. Under FSDP, ranks already
    wait for each other in the forward pass, so nothing is measured there.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        alone = accelerator.num_processes == 1
        self.active = not alone and accelerator.distributed_type in REPLICATED
        self.on_cuda = accelerator.device.type == "cuda"
        self.start: Any = None
        self.end: Any = None

    def now(self) -> Any:
        """Return the time: on CUDA, an event of the device."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Note the start of a step that will be logged."""
        if self.active:
            self.start = self.now()
            self.end = None

    def end_forward(self) -> None:
        """Note the end of the first forward pass in this step."""
        if self.start is not None and self.end is None:
            self.end = self.now()

    def metrics(self) -> Record:
        """Return how many times as long the slowest rank took as the median one; a collective."""
        if not self.active:
            return {}
        start = self.start
        end = self.end
        self.start = None
        seconds = start.elapsed_time(end) if self.on_cuda else end - start
        own = torch.tensor([seconds], dtype=torch.float32, device=self.accelerator.device)
        every = sorted(self.accelerator.gather(own).tolist())
        return {"perf/slowest_rank": every[-1] / max(every[(len(every) - 1) // 2], 1e-9)}


def as_jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Format records as lines of metrics.jsonl; values that are not finite become null."""
    return "".join(f"{strict_json(record)}\n" for record in records).encode()


def as_csv(rows: Iterable[Mapping[str, Any]], header: bool = True) -> bytes:
    """Format rows as lines of metrics.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
