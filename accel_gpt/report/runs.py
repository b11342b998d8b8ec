"""Open the runs of a report, each with its name, state and resumes."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import StageBatch
from accel_gpt.config.values import build
from accel_gpt.errors import AccelGPTError, UserError
from accel_gpt.model.sizes import flops_at_length
from accel_gpt.report.curves import Floats, Metrics, read_metrics
from accel_gpt.runs.folder import RunFolder, is_number, number
from accel_gpt.runs.launches import LaunchClock, clocks


class RunStage(NamedTuple):
    """A stage of a run."""

    first_step: int  # steps that are complete when it begins
    block_size: int
    label: str  # `2: best`, with the first source that it sets; else `stage 2`
    text: str  # `stage 2 from step 900: model.block_size 4096`


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

    @cached_property
    def stages(self) -> Sequence[RunStage]:
        """Return the stages of the last launch, ascending; none if the config has none."""
        try:
            batches = msgspec.convert(self.last_launch("plan", "stages"), list[StageBatch])
            settings = msgspec.convert(self.config.get("stages"), list[dict[str, Any]])
        except msgspec.ValidationError:  # there are none, or a file was edited by hand
            return ()
        if len(batches) == len(settings) + 1:
            settings.insert(0, {})  # the config's own values begin the run
        each = enumerate(zip(batches, settings, strict=False), start=1)
        return [describe_stage(n, batch, options) for n, (batch, options) in each]

    def stage_of(self, steps: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the index in `stages` of the stage that made each of `steps`; 0 without stages."""
        firsts = [stage.first_step for stage in self.stages]
        return np.maximum(np.searchsorted(firsts, steps) - 1, 0)

    def in_last_stage(self, steps: Floats) -> npt.NDArray[np.bool_]:
        """Return which steps the stage of the last of `steps` made: losses compare only there."""
        return np.equal(self.stage_of(steps), self.stage_of(steps[-1:]))

    def stage_flops(self) -> list[float]:
        """Return the FLOPs per token of each stage, as `Speed.flops_at`; one without stages."""
        whole = self.flops_per_token or math.nan
        functions = self.last_launch("code", "functions")
        if not self.stages or (isinstance(functions, list) and "model" in functions):
            return [whole] * max(len(self.stages), 1)
        given = {key: value for key, value in self.config.items() if key.startswith("model.")}
        try:
            model = build(Config, given).model
        except AccelGPTError:  # a file was edited by hand
            return [whole] * len(self.stages)
        return [flops_at_length(whole, model, stage.block_size) for stage in self.stages]

    @cached_property
    def kept_launches(self) -> list[tuple[int, int]]:
        """Return the steps at which launches began, ascending, each with the launch's index.

        If a later launch began at an earlier step or the same, a launch is left out, because its
        steps were repeated.
        """
        kept: list[tuple[int, int]] = []
        for index, launch in enumerate(self.launches):
            step: Any = launch.get("step")
            if is_number(step):
                kept = [*(earlier for earlier in kept if earlier[0] < step), (int(step), index)]
        return kept

    @cached_property
    def clocks(self) -> list[LaunchClock | None]:
        """Return when each launch ran; None if run.json does not have it."""
        _, writers = self.metrics.curve("launch/number")
        is_last = len(writers) and writers[-1] == len(self.launches)
        last = float(np.nan_to_num(self.metrics.seconds[-1])) if is_last else 0.0
        return clocks(self.launches, last)

    def resumes(self) -> list[int]:
        """Return the steps at which the run was resumed, ascending."""
        return [step for step, index in self.kept_launches if index and step > 0]


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


def describe_stage(n: int, batch: StageBatch, options: Mapping[str, Any]) -> RunStage:
    """Return stage `n` of a run; `options`: its entry in the config."""
    label = f"stage {n}"
    texts = []
    for key, value in options.items():
        shown = value
        if key == "data.train":
            sources = by_weight(value)
            label = f"{n}: {next(iter(sources), '')}"
            shown = " + ".join(f"{name} {weight}".strip() for name, weight in sources.items())
        if key != "from":
            texts.append(f"{key} {shown}")
    text = f"stage {n} from step {batch.first_step:,}"
    text += f": {', '.join(texts)}" if texts else ""
    return RunStage(batch.first_step, batch.block_size, label, text)


def by_weight(train: object) -> dict[str, object]:
    """Return the weights of the sources of data.train by name, the largest first."""
    if not isinstance(train, list):
        return {Path(str(train)).name: ""}
    sources = [one for one in train if isinstance(one, Mapping)]
    sources.sort(key=lambda one: number(one.get("weight", 1)), reverse=True)
    return {Path(str(one.get("path"))).name: one.get("weight", 1) for one in sources}
