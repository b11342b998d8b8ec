"""`accel-gpt plan CONFIG`: size, FLOPs, memory, hours and cost of a config; does it fit?"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from accel_gpt.config.parse import load_config, parse_command, split_options
from accel_gpt.console import write_out
from accel_gpt.errors import require


@dataclass(frozen=True)
class PlanCommand:
    """Tell what a config will take: size, FLOPs, memory, steps, hours, disk, and whether it fits.

    Any --section.key of the config may be set as well. Nothing is trained; a GPU is not needed.
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    gpus: int | None = None
    """Devices, one process each; null: those of --config_file, else 1."""
    gpu: str | None = None
    """Their kind: h100, h200, b200, a100-80gb, l40s, 'rtx 4090', ...; null: CPUs."""
    memory_gb: float | None = None
    """Memory of a device in 1e9 bytes; null: that of its kind."""
    distribution: Literal["ddp", "fsdp"] | None = None
    """ddp: each device holds all; fsdp: its share; null: what --config_file says, else ddp."""
    config_file: str | None = None
    """What `accelerate config` wrote: number of processes, precision, FSDP."""
    mfu: float | None = None
    """Share of the peak FLOP/s that is reached, 0 to 1, for the hours."""
    tokens_per_second: float | None = None
    """Of all devices together, in place of mfu."""
    measured: str | None = None
    """Folder of a run whose speed is taken, in place of mfu."""
    price: float | None = None
    """Of a device for an hour, in any currency."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, where neither data nor tokenizer tell."""
    json: bool = False
    """One JSON object in place of text."""

    def __post_init__(self) -> None:
        for name in ("gpus", "memory_gb", "mfu", "tokens_per_second", "price", "vocab_size"):
            value = getattr(self, name)
            ok = value is None or 0 < value < math.inf
            require(ok, f"--{name} is {value}; it must be above 0 and finite")
        require(self.mfu is None or self.mfu <= 1, f"--mfu is {self.mfu}; it is a share, 0 to 1")
        speeds = ("mfu", "tokens_per_second", "measured")
        given = [f"--{name}" for name in speeds if getattr(self, name) is not None]
        require(len(given) < 2, f"{' and '.join(given)} each tell the speed; give one of them")


def main(argv: Sequence[str]) -> int:
    """Print what a config will take, and what would make it fit."""
    from accel_gpt.commands.plan_forecast import forecast
    from accel_gpt.commands.plan_table import table
    from accel_gpt.commands.plan_vocabulary import inherit_known

    own, rest = split_options(PlanCommand, argv)
    options = parse_command(PlanCommand, own, "accel-gpt plan")
    config = load_config([options.config, *rest], "accel-gpt plan", inherit_known)
    report = forecast(options, config)
    write_out(json.dumps(report, indent=1) + "\n" if options.json else table(report))
    return 0
