"""Read the folder of a run: launches, config, metrics, samples and checkpoints.

    run.json            {"launches": [{step, command, plan, device, versions, ...}]}, oldest first
    config.yaml         the config of the last launch, with `auto` resolved
    metrics.jsonl       one record per line: step, tokens, time and metrics
    metrics.csv         the same records as a table
    code.py             a copy of the file of --code; nothing executes it
    samples/            step_00001000.txt: texts, with `PROMPT_END` after the prompt
    checkpoints/        step_00001000/
    .uploading/         links to the checkpoint being uploaded; see `publish/uploader.py`
    data_files.json     size and times of each local data file
    best                the step of the best checkpoint
    run_name            the name of the run in its trackers and copies, see `run_name`
    .launch             the launch of this folder that owned copies last, and their place
    .lock               locked while a process works in the folder

Skips files and records that are missing, incomplete or malformed. Needs no torch.
"""

import contextlib
import csv
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import msgspec

from accel_gpt.config.plan import Finish
from accel_gpt.config.values import relocate, to_flat
from accel_gpt.console import MACHINE_ERRORS
from accel_gpt.errors import BusyError, UserError
from accel_gpt.files import (
    is_at,
    is_locked,
    load_yaml,
    locked_file,
    write_file,
)
from accel_gpt.json_files import load_json_or_none

CHECKPOINT = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")  # as `step_name` returns
SAMPLES = re.compile(r"step_(\d{8,15})\.txt")
PROMPT_END = "\N{BOX DRAWINGS HEAVY VERTICAL}"  # in the texts of `samples`, after the prompt
CODE = "code.py"
RUN_NAME = "run_name"
LAST_LAUNCH = ".launch"
END_BYTES = 2**16  # of metrics.jsonl that are read for its last record, which takes about 500


@dataclass(frozen=True)
class RunFile:
    """The content of run.json."""

    launches: list[dict[str, Any]]


class RunFolder:
    """A run, read from its folder. A cached property reads its file once, at the first use.

    If you need both `in_use` and `records`, read `in_use` first: if it is False, the records are
    complete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def launches(self) -> tuple[Mapping[str, Any], ...]:
        """Read the launches in run.json, oldest first; none if it is missing or damaged."""
        record = load_json_or_none(RunFile, self.path / "run.json")
        return tuple(record.launches) if record else ()

    def last_launch(self, *keys: str) -> Any:
        """Return the value of nested `keys` in the last launch, such as "plan", "max_steps".

        Returns None if there is none.
        """
        return self.each_launch(*keys)[-1] if self.launches else None

    def each_launch(self, *keys: str) -> list[Any]:
        """Return the value of nested `keys` in each launch, oldest first; None if it lacks them."""
        values: list[Any] = list(self.launches)
        for key in keys:
            values = [one.get(key) if isinstance(one, Mapping) else None for one in values]
        return values

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Read config.yaml by dotted keys, with paths for the run's present folder.

        {} if the file is missing or cannot be read.
        """
        try:
            content = load_yaml((self.path / "config.yaml").read_text(encoding="utf-8"))
            return to_flat(relocate(content, str(self.path)))
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of metrics.jsonl that have a numeric `step`, in the file's order.

        If the file was edited, a record may have any other keys and values.
        """
        for line in whole_lines(self.path / "metrics.jsonl"):
            record = parse_metrics_line(line)
            if record:
                yield record

    def csv_records(self) -> list[dict[str, str]]:
        """Read the rows of metrics.csv as column name -> text."""
        lines = [line.decode(errors="replace") for line in whole_lines(self.path / "metrics.csv")]
        rows = csv.DictReader(lines, quoting=csv.QUOTE_NONE)
        return [row for row in rows if re.fullmatch("[0-9]{1,15}", row.get("step") or "")]

    @property
    def step(self) -> int:
        """Return the step of the last record; 0 if there is none. Reads only the file's end."""
        with contextlib.suppress(OSError), (self.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - END_BYTES, 0))
            *lines, _ = file.read().split(b"\n")
            for record in filter(None, map(parse_metrics_line, reversed(lines))):
                return int(record["step"])
        return 0

    @property
    def max_steps(self) -> int | None:
        """Return the number of steps that the last launch planned; None if unknown."""
        steps = number(self.last_launch("plan", "max_steps"))
        return int(steps) if 0 < steps < math.inf else None

    @property
    def finish(self) -> Finish | None:
        """Return the end that a function of --code gave the run; None if none did."""
        with contextlib.suppress(msgspec.ValidationError):  # a file that was edited by hand
            return msgspec.convert(self.last_launch("plan", "finish"), Finish | None)
        return None

    @property
    def end(self) -> int | None:
        """Return the last step of the run; None if unknown."""
        return self.finish.step if self.finish else self.max_steps

    @cached_property
    def in_use(self) -> bool:
        """Return whether a process holds the lock of the folder, see `locked`."""
        return is_locked(self.path / ".lock")

    @property
    def samples(self) -> Mapping[int, Path]:
        """Return the sample files by step, ascending."""
        found = {}
        for path in (self.path / "samples").glob("step_*.txt"):
            match = SAMPLES.fullmatch(path.name)
            if match and path.is_file():
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def sample_texts(self, step: int) -> list[str]:
        """Read the sampled texts of a step in `samples`."""
        text = self.samples[step].read_bytes().decode(errors="replace")
        _, *texts = re.split(r"^--- sample \d+\n", f"{text}\n", flags=re.MULTILINE)
        return [text.removesuffix("\n\n") for text in texts]

    @property
    def best(self) -> str:
        """Read the file `best`: a step, unless a user edited it. Returns "" if it is missing."""
        return self.word("best")

    @property
    def stored_name(self) -> str:
        """Read the name of the run, see `run_name`; "" if it has none yet."""
        return self.word(RUN_NAME)

    def word(self, name: str) -> str:
        """Read a file that holds one word; "" if it is missing."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoint folders by step, ascending, not verified."""
        root = self.path / "checkpoints"
        return {step: root / step_name(step) for step in checkpoint_steps(root)}


