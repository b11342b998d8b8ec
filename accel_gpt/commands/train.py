"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts several."""

from accel_gpt.commands.options import TrainCommand
from accel_gpt.train import launch
from accel_gpt.training.accelerator import keep_freed_memory


def run(options: TrainCommand) -> int:
    """Train the config; return the exit code."""
    keep_freed_memory()
    return launch(options.loaded, options.config)
