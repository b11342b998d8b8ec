"""Open the runs of a report, each with its name, state and resumes."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_gpt.errors import UserError
from accel_gpt.report.curves import Metrics, read_metrics
from accel_gpt.runs.folder import RunFolder, is_number


class NamedRun(RunFolder):
    """The folder of a run, with a name that is unique in the report."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name
        # read before the metrics: if the run ends in between, it counts as running
        self.running = self.in_use

    @cached_property
    def metrics(self) -> Metrics:
        """Read the records of metrics.jsonl as curves."""
        return read_metrics(self.records())

    @cached_property
    def last_step(self) -> int:
        """Return the last known step. A checkpoint may be newer than the last record."""
        return max([self.step, *self.checkpoints])

    @property
    def state(self) -> str:
        """Return `running`, `stopped` or `finished`."""
        if self.running:
            return "running"
        return "stopped" if self.end and self.last_step < self.end else "finished"

    @property
    def status(self) -> str:
        """Return the state in words, with the step unless the run is finished."""
        if self.state == "finished":
            return "finished"
        state = "in progress:" if self.running else "stopped at"
        of = f" of {self.max_steps:,}" if self.max_steps else ""
        return f"{state} step {self.last_step:,}{of}"

    @property
    def flops_per_token(self) -> float | None:
        """Return the FLOPs of a training step per token, if the run recorded them."""
        flops = self.last_launch("model", "flops_per_token")
        return float(flops) if is_number(flops) and flops > 0 else None

    def resumes(self) -> list[int]:
        """Return the steps at which the run was resumed, ascending.

        If a later resume is at an earlier step, a resume is left out, because its steps were
        repeated.
        """
        steps: list[int] = []
        for launch in self.launches[1:]:
            step: Any = launch.get("step")
            if is_number(step) and step > 0:
                steps = [*(earlier for earlier in steps if earlier < step), int(step)]
        return steps


def open_runs(folders: Sequence[str]) -> list[NamedRun]:
    """Open the runs in `folders`. Raises `UserError` if a folder is not a run."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; expected the out_dir of a run")
        if not any((path / name).is_file() for name in ("metrics.jsonl", "run.json")):
            raise UserError(f"{path} is not a run: it has neither metrics.jsonl nor run.json")
    return [NamedRun(path, name) for path, name in zip(paths, unique_names(paths), strict=True)]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path; if two are equal, the last two parts, or whole paths."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    for count in (1, 2):
        names = ["/".join(path.parts[-count:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
