"""Parse the command line of `accel-gpt sweep` into settings: combinations of configs and values."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_origin

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_given, read_options
from accel_gpt.config.values import alternatives, check_key
from accel_gpt.console import write_err
from accel_gpt.errors import require

PROGRAM = "accel-gpt sweep"


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep: a config with a combination of values."""

    name: str  # the config, if there are several, and the values
    config: Config


@dataclass(frozen=True)
class Grid:
    """The parsed command line of a sweep: `A.yaml B.yaml --optim.lr 1e-3,3e-3 --seed 1,2`."""

    folder: Path
    seeds: Sequence[int]
    settings: Sequence[Setting]  # the first one is the baseline


def read_grid(
    configs: Sequence[str],
    arguments: Sequence[str],
    seeds: Sequence[int] = (),
    out_dir: str | None = None,
) -> Grid:
    """Read the configs and keys of a sweep; the first config has defaults of the other arguments.

    Raises `UserError` if there is only one setting, or if a value is invalid.
    """
    given, common = read_arguments(arguments)
    swept = {"config": [*configs]}
    for key, text in given.items():
        swept[key] = split_values(key, text)
    several = [key for key, values in swept.items() if len(values) > 1]
    require(
        bool(several),
        "nothing to compare; expected several configs, or a key with several values, such as "
        "--optim.lr 1e-3,3e-3",
    )
    if out_dir is None:
        first = read_given([configs[0]], PROGRAM)
        out_dir = f"{first.get('out_dir', Config.out_dir)}_sweep"
    settings = []
    told: dict[str, None] = {}  # several settings may tell the same
    for combination in itertools.product(*swept.values()):
        values = dict(zip(swept, combination, strict=True))
        words = [word_of(key, values[key], swept[key]) for key in several]
        arguments = [values.pop("config"), f"--out_dir={out_dir}", *common]
        arguments += [f"--{key}={value}" for key, value in values.items()]
        config = load_config(arguments, PROGRAM, told.setdefault)
        if "code" in several and config.own.model is None:  # a baseline has all trained weights
            config = replace(config, model=replace(config.model, new_weights=()))
        settings.append(Setting(",".join(words), config))
    for line in told:
        write_err(line)
    names = [setting.name for setting in settings]
    require(
        len(set(names)) == len(names),
        f"{', '.join(several)}: a config or a value is listed twice",
    )
    return Grid(
        folder=Path(settings[0].config.out_dir),
        seeds=seeds or [settings[0].config.seed],
        settings=settings,
    )


def word_of(key: str, value: str, values: Sequence[str]) -> str:
    """Return how the name of a setting shows the value of a key, one of `values`.

    A file of --code loses its folder, unless two files then have the same name.
    """
    if key == "config":
        return value
    if key == "code" and len({Path(one).name for one in values}) == len(values):
        value = Path(value).name
    return f"{key}={value}"


def read_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Map keys to texts, from `--key text`, `--key=text` and `--flag`.

    Also returns, as `--key=text`, the options that take several values. They are not swept.
    """
    given: dict[str, str] = {}
    common = []
    rest = [*arguments]
    while rest:
        key, equals, text = rest.pop(0)[2:].partition("=")
        key = key.replace("-", "_")
        hint = check_key(Config, key, "on the command line")
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            require(has_value or bool in alternatives(hint), f"--{key} needs a value")
            text = rest.pop(0) if has_value else "true"
        if get_origin(hint) is tuple:
            common.append(f"--{key}={text}")
        else:
            given[key] = text
    return given, common


def split_values(key: str, text: str) -> list[str]:
    """Split a comma-separated text into values; the text of a list or a mapping is one value.

    Raises `UserError` for an invalid value.
    """
    kinds = alternatives(check_key(Config, key, "on the command line"))
    values = [value.strip() for value in text.split(",")]
    if text.startswith(("[", "{")) and {tuple, Mapping} & set(map(get_origin, kinds)):
        values = [text]
    for value in values:
        read_options(Config, [f"--{key}={value}"])
    return values
