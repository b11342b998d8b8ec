"""Format the help of a command: the options of a dataclass, as argparse lays them out."""

import argparse
import dataclasses
import functools
import inspect
import shlex
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from accel_gpt.config.options import field_types, own_options

NAMES: Mapping[Any, str] = MappingProxyType(
    {int: "N", float: "NUMBER", str: "TEXT", bool: "true|false"}
)


def format_help(cls: type, prog: str, essential: bool = False) -> str:
    """Return the help of `prog`, whose options are the fields of `cls`.

    A field that is a dataclass is a section, with options `--section.key`.
    `essential`: show the essential options only.
    """
    words = [prog]
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name in own_options(cls) and own_options(cls)[field.name].positional:
            name = field.name.upper()
            if get_origin(hints[field.name]) is tuple:
                name += " ..."
            words.append(name if field.default is dataclasses.MISSING else f"[{name}]")
    parser = argparse.ArgumentParser(
        usage=" ".join([*words, "[--option value ...]"]),
        description=inspect.getdoc(cls),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28
        ),
        add_help=False,
    )
    add_options(parser.add_argument_group("options"), parser, cls, "", essential)
    return parser.format_help()


def add_options(
    group: Any, parser: argparse.ArgumentParser, cls: type, prefix: str, essential: bool
) -> None:
    """Add the fields of `cls` to `group`, and its sections to groups of their own.

    `essential`: leave out the options that are not.
    """
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        key = f"{prefix}{field.name}".removesuffix("_")
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            title = f"{key}: {(hint.__doc__ or '').partition('.')[0]}"
            section = parser.add_argument_group(title)
            add_options(section, parser, hint, f"{key}.", essential)
            continue
        described = own_options(cls)[field.name]
        text = described.description.replace("%", "%%")
        if described.positional:
            parser.add_argument(key, metavar=key.upper(), help=text)
        elif described.essential or not essential:
            default = typed(field.default).replace("%", "%%")
            group.add_argument(
                f"--{key}", metavar=value_name(hint), help=f"{text} (default: {default})"
            )


def typed(value: Any) -> str:
    """Return a default as it is typed on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(typed, value)) or "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shlex.quote(str(value))


def value_name(hint: Any) -> str:
    """Return the word that stands for the value of an option in its help."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"{value_name(get_args(hint)[0])},..."
    if get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join(value_name(one) for one in get_args(hint) if one is not type(None))
    return NAMES.get(hint, "VALUE")
