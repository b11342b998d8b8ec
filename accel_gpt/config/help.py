"""Format the help of a command from the options of a dataclass, in the layout of argparse."""

import argparse
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from accel_gpt.config.options import default_of, field_types, own_options, typed

NAMES: Mapping[Any, str] = MappingProxyType(
    {int: "N", float: "NUMBER", str: "TEXT", bool: "true|false"}
)


def format_help(cls: type, prog: str, essential: bool = False) -> str:
    """Format the help of `prog`, whose options are the fields of `cls`.

    A field that is a dataclass is a section, with options `--section.key`.
    `essential`: show only the essential options.
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
    sections: list[tuple[str, Any]] = [("", cls)]  # outer sections come before inner ones
    for prefix, section in sections:
        title = "options"
        if prefix:
            title = f"{prefix[:-1]}: {(section.__doc__ or '').partition('.')[0]}"
        add_options(parser, title, section, prefix, essential)
        for name, hint in field_types(section).items():
            if dataclasses.is_dataclass(hint):
                sections.append((f"{prefix}{name}.", hint))
    return parser.format_help()


def add_options(
    parser: argparse.ArgumentParser, title: str, cls: type, prefix: str, essential: bool
) -> None:
    """Add the options of one section to a group of `parser`, and positional options to `parser`.

    `essential`: add only the essential options.
    """
    group = parser.add_argument_group(title)
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints or dataclasses.is_dataclass(hints[field.name]):
            continue
        key = f"{prefix}{field.name}".removesuffix("_")
        described = own_options(cls)[field.name]
        text = described.description
        if described.positional:
            parser.add_argument(key, metavar=key.upper(), help=text.replace("%", "%%"))
        elif described.essential or not essential:
            if field.default != "":
                text += f" (default: {typed(default_of(field))})"
            group.add_argument(
                f"--{key}", metavar=value_name(hints[field.name]), help=text.replace("%", "%%")
            )


def value_name(hint: Any) -> str:
    """Return the placeholder for the value of an option."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if hint == tuple[str, ...]:
        return "TEXT"  # repeated for several
    if get_origin(hint) is tuple:
        return f"{value_name(get_args(hint)[0])},..."
    if get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join(value_name(one) for one in get_args(hint) if one is not type(None))
    return NAMES.get(hint, "VALUE")
