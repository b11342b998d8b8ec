"""Parse the command line of `accel-gpt sweep` into combinations of values."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_origin

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import alternatives, check_key, read_options
from accel_gpt.errors import require

MOST_RUNS = 1000


@dataclass(frozen=True)
class Grid:
    """The parsed keys of a sweep: `--optim.lr 1e-3,3e-3 --seed 1,2`."""

    out_dir: str | None
    fixed: tuple[str, ...]  # keys with one value, as command-line arguments
    swept: Mapping[str, list[str]]  # keys with several values
    settings: list[list[dict[str, str]]]  # the values of each run, grouped by setting


def read_grid(arguments: Sequence[str], count: int | None) -> Grid:
    """Read the keys of a sweep; if `count` is given, draw that many settings at random.

    Raises `UserError` if no key has several values, or if a value is invalid.
    """
    given = read_arguments(arguments)
    out_dir = given.pop("out_dir", None)
    fixed = []
    swept = {}
    for key, text in given.items():
        values = split_values(key, text)
        if len(values) > 1:
            swept[key] = values
        else:
            fixed.append(f"--{key}={text}")
    require(
        bool(swept),
        "there is nothing to sweep; give an option several values, as in --optim.lr 1e-3,3e-3",
    )
    return Grid(
        out_dir=out_dir,
        fixed=tuple(fixed),
        swept=swept,
        settings=draw_settings(swept, count),
    )


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


def draw_settings(swept: Mapping[str, list[str]], count: int | None) -> list[list[dict[str, str]]]:
    """Return the values of each run, grouped by setting; a setting is trained with every seed.

    `count`: draw as many settings at random; None: take all combinations.
    """
    keys = [key for key in swept if key != "seed"]
    seeds = [{"seed": seed} for seed in swept.get("seed", [])] or [{}]
    total = math.prod(len(swept[key]) for key in keys)
    require(
        count is None or count <= total,
        f"--random is {count}, but the values have only {total:,} combinations; leave it out",
    )
    runs = (count or total) * len(seeds)
    require(
        runs <= MOST_RUNS,
        f"the values make {runs:,} runs, but a sweep has at most {MOST_RUNS:,}; list fewer "
        "values, or draw some with --random 50",
    )
    chosen = set(random.Random(0).sample(range(total), count or total))
    settings = []
    for number, values in enumerate(itertools.product(*(swept[key] for key in keys))):
        if number in chosen:
            setting = dict(zip(keys, values, strict=True))
            settings.append([setting | seed for seed in seeds])
    return settings
