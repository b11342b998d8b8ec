"""`accel-gpt train CONFIG --dump_config`: write the config, every key with its meaning."""

from accel_gpt.commands.options import DumpConfigCommand
from accel_gpt.config.commented_yaml import commented_yaml
from accel_gpt.console import write_out


def run(options: DumpConfigCommand) -> int:
    """Write the config as YAML to standard output."""
    write_out(commented_yaml(options.loaded))
    return 0
