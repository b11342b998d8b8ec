"""The config as its own manual: every key with its docstring, as YAML and as a JSON schema.

docs/keys.md is made of the same docstrings.
"""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from accel_gpt.config.experiment import Config
from accel_gpt.config.help import descriptions
from accel_gpt.config.model import PRESETS
from accel_gpt.config.parse import (
    alternatives,
    config_of,
    is_section,
    load_config,
    read_options,
    to_plain,
)

SCHEMA_FILE = "accel_gpt.schema.json"
WIDTH = 96  # characters of a line of comments
TYPES: Mapping[Any, str] = types.MappingProxyType({bool: "boolean", float: "number", str: "string"})


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
    return "\n".join(
        [
            f"# yaml-language-server: $schema={SCHEMA_FILE}",
            f"# With that file beside this one, made by `accel-gpt config schema > {SCHEMA_FILE}`,",
            "# editors complete and check the keys.",
            *section_lines(config, Config(), to_plain(config)),
            "",
        ]
    )


def section_lines(section: Any, default: Any, plain: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one section, whose values are also in `plain`."""
    kind: Any = type(section)
    for name, hint in typing.get_type_hints(kind).items():
        value, usual = getattr(section, name), getattr(default, name)
        if is_section(hint):
            yield ""
            yield from comment(title(hint))
            yield f"{name}:"
            yield from indented(section_lines(value, usual, plain[name]))
            continue
        text = descriptions(kind)[name]
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
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def indented(lines: Iterator[str]) -> Iterator[str]:
    """Lines as those of a section."""
    yield from (f"  {line}" if line else line for line in lines)


def title(kind: type) -> str:
    """The first line of a docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def json_schema() -> dict[str, Any]:
    """The JSON schema of config files: types, choices, defaults and docstrings; no bounds."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "accel_gpt config",
        **section_schema(Config),
    }


def section_schema(kind: type) -> dict[str, Any]:
    """The schema of a dataclass, which allows no other key."""
    default = {field.name: field.default for field in dataclasses.fields(kind)}
    properties = {}
    for name, hint in typing.get_type_hints(kind).items():
        properties[name] = found = value_schema(hint)
        if not is_section(hint):
            found |= {"description": descriptions(kind)[name], "default": default[name]}
    kinds = {"type": ["object", "null"], "description": title(kind)}
    return {**kinds, "properties": properties, "additionalProperties": False}


def value_schema(hint: Any) -> dict[str, Any]:
    """The schema of what `parse.convert` takes for a type."""
    found = [value_schema(option) for option in alternatives(hint) if option is not hint]
    if found:
        null = [{"type": "null"}] * (type(None) in get_args(hint))
        return {"anyOf": [*found, *null]}
    if is_section(hint):
        return section_schema(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        item = value_schema(get_args(hint)[0])
        return {"anyOf": [{"type": "array", "items": item}, {"type": "string"}]}
    if get_origin(hint) is Mapping:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if hint is int:  # 1_000 is a text to editors
        return {"type": ["integer", "string"], "pattern": "^[0-9_]+$"}
    return {"type": TYPES[hint]}
