"""A pushed checkpoint that a run goes on from."""

from dataclasses import replace
from pathlib import Path

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.hub.client import SCHEME, fetch
from accel_gpt.training.checkpoint import is_checkpoint
from accel_gpt.training.run_folder import checkpoint_steps

STATE = "checkpoint"  # folder of the repository


def fetch_resume(config: Config) -> Config:
    """`config` with the folder of a pushed checkpoint in `checkpoint.resume` for its `hf://` place.

    Fetched only while the run has no checkpoint of its own. Raises `UserError` where it was pushed
    without its state.
    """
    place = config.checkpoint.resume
    if not place.startswith(SCHEME) or checkpoint_steps(Path(config.out_dir) / "checkpoints"):
        return config
    folder = fetch(place, [f"{STATE}/*"]) / STATE
    require(
        is_checkpoint(folder),
        f"{place} holds no state to resume from; push it with hub.include_state, or start from its "
        "weights with model.init_from",
    )
    return replace(config, checkpoint=replace(config.checkpoint, resume=str(folder)))
