"""Parse the command line of `accel-gpt sweep` into settings: combinations of configs and values."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_origin

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import (
    alternatives,
    check_key,
    load_config,
    own_text_folder,
    read_options,
    read_values,
    to_flat,
)
from accel_gpt.config.plan import make_plan
from accel_gpt.config.removed import check_not_removed
from accel_gpt.config.shipped import resolve_config
from accel_gpt.errors import require
from accel_gpt.hub.pretrained import inherit

MOST_RUNS = 1000


@dataclass(eq=False)
class Setting:
    """One setting of a sweep: a config with a combination of values, and what it reaches."""

    name: str
    values: Mapping[str, str]  # by key, as typed; with several configs also `config`
    config: Config
    folders: list[Path] = field(default_factory=list)  # of its runs
    losses: dict[int, float] = field(default_factory=dict)  # by seed; inf: the run diverged
    seconds: float | None = None  # of the steps of a run; None: not known
    time: float | None = None  # seconds, divided by the baseline's; None: not known
    # with as many steps as the baseline's time allows; None: not known, itself: the same time
    in_time: "Setting | None" = None

    @property
    def steps(self) -> int:
        """Return the steps of a run."""
        return make_plan(self.config, 1).last_step

    @property
    def tokens(self) -> int:
        """Return the training tokens of a run."""
        return self.steps * self.config.train.tokens_per_step


@dataclass(frozen=True)
class Grid:
    """The parsed command line of a sweep: `A.yaml B.yaml --optim.lr 1e-3,3e-3 --seed 1,2`."""

    folder: Path
    seeds: Sequence[int]
    settings: Sequence[Setting]  # the first one is the baseline


def read_grid(configs: Sequence[str], arguments: Sequence[str]) -> Grid:
    """Read the configs and keys of a sweep.

    Raises `UserError` if there is only one setting, or if a value is invalid.
    """
    given = read_arguments(arguments)
    out_dir = given.pop("out_dir", None)
    seeds = split_values("seed", given.pop("seed")) if "seed" in given else []
    require(
        len(set(configs)) == len(configs),
        f"CONFIG is {' '.join(configs)}, but a config is listed twice; list it once",
    )
    fixed = []
    swept = {"config": [*configs]} if len(configs) > 1 else {}
    for key, text in given.items():
        values = split_values(key, text)
        if len(values) > 1:
            swept[key] = values
        else:
            fixed.append(f"--{key}={text}")
    require(
        bool(swept),
        "there is nothing to compare; give a second config, or an option several values, as in "
        "--optim.lr 1e-3,3e-3",
    )
    if out_dir is None:
        first = read_values(Config, str(resolve_config(configs[0])), fixed)
        out_dir = f"{first.get('out_dir', Config.out_dir)}_sweep"
    fixed.append(f"--out_dir={out_dir}")
    combinations = combine(swept, seeds=len(seeds) or 1)
    settings = [make_setting(values, configs[0], fixed) for values in combinations]
    for setting in settings:
        setting.config = with_own_text(setting.config, settings[0].config)
    return Grid(
        folder=Path(out_dir),
        seeds=[int(float(seed)) for seed in seeds] or [settings[0].config.seed],
        settings=settings,
    )


def make_setting(values: Mapping[str, str], config: str, fixed: Sequence[str]) -> Setting:
    """Load the config of a setting; `fixed`: arguments of all settings."""
    words = [f"{key}={value}" for key, value in values.items() if key != "config"]
    arguments = [values.get("config", config), *fixed, *(f"--{word}" for word in words)]
    return Setting(
        name=",".join([values["config"], *words] if "config" in values else words),
        values=values,
        config=load_config(arguments, "accel-gpt sweep", inherit),
    )


def with_own_text(config: Config, first: Config) -> Config:
    """Return a config whose data.text has its own data folder if it is prepared in another way."""
    before = to_flat(first.data.prepare)
    prepare = to_flat(config.data.prepare)
    changed = [(key, value) for key, value in prepare.items() if before[key] != value]
    if not changed or config.data.train != own_text_folder(config.out_dir):
        return config
    digest = hashlib.sha256(repr(changed).encode()).hexdigest()[:8]
    return replace(config, data=replace(config.data, train=f"{config.data.train}_{digest}"))


def read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Map keys to texts, from `--key text`, `--key=text` and `--flag`."""
    given: dict[str, str] = {}
    rest = [*arguments]
    while rest:
        key, equals, text = rest.pop(0)[2:].partition("=")
        if not equals:
            is_flag = not rest or rest[0].startswith("--")
            text = "true" if is_flag else rest.pop(0)
        given[key.replace("-", "_")] = text
    return given


def split_values(key: str, text: str) -> list[str]:
    """Split a comma-separated text into values; the text of a list or a mapping is one value.

    Raises `UserError` for an unknown key, and for an invalid value.
    """
    check_not_removed(key)
    hint = check_key(Config, key, "on the command line")
    structured = [get_origin(kind) in (tuple, Mapping) for kind in alternatives(hint)]
    values = [value.strip() for value in text.split(",")]
    if all(structured) or (any(structured) and text.startswith(("[", "{"))):
        values = [text]
    converted = {repr([*read_options(Config, [f"--{key}={value}"])]) for value in values}
    require(
        len(converted) == len(values), f"{key} is {text}, but a value is listed twice; list it once"
    )
    return values


def combine(swept: Mapping[str, list[str]], seeds: int) -> list[dict[str, str]]:
    """Return all combinations of the values, the first value of each key first.

    `seeds`: number of runs of a combination. Raises `UserError` for more than `MOST_RUNS` runs.
    """
    settings = [
        dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())
    ]
    runs = len(settings) * seeds
    require(
        runs <= MOST_RUNS,
        f"the values make {runs:,} runs, but a sweep has at most {MOST_RUNS:,}; list fewer values",
    )
    return settings
