"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts several."""

from accel_gpt.commands.options import TrainCommand
from accel_gpt.train import launch


def run(options: TrainCommand) -> int:
    """Train the config; return the exit code."""
    return launch(options.loaded, options.config)
