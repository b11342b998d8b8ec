"""Log to the trackers of a run: TensorBoard, and those of Accelerate.

metrics.jsonl and samples/ hold what a tracker has to show. Each launch opens a tracker on the run
that it had, and logs what it lacks from these files. TensorBoard drops the steps after the one to
resume from. The others keep them, so they are not logged again. So each tracker shows each step
once.

All trackers know a run by its `run_name`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_gpt.errors import UserError
from accel_gpt.runs.folder import RunFolder, number, run_name
from accel_gpt.training.event_file import EventFile, logged_values

PROJECT = "accel_gpt"
OF_EACH_RECORD = ("step", "tokens", "time")  # keys of metrics.jsonl that trackers do not get
Values = dict[str, float | str]
TRACKIO_REMOTE = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
)  # if one is set, records leave this machine


@dataclass
class Held:
    """What a tracker holds of a run at the start of a launch, and keeps."""

    names: dict[int, set[str]] = field(default_factory=dict)  # of values, by step
    before: int = 0  # it holds all values of the steps before this one

    def missing(self, values: Mapping[str, float | str], step: int) -> Values:
        """Return the values of a step that the tracker does not hold."""
        if step < self.before:
            return {}
        names = self.names.get(step, set())
        return {name: value for name, value in values.items() if name not in names}


class Trackers:
    """The trackers of a run. Ranks other than 0 have none."""

    def __init__(self, accelerator: Accelerator, names: Sequence[str], out_dir: Path) -> None:
        self.accelerator = accelerator
        self.names = names
        self.out_dir = out_dir
        self.held: dict[str, Held] = {}  # by the name of a tracker

    def start(self, step: int, sampled_step: int, yaml: str, options: Mapping[str, Any]) -> None:
        """Start all trackers, on the run that they had; bring them up to `step`.

        `step`: the last step with a complete record; -1 if there is none. `sampled_step`: the last
        step that may have samples. They store the config, as YAML or by dotted keys. Raises
        `UserError` if a tracker does not start, for example wandb without a login.
        """
        accelerator = self.accelerator
        if not self.names or not accelerator.is_main_process:
            return
        known = known_values(self.out_dir, step, sampled_step)
        try:
            accelerator.init_trackers(PROJECT, init_kwargs=init_options(self.names, self.out_dir))
            for tracker in accelerator.trackers:
                self.held[tracker.name] = find_held(tracker, known)
                tracker.store_init_configuration({key: str(options[key]) for key in options})
            if EventFile.name in self.names:
                events = EventFile(self.out_dir / EventFile.name / PROJECT)
                begin = max(step, 0)
                self.held[events.name] = begin_events(events, known, begin)
                events.log({"config": yaml}, begin)
                accelerator.trackers.append(events)
        except Exception as error:  # each package has its own error classes
            raise UserError(
                f"a tracker of log.trackers ({', '.join(self.names)}) did not start: {error}"
            ) from error
        for known_step, values in sorted(known.items()):
            self.log(values, known_step)

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Log numbers and texts of a step to each tracker that does not hold them yet."""
        for tracker in self.accelerator.trackers:
            held = self.held.get(tracker.name, Held())  # own code may add a tracker
            missing = held.missing(values, step)
            if missing:
                tracker.log(missing, step=step)

    def finish(self) -> None:
        """Write the last values and close all trackers."""
        trackers = self.accelerator.trackers
        self.accelerator.trackers = []  # even if one of them raises an error
        for tracker in trackers:
            tracker.finish()


# --------------------------------------------------------------------------- open the same run


def init_options(names: Sequence[str], out_dir: Path) -> dict[str, dict[str, Any]]:
    """Return options by tracker that open the run that the earlier launches had, if there is one.

    The first launch chooses its name. wandb records nothing except the values that it is given. In
    its offline mode it cannot resume a run, so each launch writes all steps; `wandb sync` of a log
    replaces the run on the server.
    """
    if not set(names) & {"wandb", "trackio"}:
        return {}
    name = run_name(out_dir)
    wandb_settings = {
        "disable_git": True,
        "save_code": False,
        "x_disable_meta": True,  # the metadata would include the command line
        "console": "off",
        "silent": True,
    }
    wandb = {
        "id": name,
        "name": name,
        "resume": "allow",
        "dir": str(out_dir),
        "settings": wandb_settings,
    }
    options: dict[str, dict[str, Any]] = {
        "wandb": wandb,
        "trackio": {"name": name, "resume": "allow"},
    }
    if "wandb" in names:
        from wandb import setup

        if setup().settings.mode == "offline":
            del wandb["resume"]
    if "trackio" in names:
        from trackio.fragments import import_inbox_dir

        import_inbox_dir()  # records that wait outside the database, on a network file system
    return options


# --------------------------------------------------------------------------- what a tracker holds


def known_values(out_dir: Path, step: int, sampled_step: int) -> dict[int, Values]:
    """Return the values by step that every tracker has to show.

    These are the records of metrics.jsonl up to `step`, and the samples up to `sampled_step`.
    """
    run = RunFolder(out_dir)
    known: dict[int, Values] = {}
    for record in run.records():
        if record["step"] <= step:
            known[int(record["step"])] = {
                key: number(value)  # null: a number that is not finite
                for key, value in record.items()
                if key not in OF_EACH_RECORD and (value is None or isinstance(value, int | float))
            }
    for sample_step, path in run.samples.items():
        if sample_step <= sampled_step:
            text = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
            known.setdefault(sample_step, {})["samples"] = text
    return known


def find_held(tracker: Any, known: Mapping[int, Values]) -> Held:
    """Return what a tracker holds of a run that resumes.

    If its records cannot be read, it counts as holding all that is known.
    """
    opened = tracker.tracker
    if tracker.name == "wandb":  # its log is empty in offline mode; else it ignores earlier steps
        return Held(before=0 if opened.offline else opened.starting_step)
    if tracker.name == "trackio" and not any(map(os.environ.get, TRACKIO_REMOTE)):
        return Held(held_by_trackio(opened.id))
    return Held({known_step: set(values) for known_step, values in known.items()})


def held_by_trackio(run_id: str) -> dict[int, set[str]]:
    """Return the names of values by step in trackio's database."""
    from trackio.sqlite_storage import SQLiteStorage

    held: dict[int, set[str]] = {}
    for values in SQLiteStorage.get_logs(PROJECT, run_id=run_id):
        held.setdefault(values["step"], set()).update(values)
    return held


def begin_events(events: EventFile, known: Mapping[int, Values], step: int) -> Held:
    """Begin an event file with the first step that TensorBoard lacks, at most with `step`."""
    shown = logged_values(events.folder)
    lacking = [
        known_step
        for known_step, values in known.items()
        if values.keys() - shown.get(known_step, set())
    ]
    first = min([*lacking, step])
    events.begin(first)
    return Held(before=first)
