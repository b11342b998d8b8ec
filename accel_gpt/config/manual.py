"""The config as its own manual: every key with its docstring, as YAML.

docs/reference/keys.md is made of the same docstrings.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.options import field_types, own_options
from accel_gpt.config.parse import (
    config_of,
    is_section,
    load_config,
    read_options,
    to_plain,
)

WIDTH = 96  # characters of a line of comments


def named_config(
    words: Sequence[str], inherit: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> Config:
    """The config that `[NAME] [--section.key value ...]` names: a YAML file, a run's folder, a
    shipped config, a preset of the model, or without a name the defaults.
    """
    name, *options = words if words and not words[0].startswith("-") else ["", *words]
    if name and name not in PRESETS:
        inside = Path(name, "config.yaml")
        path = str(inside) if inside.is_file() else name
        return load_config([path, *options], "accel-gpt train --dump_config", inherit)
    values: dict[str, Any] = {"model.preset": name} if name else {}
    return config_of(values | dict(read_options(Config, options)), inherit)


def commented_yaml(config: Config) -> str:
    """Every key of `config` with its docstring above it, and its default where it has another."""
    lines = section_lines(config, Config(), to_plain(config))
    return "".join(f"{line}\n" for line in lines)


def section_lines(section: Any, default: Any, plain: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one section, whose values are also in `plain`."""
    kind: Any = type(section)
    for name, hint in field_types(kind).items():
        value, usual = getattr(section, name), getattr(default, name)
        if is_section(hint):
            yield ""
            yield from comment(title(hint))
            yield f"{name}:"
            yield from indented(section_lines(value, usual, plain[name]))
            continue
        text = own_options(kind)[name].description
        if value != usual:
            text += f" Default: {dump(usual if usual != '' else None)}."
        yield from comment(text)
        yield from f"{name}: {dump(plain[name])}".splitlines()


def dump(value: Any) -> str:
    """`value` as YAML in one line, unless it is a text of several."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def comment(text: str) -> list[str]:
    """`text` as lines of comments."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def indented(lines: Iterator[str]) -> Iterator[str]:
    """Lines as those of a section."""
    yield from (f"  {line}" if line else line for line in lines)


def title(kind: type) -> str:
    """The first line of a docstring."""
    return (kind.__doc__ or "").partition("\n")[0]
