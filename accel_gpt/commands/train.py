"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts more of them."""

from collections.abc import Sequence

from accel_gpt.config.parse import load_config


def main(argv: Sequence[str]) -> int:
    """Train as a config says; a mistake in it is reported before torch is imported."""
    from accel_gpt.hub.pretrained import inherit

    config = load_config(argv, "accel-gpt train", inherit)
    from accel_gpt.train import launch

    return launch(config, argv[0])
