"""`accel-gpt train CONFIG`: train in this process; `accelerate launch` starts more of them.

With `--dump_config` it writes the config, every key with its meaning, and trains nothing. With
`--smoke` it makes four steps through all that a run does, in a temporary folder.
"""

from collections.abc import Sequence

from accel_gpt.config.parse import load_config
from accel_gpt.console import write_out


def main(argv: Sequence[str]) -> int:
    """Train as a config says; a mistake in it is reported before torch is imported."""
    from accel_gpt.hub.pretrained import inherit

    if "--dump_config" in argv:
        from accel_gpt.config.manual import commented_yaml, named_config

        words = [word for word in argv if word != "--dump_config"]
        write_out(commented_yaml(named_config(words, inherit)))
        return 0
    if "--smoke" in argv:
        from accel_gpt.commands.smoke import smoke

        return smoke([word for word in argv if word != "--smoke"])
    config = load_config(argv, "accel-gpt train", inherit)
    from accel_gpt.train import launch

    return launch(config, argv[0])
