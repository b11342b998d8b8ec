"""`accel-gpt bench CONFIG`: tokens/s, MFU and memory of a config, and where its time goes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from accel_gpt.config.parse import load_config, parse_command, split_options
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.errors import not_negative, positive


@dataclass(frozen=True)
class BenchCommand:
    """Measure the training step of a config: tokens a second, MFU, memory, where its time goes.

    Any --section.key of the config may be set as well. Nothing is kept. On several processes:
    accelerate launch -m accel_gpt.cli bench CONFIG ...
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    warmup: int = 5
    """Steps before those that are measured."""
    steps: int = 20
    """Steps that are measured."""
    parts: int = 5
    """Further steps, in which each part is waited for and timed by itself; 0: none."""
    compare: bool = False
    """Measure float32 and bf16, compiled or not, side by side: what auto chooses between."""
    json: bool = False
    """One JSON object in place of text."""

    def __post_init__(self) -> None:
        positive("bench", self, "warmup", "steps")
        not_negative("bench", self, "parts")


def main(argv: Sequence[str]) -> int:
    """Measure the training step of a config on this machine."""
    from accel_gpt.hub.pretrained import inherit

    own, rest = split_options(BenchCommand, argv)
    options = parse_command(BenchCommand, own, "accel-gpt bench")
    config = load_config([options.config, *rest], "accel-gpt bench", inherit)
    exit_on_sigterm()
    from accel_gpt.commands.bench_steps import bench, compare, table

    if options.compare:
        write_out(compare(options, rest))
    elif report := bench(options, config):
        write_out(json.dumps(report, indent=1) + "\n" if options.json else table(report))
    return 0
