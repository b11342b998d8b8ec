"""Convert a config: dataclasses, nested mappings, dotted keys and YAML; check what sets a key.

Files and command lines use the same conversions and checks. No torch.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from accel_gpt.config.experiment import STAGE_KEYS, Config, Stage
from accel_gpt.config.model import PRESETS, Scalar
from accel_gpt.config.options import all_options, field_types
from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.files import LARGEST_NUMBER, load_yaml

T = TypeVar("T")

EXTRA = "model.extra."
NEAR = 0.76  # least similarity of an option that is named; push is nearly so like gpus
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")  # options of other trainers -> ours
NULLS = ("null", "None")  # on the command line, of YAML and Python
SCHEME = r"[A-Za-z][\w+.-]*://"
# user:password@ in any URL, and user@ in a web address, where the user is an access token
PASSWORD = re.compile(rf"{SCHEME}[^\s/?#]*:[^\s/?#]*@\S*|(?i:https?)://[^\s/?#]+@\S*")
# query parameters of signed URLs
SIGNATURE = re.compile(
    rf"{SCHEME}\S*[?&](sig|[\w-]*(?:signature|token|secret|password|credential|key|keyid))=\S*",
    re.IGNORECASE,
)


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
    if isinstance(value, Stage):
        return {"from": value.from_, **plain_value(value.options)}
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


# --------------------------------------------------------------------------- keys


def check_key(cls: type, key: str, where: str) -> Any:
    """Return the type of a key; raises `UserError` with the nearest keys for an unknown one."""
    if cls is Config and key.startswith(EXTRA) and key.count(".") == EXTRA.count("."):
        return Scalar
    if key not in leaves(cls):
        raise UserError(f"unknown key {key} {where}; {nearest_keys(cls, key)}")
    return leaves(cls)[key]


def nearest_keys(cls: type, key: str) -> str:
    """Return the keys that an unknown key may mean: of another section or another trainer too."""
    last = key.rpartition(".")[2]
    if cls is Config:
        others = load_yaml(OTHER_NAMES.read_text(encoding="utf-8"))
        ours = others.get(key) or others.get(last)
        if ours:
            return f"did you mean {ours}?"
    names: dict[str, list[str]] = {}
    for name in (*leaves(cls), *sections(cls)):
        if name != key:
            names.setdefault(name.rpartition(".")[2], []).append(name)
            names[name] = [name]
    shown = {name: " or ".join(keys[:3]) for name, keys in names.items()}
    command = "accel-gpt train --help-all" if cls is Config else "--help"
    otherwise = f"{command} shows all keys"
    return did_you_mean(last if last in names else key, names, otherwise, shown, NEAR)


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a nested mapping; raises `UserError` for invalid keys and values."""
    return build(cls, dict(flatten(cls, values, where)))


