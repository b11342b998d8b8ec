"""Log to the trackers of a run: TensorBoard, and those of Accelerate.

Each launch opens a tracker on the run that it had. TensorBoard drops the steps after the one to
resume from. wandb ignores steps that it has.

All trackers know a run by its `run_name`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_gpt.errors import UserError
from accel_gpt.runs.folder import RunFolder, number, run_name

PROJECT = "accel_gpt"
TENSORBOARD = "tensorboard"
# keys of metrics.jsonl that trackers do not get
OF_EACH_RECORD = ("step", "tokens", "time")
OF_LAUNCHES = "launch/"
Values = dict[str, float | str]


class Trackers:
    """The trackers of a run. Ranks other than 0 have none."""

    def __init__(self, accelerator: Accelerator, names: Sequence[str], out_dir: Path) -> None:
        self.accelerator = accelerator
        self.names = names
        self.out_dir = out_dir

    def start(self, step: int, sampled_step: int, yaml: str, options: Mapping[str, Any]) -> None:
        """Start all trackers, on the run that they had.

        `step`: the last step with a complete record; -1 if there is none. `sampled_step`: the last
        step that may have samples. They store the config, as YAML or by dotted keys. Raises
        `UserError` if a tracker does not start, for example wandb without a login.
        """
        accelerator = self.accelerator
        if not self.names or not accelerator.is_main_process:
            return
        offline: Any = None  # wandb
        try:
            launched = init_options(self.names, self.out_dir)
            launched["tensorboard"] = {"purge_step": step + 1}  # hides later steps of its files
            accelerator.init_trackers(PROJECT, init_kwargs=launched)
            for tracker in accelerator.trackers:
                if tracker.name == TENSORBOARD:  # it would show each launch as another run
                    tracker.log({"config": as_code(yaml)}, step=max(step, 0))
                else:
                    tracker.store_init_configuration({key: str(options[key]) for key in options})
                if tracker.name == "wandb" and tracker.tracker.offline:
                    offline = tracker
        except Exception as error:  # each package has its own error classes
            raise UserError(
                f"a tracker of log.trackers ({', '.join(self.names)}) did not start: {error}"
            ) from error
        known = known_values(self.out_dir, step, sampled_step) if offline else {}
        for known_step, values in sorted(known.items()):  # the log of a launch begins anew
            offline.log(values, step=known_step)

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Log numbers and texts of a step to each tracker."""
        for tracker in self.accelerator.trackers:
            logged = dict(values)
            for key, text in values.items():
                if tracker.name == TENSORBOARD and isinstance(text, str):
                    logged[key] = as_code(text)
            tracker.log(logged, step=step)

    def finish(self) -> None:
        """Write the last values and close all trackers."""
        trackers = self.accelerator.trackers
        self.accelerator.trackers = []  # even if one of them raises an error
        for tracker in trackers:
            tracker.finish()


def as_code(text: str) -> str:
    """Return a text as a code block of Markdown, which TensorBoard shows unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())


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
    return options


def known_values(out_dir: Path, step: int, sampled_step: int) -> dict[int, Values]:
    """Return the values by step that a tracker has to show.

    These are the records of metrics.jsonl up to `step`, and the samples up to `sampled_step`.
    """
    run = RunFolder(out_dir)
    known: dict[int, Values] = {}
    for record in run.records():
        if record["step"] <= step:
            known[int(record["step"])] = {
                key: number(value)  # null: a number that is not finite
                for key, value in record.items()
                if key not in OF_EACH_RECORD
                and not key.startswith(OF_LAUNCHES)
                and (value is None or isinstance(value, int | float))
            }
    for sample_step, path in run.samples.items():
        if sample_step <= sampled_step:
            text = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
            known.setdefault(sample_step, {})["samples"] = text
    return known
