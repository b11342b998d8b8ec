"""The one parser of YAML and of the command line: same conversions, same errors, into dataclasses.

Reads an experiment file. `tyro` only draws the help and the shell completion of the same classes.
"""

import dataclasses
import difflib
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from accel_gpt.config.depth import depth_defaults
from accel_gpt.config.experiment import NANOGPT_NAMES, Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.shipped import resolve_config
from accel_gpt.errors import UserError, require
from accel_gpt.files import LARGEST_NUMBER, load_yaml

T = TypeVar("T")


def load_config(
    argv: Sequence[str],
    prog: str,
    inherit: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> Config:
    """Parse `CONFIG --section.key value ...`, CONFIG a YAML file or the name of a shipped one.

    Precedence: defaults < preset < depth < `model.init_from` < file < command line. `inherit` maps
    the keys that are set to those that `model.init_from` brings. Raises `UserError` for a missing
    file, an unknown key, a wrong type or an impossible value.
    """
    argv = list(argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else ""
    if {"-h", "--help"} & set(argv) or any("tyro-" in word for word in argv):
        show_help(Config, argv, f"{prog} CONFIG")
    require(bool(path), f"no config file given; usage: {prog} CONFIG [--section.key v]")
    path = str(resolve_config(path))
    values = read_yaml(path)
    require(
        isinstance(values, dict), f"{path} holds no sections; see configs/ for examples of a config"
    )
    checked = dict(flatten(Config, values, path))
    checked.update(read_options(Config, argv))
    if checked.get("model.init_from", "scratch") != "scratch":
        checked.update(inherit(checked))
    checked |= depth_defaults(checked)
    preset = checked.get("model.preset", "gpt2")
    for key, value in PRESETS[preset].items():
        checked.setdefault(f"model.{key}", value)
    return build(Config, checked)


def parse_command(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse the options of one command into its dataclass `cls`; positional fields come first."""
    if {"-h", "--help"} & set(argv) or any("tyro-" in word for word in argv):
        show_help(cls, argv, prog)
    return build(cls, dict(read_options(cls, argv)))


def read_yaml(path: str) -> dict[str, Any]:
    """Read a YAML file; an empty file is an empty mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    try:
        return load_yaml(text) or {}
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None


# --------------------------------------------------------------------------- keys


@functools.cache
def leaves(cls: type, prefix: str = "") -> Mapping[str, Any]:
    """Map the dotted key of every field, nested dataclasses included, to its type."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            found.update(leaves(typing.cast(type, hint), f"{prefix}{name}."))
        else:
            found[prefix + name] = hint
    return types.MappingProxyType(found)


def check_key(cls: type, key: str, where: str) -> Any:
    """Return the type of a key, or raise `UserError` with the nearest valid name."""
    known = leaves(cls)
    if key in known:
        return known[key]
    last = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last]  # right name, other section
    if not near and NANOGPT_NAMES.get(last) in known:
        near = [NANOGPT_NAMES[last]]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(known)}"
    raise UserError(f"unknown key {key} {where}; {hint}")


def flatten(
    cls: type, values: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield checked and converted (dotted key, value) pairs of a nested mapping."""
    sections = {key.rpartition(".")[0] for key in leaves(cls)}
    sections |= {s.rpartition(".")[0] for s in sections}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in sections:
            if value is None:
                continue
            require(
                isinstance(value, Mapping),
                f"{key} in {where} is {value!r}; it is a section, with keys of its own",
            )
            yield from flatten(cls, value, where, f"{key}.")
        else:
            if key not in leaves(cls):
                near = difflib.get_close_matches(key, sections - {""}, n=1, cutoff=0.75)
                if near and isinstance(value, Mapping):
                    raise UserError(f"unknown section {key} in {where}; did you mean {near[0]}?")
            yield key, convert(key, value, check_key(cls, key, f"in {where}"))


def read_options(cls: type, argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield checked and converted (key, value) pairs of `VALUE --key value --key=value --flag`."""
    words = list(argv)
    positional = [key for key, hint in leaves(cls).items() if is_positional(hint)]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            require(
                bool(positional), f"unexpected argument {word!r}; options are written --key value"
            )
            key, text = positional.pop(0), word
            yield key, convert(key, text, leaves(cls)[key])
            continue
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        hint = check_key(cls, key, "on the command line")
        if not equals:
            if bool in (hint, *get_args(hint)) and (not words or words[0].startswith("--")):
                text = "true"
            else:
                require(bool(words), f"--{key} needs a value: {describe_type(hint)}")
                text = words.pop(0)
        yield key, convert(key, split_words(text) if get_origin(hint) is tuple else text, hint)
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    missing = [key for key in positional if key in required]
    require(not missing, f"{' and '.join(missing).upper()} missing; see --help")


def split_options(cls: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into the words of options of `cls` and those of all other options."""
    own: list[str] = []
    rest: list[str] = []
    current = own
    for word in argv:
        if word.startswith("--"):
            key, equals, _ = word[2:].partition("=")
            known = key.replace("-", "_") in (*leaves(cls), "help")
            current = own if known else rest
            current.append(word)
            if equals:
                current = own
        else:
            current.append(word)
            current = own
    return own, rest


def is_positional(hint: Any) -> bool:
    """Whether a field was marked with `tyro.conf.Positional`."""
    import tyro

    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


# --------------------------------------------------------------------------- values


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert `value`, of YAML or of the command line, to the type `hint`; raises `UserError`."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (types.UnionType, Union):
        options = [option for option in get_args(hint) if option is not type(None)]
        nothing = value is None or value in ("null", "None", "none")
        if nothing and len(options) < len(get_args(hint)):
            return None
        if len(options) == 1:
            return convert(key, value, options[0])
        if not {int, bool} & set(options):
            return convert_shaped(key, value, options)
    try:
        return convert_plain(value, hint)
    except OverflowError:
        raise UserError(
            f"{key} is {value!r:.60}; expected a finite number, up to {LARGEST_NUMBER:,}"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{key} is {value!r:.200}; expected {describe_type(hint)}") from None


def convert_shaped(key: str, value: Any, options: Sequence[Any]) -> Any:
    """Convert `value` to the one of `options` that has its shape: text, list, mapping or dataclass.

    On the command line lists and mappings are written as in YAML: `[{path: a}, {path: b}]`.
    """
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = load_yaml(value)
        except ValueError:
            raise UserError(f"{key} is {value!r}, which is not valid YAML") from None
    for hint in options:
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            cls = typing.cast(type, hint)
            return build(cls, dict(flatten(cls, value, key)))
        if get_origin(hint) is tuple and isinstance(value, list):
            item = get_args(hint)[0]
            wrong = [v for v in value if not isinstance(v, Mapping)]
            require(
                bool(value) and not wrong,
                f"{key} is {value!r}; expected a list of {describe_type(item)}",
            )
            return tuple(build(item, dict(flatten(item, v, key))) for v in value)
        if get_origin(hint) is Mapping and isinstance(value, Mapping):
            wrong = [v for v in (*value, *value.values()) if not (isinstance(v, str) and v)]
            require(
                bool(value) and not wrong, f"{key} is {value!r}; expected {describe_type(hint)}"
            )
            return dict(value)
    require(
        isinstance(value, str),
        f"{key} is {value!r}; expected {' or '.join(map(describe_type, options))}",
    )
    return value


def convert_plain(value: Any, hint: Any) -> Any:
    """Convert `value` to a plain type; raises `ValueError`, `TypeError` or `KeyError`."""
    if get_origin(hint) is tuple:
        return tuple(convert_plain(item, get_args(hint)[0]) for item in as_list(value))
    if get_origin(hint) in (types.UnionType, Union):  # a number, or true or false, or a word
        plain, word = get_args(hint)
        return value if value in get_args(word) else convert_plain(value, plain)
    if get_origin(hint) is Literal:
        value = "no" if value is False else value  # YAML 1.1 reads an unquoted no as false
        return {choice: choice for choice in get_args(hint)}[value]
    if hint is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool | dict | list | None):
        raise TypeError
    if hint is int:
        return integer(value)
    if hint is float and not math.isfinite(float(value)):
        raise OverflowError
    return hint(value)


def as_list(value: Any) -> Sequence[Any]:
    """A list as YAML gives it; a lone text is a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise TypeError
    return value


def split_words(text: str) -> Sequence[Any]:
    """Split a list as written on the command line: `a,b` or `["a, b", "c"]`."""
    if text.startswith("["):
        try:
            return as_list(load_yaml(text))
        except (TypeError, ValueError):
            raise UserError(f"{text!r} is not a list; write a,b or [a, b]") from None
    return [word.strip() for word in text.split(",")]


def integer(value: Any) -> int:
    """An integer: 1000, 1_000 or 1e3; `OverflowError` beyond `LARGEST_NUMBER`."""
    text = str(value)
    number = int(text) if re.fullmatch("[+-]?[0-9_]+", text) else float(text)
    if not abs(number) <= LARGEST_NUMBER:
        raise OverflowError
    if number != int(number):
        raise ValueError
    return int(number)


def describe_type(hint: Any) -> str:
    """A type in words, for errors."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join("null" if o is type(None) else describe_type(o) for o in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if dataclasses.is_dataclass(item):
            return f"a list of {describe_type(item)}"
        return "a list, or words separated by commas"
    if dataclasses.is_dataclass(hint):
        return f"{{{', '.join(leaves(typing.cast(type, hint)))}}}"
    if get_origin(hint) is Mapping:
        return "{name: text, ...}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[hint]


# --------------------------------------------------------------------------- objects


def build(cls: type[T], flat: Mapping[str, Any]) -> T:
    """Make a dataclass from dotted keys; every other field keeps its default."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            inner = {k[len(f.name) + 1 :]: v for k, v in flat.items() if k.startswith(f"{f.name}.")}
            values[f.name] = build(typing.cast(type, hint), inner)
        elif f.name in flat:
            values[f.name] = flat[f.name]
    return cls(**values)


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested mappings, tuples to lists."""
    return dataclasses.asdict(
        config, dict_factory=lambda kv: {k: list(v) if isinstance(v, tuple) else v for k, v in kv}
    )


def to_flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested mappings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(to_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def changed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `config`, by dotted key, that are not the defaults of its preset."""
    default = to_flat(to_plain(Config()))
    preset = PRESETS.get(str(config.get("model.preset")), {})
    default |= {f"model.{key}": value for key, value in preset.items()}
    return {key: value for key, value in config.items() if default.get(key) != value}


def to_yaml(config: Any) -> str:
    """Write a config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def show_help(cls: type, argv: Sequence[str], prog: str) -> None:
    """Print the help, or shell completion, that tyro draws from `cls`, and exit."""
    import tyro

    words = [word for word in argv if word in ("-h", "--help") or "tyro-" in word]
    config = (tyro.conf.FlagConversionOff,)
    tyro.cli(cls, prog=prog, args=words, use_underscores=True, config=config)
    sys.exit(0)
