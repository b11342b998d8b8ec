"""Complete a command line or keys to a config: `model.init_from`, `model.depth` and the preset.

The trainer takes the config that comes out. In it, every key has a plain value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.options import all_options
from accel_gpt.config.parse import read_given
from accel_gpt.config.stages import with_longest
from accel_gpt.config.values import build
from accel_gpt.console import print_line
from accel_gpt.errors import require
from accel_gpt.own_code import OwnCode, load_own_code


def load_config(argv: Sequence[str], prog: str, tell: Callable[[str], None] = print_line) -> Config:
    """Load the config of `CONFIG --section.key value ...`; see `read_given` and `complete`.

    `tell` gets a line about keys of CONFIG that the options make useless.
    """
    return complete(read_given(argv, prog, tell))


def complete(given: Mapping[str, Any]) -> Config:
    """Build the config in which the dotted keys of `given` are set.

    Precedence, from low to high: defaults, preset, depth, `model.init_from`, `given`. Raises
    `UserError` for an invalid value.
    """
    values = dict(given)
    if values.get("model.init_from", "scratch") != "scratch":
        # reads checkpoints and data folders, which most commands do not need
        from accel_gpt.transformers_io.pretrained import inherit

        values |= inherit(values)
    if values.get("model.depth") is not None:
        # computes with plans and vocabularies, which a command line does not need
        from accel_gpt.config.depth import depth_defaults

        for key, one in all_options(Config).items():  # the rules compute with them
            problem = one.problem(values.get(key))
            require(problem is None, f"{key} is {values.get(key)}; {problem}")
        values |= depth_defaults(values)
    preset = PRESETS[values.get("model.preset", "gpt2")]
    config = build(Config, {f"model.{key}": preset[key] for key in preset} | values)
    return with_code(with_longest(config), load_code(config.code))


def load_code(path: str | None) -> OwnCode:
    """Execute the file of --code, and print what is probably misspelled; None: no file."""
    own = load_own_code(path)
    for doubt in own.misspelled:
        print_line(f"WARNING: {own.file}: {doubt}")
    return own


def with_code(config: Config, own: OwnCode) -> Config:
    """Return `config` with the functions of a file of --code."""
    return replace(config, own=own, data=replace(config.data, own_shards=own.shards))
