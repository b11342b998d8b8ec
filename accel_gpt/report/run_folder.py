"""A run as its folder tells it: launches, config, figures, samples; whoever wrote the files."""

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.config.parse import to_flat
from accel_gpt.errors import UserError
from accel_gpt.files import load_json, load_yaml, open_file
from accel_gpt.redact import redact
from accel_gpt.report.figures import Figures, number, read_figures

LARGEST_FILE = 16 << 20  # bytes of run.json and config.yaml; ours have some thousand
MARKS = ("metrics.jsonl", "run.json")


@dataclass(frozen=True)
class RunFolder:
    """What was read; texts in it are not ours, and secrets in them are starred."""

    name: str  # unique among those of a report
    path: Path
    config: Mapping[str, Any]  # dotted keys
    launches: tuple[Mapping[str, Any], ...]
    figures: Figures
    writing: bool  # a process holds its lock

    @property
    def step(self) -> int:
        """The last step that figures tell of; 0: none."""
        return int(self.figures.steps[-1]) if len(self.figures.steps) else 0

    @property
    def max_steps(self) -> int | None:
        """Length of the run as the last launch planned it."""
        steps = number(self.fact("plan", "max_steps"))
        return int(steps) if 0 < steps < 1e15 else None

    @property
    def status(self) -> str:
        """`in progress`, `finished`, or where it stopped."""
        if self.writing:
            return "in progress"
        if self.max_steps is None or self.step >= self.max_steps:
            return "finished"
        return f"stopped at {self.step:,} of {self.max_steps:,} steps"

    def fact(self, *keys: str) -> Any:
        """What the last launch recorded under nested keys; None for nothing."""
        value: Any = self.launches[-1] if self.launches else None
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def flops_per_token(self) -> float | None:
        """FLOPs of training on one token, where the run tells them."""
        flops = number(self.fact("model", "flops_per_token"))
        return flops if 0 < flops < float("inf") else None

    def seams(self) -> list[tuple[int, int]]:
        """Steps at which later launches took the run up, and how many did so there.

        Steps beyond those of a launch that came later were done again, and are no seams.
        """
        found: dict[int, int] = {}
        lowest = float("inf")
        for launch in reversed(self.launches[1:]):
            step = number(launch.get("step"))
            if 0 < step <= lowest:
                found[int(step)] = found.get(int(step), 0) + 1
                lowest = step
        return sorted(found.items())


def open_runs(places: Sequence[str]) -> list[RunFolder]:
    """The runs in some folders; `UserError` for a folder that holds none."""
    paths = [Path(place) for place in places]
    for path in paths:
        if not any((path / mark).is_file() for mark in MARKS):
            found = "is no run: it has neither metrics.jsonl nor run.json"
            raise UserError(
                f"{path} {found if path.is_dir() else 'is not a folder'}; give the out_dir of a run"
            )
    names = unique_names(paths)
    return [open_run(path, name) for path, name in zip(paths, names, strict=True)]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many before it as tell them apart, or a number."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    for parts in (1, 2, 3):
        names = ["/".join(path.parts[-parts:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def open_run(path: Path, name: str) -> RunFolder:
    """Read what a folder holds; what cannot be read is left out."""
    writing = is_locked(path)  # before the figures: the last of a run that ends meanwhile are there
    try:
        found = load_json(read_text(path / "run.json"))["launches"]
        launches = tuple(one for one in found if isinstance(one, dict))
    except (OSError, ValueError, KeyError, TypeError):
        launches = ()
    try:
        config = load_yaml(read_text(path / "config.yaml"))
        flat = to_flat(config) if isinstance(config, dict) else {}
    except (OSError, ValueError, TypeError):
        flat = {}
    clean = {str(key): starred(value) for key, value in flat.items()}
    return RunFolder(name, path, clean, launches, read_figures(path / "metrics.jsonl"), writing)


def read_text(path: Path) -> str:
    """A text file that is not larger than ours can be; `ValueError` for others."""
    with open_file(path) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError("it is too large")
    return content.decode()


def starred(value: Any) -> Any:
    """A value of a config, secrets in its texts starred."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [starred(item) for item in value]
    if isinstance(value, dict):
        return {str(key): starred(item) for key, item in value.items()}
    return value


def is_locked(path: Path) -> bool:
    """Whether a process is at work in a run's folder: it holds the lock of `training/guards.py`."""
    try:
        with open_file(path / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def config_name(command: object) -> str | None:
    """Return the name of the config that a command trains: `x` for `train a/x.yaml`, `train x`."""
    found = re.search(r"\btrain(?:\.py)? ('[^']+'|\S+)", str(command))
    return re.sub(r"\.ya?ml$", "", Path(found[1].strip("'")).name) if found else None
