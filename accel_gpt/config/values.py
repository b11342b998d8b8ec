"""Convert a config: dataclasses, nested mappings, dotted keys and YAML; paths of a moved run."""

import dataclasses
import functools
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.options import field_types

T = TypeVar("T")


def is_section(hint: Any) -> bool:
    """Return whether a type is a dataclass, and so a section of keys."""
    return dataclasses.is_dataclass(hint)


@functools.cache
def leaves(cls: type, prefix: str = "") -> Mapping[str, Any]:
    """Map the dotted key of every field, nested dataclasses included, to its type.

    If a key is a keyword of Python, the name of its field ends with an underscore.
    """
    found: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        if is_section(hint):
            found.update(leaves(hint, f"{prefix}{name}."))
        else:
            found[prefix + name.removesuffix("_")] = hint
    return types.MappingProxyType(found)


@functools.cache
def sections(cls: type) -> frozenset[str]:
    """Return the dotted names of all nested dataclasses."""
    found = set()
    for key in leaves(cls):
        name = key.rpartition(".")[0]
        while name:
            found.add(name)
            name = name.rpartition(".")[0]
    return frozenset(found)


def of_section(section: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a section, by their names without the section."""
    prefix = f"{section}."
    return {key.removeprefix(prefix): flat[key] for key in flat if key.startswith(prefix)}


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from dotted keys; other fields keep their defaults."""
    fields: dict[str, Any] = {}
    kind: Any = cls
    for name, hint in field_types(kind).items():
        if is_section(hint):
            fields[name] = build(hint, of_section(name, values))
        elif name.removesuffix("_") in values:
            fields[name] = values[name.removesuffix("_")]
    return cls(**fields)


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested mappings, and tuples to lists.

    Leaves out `internal` fields, and options that only the command line may set.
    """
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        one = field.metadata.get("option")
        if "internal" in field.metadata or (one and one.command_line_only):
            continue
        plain[field.name] = plain_value(getattr(config, field.name))
    return plain


def plain_value(value: Any) -> Any:
    """Convert the value of an option: dataclasses to mappings, tuples to lists."""
    if is_section(type(value)):
        return to_plain(value)
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    if isinstance(value, Mapping):
        return {key: plain_value(one) for key, one in value.items()}
    return value


def to_flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Convert a dataclass, or nested mappings, to dotted keys."""
    nested = to_plain(config) if is_section(config) else config
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(to_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def to_nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested mappings."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found


def changed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of `config` whose values differ from the defaults of its preset."""
    preset = PRESETS.get(str(config.get("model.preset")), {})
    default = to_flat(Config()) | {f"model.{key}": value for key, value in preset.items()}
    return {key: value for key, value in config.items() if default.get(key) != value}


def to_yaml(config: Any) -> str:
    """Format a config as YAML; `load_config` reads an equal config from it."""
    # the dumper of libyaml writes the same text in a fifth of the time, but PyYAML may lack it
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(to_plain(config), Dumper=dumper, sort_keys=False, allow_unicode=True)


# --------------------------------------------------------------------------- runs that moved


def is_config_of_run(path: str | Path) -> bool:
    """Return whether a file is the config.yaml in the folder of a run."""
    return Path(path).name == "config.yaml" and Path(path).with_name("run.json").is_file()


def relocate(config: Mapping[str, Any], out_dir: str) -> dict[str, Any]:
    """Update the paths in a run's nested config to the folder `out_dir` that now holds the run.

    Paths of data inside the run's folder begin with the old `out_dir`, so they are updated too.
    """
    before = config.get("out_dir")
    data = config.get("data")
    if not isinstance(before, str) or not before:
        return dict(config)
    moved = dict(config) | {"out_dir": out_dir}
    if isinstance(data, Mapping):
        moved["data"] = dict(data)
        moved["data"]["train"] = relocated(data.get("train", ""), before, out_dir)
        moved["data"]["val"] = relocated(data.get("val"), before, out_dir)
    return moved


def relocated(value: Any, before: str, after: str) -> Any:
    """Replace paths in the folder `before` by paths in the folder `after`, also inside `value`."""
    if isinstance(value, Mapping):
        return {key: relocated(inner, before, after) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [relocated(inner, before, after) for inner in value]
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = os.path.normpath(value)
    folder = os.path.normpath(before)
    if not Path(path).is_relative_to(folder) or path.startswith(".."):
        return value
    return str(Path(after, Path(path).relative_to(folder)))
