"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts more of them."""

from accel_gpt.commands.options import TrainCommand
from accel_gpt.train import launch


def run(options: TrainCommand) -> int:
    """Train as the config says; returns the exit code."""
    return launch(options.loaded, options.config)
