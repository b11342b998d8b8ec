"""`accel-gpt config`: compare two configs, or write the JSON schema for editors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_gpt.config.checks import Positional
from accel_gpt.config.parse import parse_command, to_flat
from accel_gpt.console import table, write_out
from accel_gpt.errors import require


@dataclass(frozen=True)
class ConfigCommand:
    """Compare two configs key by key, or write the JSON schema of config files for editors.

    diff exits with 1 where the configs differ, with 0 where they do not. Examples:
      accel-gpt config diff quickstart my.yaml
      accel-gpt config diff gpt2_124m runs/gpt
      accel-gpt config schema > accel_gpt.schema.json
    """

    action: Positional[Literal["diff", "schema"]]
    """diff or schema."""
    a: Positional[str] = ""
    """YAML file, run folder, or name of a shipped config or of a preset of the model."""
    b: Positional[str] = ""
    """The other one."""

    def __post_init__(self) -> None:
        if self.action == "diff":
            require(bool(self.b), "diff compares two configs; usage: accel-gpt config diff A B")
        else:
            require(not self.a, f"schema takes no argument, but there is {self.a!r}")


def main(argv: Sequence[str]) -> int:
    """Print differences or the schema."""
    options = parse_command(ConfigCommand, argv, "accel-gpt config")
    from accel_gpt.config.manual import dump, json_schema, named_config
    from accel_gpt.hub.pretrained import inherit

    if options.action == "schema":
        write_out(json.dumps(json_schema(), indent=1) + "\n")
        return 0
    a, b = (to_flat(named_config([name], inherit)) for name in (options.a, options.b))
    missing = object()
    rows = [
        (key, *(dump(side[key]) if key in side else "-" for side in (a, b)))
        for key in a | b
        if a.get(key, missing) != b.get(key, missing)
    ]
    if rows:
        write_out(table([("", options.a, options.b), *rows], "<", "<", "<"))
    return 1 if rows else 0