def run_name(out_dir: Path) -> str:
    """Return the name of a run; choose it at the first call.

    Trackers and copies know a run by it. It stays if the run is moved, or restored from a copy.
    """
    name = RunFolder(out_dir).stored_name
    if not name:
        folder = re.sub(r"[^\w.-]+", "-", out_dir.resolve().name)
        name = f"{folder}-{secrets.token_hex(4)}"
        write_file(out_dir / RUN_NAME, [f"{name}\n".encode()])
    return name


@dataclass(frozen=True)
class FolderLock:
    """An exclusive lock on a run's folder, held by this process."""

    folder: Path
    file: TextIO

    def check(self) -> None:
        """Raise `BusyError` unless the folder still contains the locked file.

        Another process may have removed, renamed or replaced the folder. Ignores errors of the
        disk, since the write that follows raises them.
        """
        with contextlib.suppress(OSError):
            if not is_at(self.file, self.folder / ".lock"):
                raise BusyError(
                    f"out_dir {self.folder} was removed, renamed or taken by another run while the "
                    "run was training"
                )


@contextmanager
def locked(folder: Path) -> Iterator[FolderLock]:
    """Hold the exclusive lock of a run's folder; create the folder if it is missing.

    The kernel releases the lock at any exit. Raises `UserError` if the folder cannot be written,
    `BusyError` if another process holds the lock.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(locked_file(folder / ".lock", wait=False))
        except BlockingIOError:
            owner = "another process"
            with contextlib.suppress(OSError):  # the owner may have removed the file
                owner = (folder / ".lock").read_text(errors="replace").strip() or owner
            raise BusyError(
                f"out_dir {folder} is in use by {owner}; wait for it, or set another out_dir"
            ) from None
        except OSError as error:
            if error.errno in MACHINE_ERRORS:
                raise
            raise UserError(f"out_dir {folder} cannot be written: {error.strerror}") from None
        file.truncate(0)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {os.uname().nodename} since {now}")
        file.flush()
        yield FolderLock(folder, file)


# of the keys of standard errors; tasks of lm-evaluation-harness end theirs with _stderr
ERROR_ENDINGS = ("_se", "_stderr")
OF_LOSSES = re.compile(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(_se)?(/.+)?")


def is_benchmark(key: str) -> bool:
    """Return whether a key of metrics.jsonl is a result of an evaluation other than a loss."""
    is_loss = OF_LOSSES.fullmatch(key) is not None
    return key.startswith("eval/") and not is_loss and not key.endswith(ERROR_ENDINGS)


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number."""
    return math.isfinite(number(value))


def number(value: object) -> float:
    """Return a JSON number as a float; `nan` for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.nan


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that end with a newline; nothing if the file cannot be opened."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """Return a record of metrics.jsonl; None if it is malformed or has no numeric `step`."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if type(record) is dict and is_number(record.get("step")):
            return record
    return None


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step_{step:08d}"


def checkpoint_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoint folders in `root`, ascending."""
    folders = [path for path in root.glob("step_*") if path.is_dir() and not path.is_symlink()]
    return steps_in(path.name for path in folders)


def steps_in(names: Iterable[str]) -> list[int]:
    """Return the steps in `names`, ascending; skip names that `step_name` cannot return."""
    found = (CHECKPOINT.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)