def flatten(
    cls: type, values: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested mapping with their values, checked and converted."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in sections(cls):
            hint = check_key(cls, key, where)
            require(
                value is None
                or key not in all_options(cls)
                or not all_options(cls)[key].command_line_only,
                f"{key} {where} would execute a file, so only the command line may set it; remove "
                f"it, and use --{key}",
            )
            yield key, with_home(cls, key, convert(key, value, hint))
        elif value is not None:
            require(
                isinstance(value, Mapping),
                f"{key} {where} is {value!r}, but {key} is a section; set its keys",
            )
            yield from flatten(cls, value, where, f"{key}.")


# --------------------------------------------------------------------------- values


def alternatives(hint: Any) -> list[Any]:
    """Return the types in a union, without None; a list of `hint` if it is no union."""
    if get_origin(hint) not in (types.UnionType, Union):
        return [hint]
    return [option for option in get_args(hint) if option is not type(None)]


def parse_text(key: str, text: str, hint: Any) -> Any:
    """Parse a word of the command line into the YAML value for the type `hint`.

    The word may hold a list or mapping in YAML. A list of numbers may also be written as `1,2`;
    commas belong to a text.
    """
    origins = {get_origin(option) for option in alternatives(hint)}
    if hint == tuple[str, ...] and not text.startswith("["):
        return [text]
    if text.startswith(("[", "{")) and origins & {tuple, Mapping}:
        try:
            return load_yaml(text)
        except ValueError:
            raise UserError(f"{key} is {text!r}, but must be valid YAML") from None
    if origins == {tuple}:
        return [word.strip() for word in text.split(",")]
    return text


def with_home(cls: type, key: str, value: Any) -> Any:
    """Return the value of an option; in a path, a leading ~ becomes the home folder.

    No shell replaces it in a YAML file, in --key=~/x or in a Python call.
    """
    described = all_options(cls).get(key)
    if described is None or not described.path:
        return value
    if isinstance(value, Mapping):
        return {name: os.path.expanduser(path) for name, path in value.items()}
    if isinstance(value, tuple):  # a source of a mixture is a section, which has a path itself
        return tuple(os.path.expanduser(one) if isinstance(one, str) else one for one in value)
    return os.path.expanduser(value) if isinstance(value, str) else value


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value from YAML or the command line to the type `hint`; raises `UserError`."""
    for text in texts_in(value):
        check_string(key, text)
    if hint == Scalar:
        return scalar(key, value)
    if hint == Mapping[str, Scalar]:
        require(
            isinstance(value, Mapping),
            f"{key} is {value!r:.200}; expected {{name: number or text, ...}}",
        )
        return {str(name): scalar(f"{key}.{name}", one) for name, one in value.items()}
    or_null = type(None) in get_args(hint)
    is_null = isinstance(value, str) and value in NULLS
    if or_null and (value is None or is_null):
        return None
    # a prompt may be this word, but no path or name of a config
    may_be_word = key.startswith("--") or get_origin(hint) is tuple
    require(
        not is_null or may_be_word,
        f"{key} is {value}, but it cannot be null; expected {describe_type(hint)}",
    )
    if isinstance(value, list) and section_in(hint) and (value or section_in(hint) is Stage):
        if not all(isinstance(one, Mapping) for one in value):
            raise mismatch(key, value, hint)
        if section_in(hint) is Stage:
            return tuple(stage_from(one, f"in {key}") for one in value)
        return tuple(from_mapping(section_in(hint), one, f"in {key}") for one in value)
    try:
        found = msgspec.convert(prepared(value, hint), hint, strict=False)
    except msgspec.ValidationError:
        raise mismatch(key, value, hint) from None
    for number in found if isinstance(found, tuple) else (found,):
        finite = not isinstance(number, float) or math.isfinite(number)
        small = not isinstance(number, int) or abs(number) <= LARGEST_NUMBER
        require(
            finite and small,
            f"{key} is {value!r:.60}; expected a finite number up to {LARGEST_NUMBER:,}",
        )
    return found


def stage_from(values: Mapping[str, Any], where: str) -> Stage:
    """Build a stage from its mapping; raises `UserError` for invalid keys and values."""
    first = values.get("from")
    is_share = isinstance(first, float) and 0 <= first < 1
    is_step = type(first) is int and 0 <= first <= LARGEST_NUMBER
    require(
        is_share or is_step,
        f"from {where} is {'missing' if first is None else repr(first)}; expected a share of the "
        "run from 0 to below 1, or a step",
    )
    options = {
        key: value
        for key, value in flatten(Config, {k: v for k, v in values.items() if k != "from"}, where)
        if value is not None
    }
    for key in options:
        require(
            key in STAGE_KEYS,
            f"{key} {where} cannot change while a run trains; expected {', '.join(STAGE_KEYS)}",
        )
    require(bool(options), f"from {first} {where} sets nothing; expected {', '.join(STAGE_KEYS)}")
    assert first is not None
    return Stage(first, options)


def scalar(key: str, value: Any) -> Any:
    """Return a value of `model.extra`; a text that spells a number or a truth value becomes one."""
    found = value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        found = value.lower() == "true"
    elif isinstance(value, str):
        for kind in (float, int):
            with contextlib.suppress(ValueError):
                found = kind(value)
    finite = not isinstance(found, float) or math.isfinite(found)
    require(
        isinstance(found, Scalar) and found not in NULLS and finite,
        f"{key} is {value!r:.200}; expected a number, a text, true or false",
    )
    return found


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def section_in(hint: Any) -> Any:
    """Return the dataclass of the items, if the type `hint` may be a tuple of them; else None."""
    for option in alternatives(hint):
        if get_origin(option) is tuple and is_section(get_args(option)[0]):
            return get_args(option)[0]
    return None


def prepared(value: Any, hint: Any) -> Any:
    """Return what msgspec shall convert: the spellings that it does not know are replaced."""
    options = alternatives(hint)
    choices = [choice for one in options if get_origin(one) is Literal for choice in get_args(one)]
    if isinstance(value, Mapping) and not all((value, *value.values())):
        return None  # an empty mapping or an empty text in it: no option takes it
    if value == [] and section_in(hint):
        return None
    if "no" in choices and value is False:  # YAML 1.1 reads an unquoted no as false
        return "no"
    if type(value) in (int, float) and str in options:  # a folder named 2024
        return str(value)
    if isinstance(value, str) and get_origin(hint) is tuple:
        return [value]
    return value


def mismatch(key: str, value: Any, hint: Any) -> UserError:
    """Return the error for a value that does not have the type `hint`."""
    or_null = " or null" if type(None) in get_args(hint) else ""
    return UserError(f"{key} is {value!r:.200}; expected {describe_type(hint)}{or_null}")


def check_string(key: str, text: str) -> None:
    """Raise `UserError` if a text is not UTF-8, or is a URL with credentials.

    Configs and commands are recorded and sent to trackers, so they must not contain credentials.
    """
    check_utf8(key, text)
    found = ""
    signature = SIGNATURE.fullmatch(text)
    if PASSWORD.fullmatch(text):
        found = "a user and password"
    elif signature:
        found = f"the credential {signature[1]}"
    require(
        not found,
        f"{key} is a URL with {found}; remove the credentials from the URL and set them in the "
        "environment",
    )


def check_utf8(key: str, text: str) -> None:
    """Raise `UserError` if a text, such as a path, holds bytes that are not UTF-8.

    Configs, indexes and records are UTF-8, so they cannot store such a path.
    """
    # YAML may write an emoji as two surrogates. A single one is a byte that is not UTF-8.
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    try:
        joined.encode()
    except UnicodeEncodeError:
        shown = joined.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
        raise UserError(f"{key} is {shown}, but must be UTF-8; rename the file or folder") from None


def describe_type(hint: Any) -> str:
    """Describe a type in words, for errors."""
    options = alternatives(hint)
    if len(options) > 1:
        return " or ".join(map(describe_type, options))
    hint = options[0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if is_section(item):
            return f"a list of {describe_type(item)}"
        if item is str:
            return "text, or a list of texts"
        return "a list, or numbers separated by commas"
    if hint is Stage:
        return f"{{from, {', '.join(STAGE_KEYS)}}}"
    if is_section(hint):
        return f"{{{', '.join(leaves(hint))}}}"
    if get_origin(hint) is Mapping:
        return "{name: text, ...}" if hint == Mapping[str, str] else "{name: number or text, ...}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[hint]


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
    if "stages" in config:
        moved["stages"] = relocated(config["stages"], before, out_dir)
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
