"""What the options with the value `auto` share: the choice of an earlier launch, and its report.

`precision.py`, `compilation.py` and `auto_batch.py` choose. The choice is kept in `config.yaml` of
the run, and a resume keeps it.
"""

import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState

from accel_gpt.config.experiment import Config
from accel_gpt.errors import AccelGPTError
from accel_gpt.training.checkpoint import read_state
from accel_gpt.training.run_folder import RunFolder


def earlier_choice(config: Config, key: str) -> tuple[Any, str] | None:
    """Return the value of `key` in the run that `config` resumes, and the path where it stands."""
    run = RunFolder(config.out_dir)
    if key in run.config:
        return run.config[key], str(run.path / "config.yaml")
    own = run.checkpoints  # of a run that was restored from its copies
    checkpoint = own[max(own)] if own else Path(config.checkpoint.resume)
    if not (checkpoint / "trainer_state.json").is_file():
        return None
    try:
        state = read_state(checkpoint)
    except AccelGPTError:  # raised again, and reported, when the run resumes
        return None
    if key not in state.config:
        return None
    return state.config[key], str(checkpoint)


def report_choice(config: Config, choice: str, reason: str) -> None:
    """Print a choice and its reason, on rank 0."""
    if PartialState().is_main_process and config.log.level == "info":
        sys.stderr.write(f"auto     {choice}: {reason}\n")
