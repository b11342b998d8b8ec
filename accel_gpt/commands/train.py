"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts several."""

from collections.abc import Sequence

from accel_gpt.commands.options import TrainCommand
from accel_gpt.commands.resolve import load_config
from accel_gpt.launcher import join_slurm_step
from accel_gpt.train import launch
from accel_gpt.training.accelerator import keep_freed_memory


def main(argv: Sequence[str]) -> int:
    """Train with the config and options in `argv`, for `train.py`; return the exit code."""
    join_slurm_step()
    keep_freed_memory()
    return launch(load_config(argv, "train.py"), argv[0])


def run(options: TrainCommand) -> int:
    """Train the config; return the exit code."""
    keep_freed_memory()
    return launch(options.loaded, options.config)
