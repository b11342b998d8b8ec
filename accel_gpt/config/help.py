"""The help of a command: the options of a dataclass, as argparse lays them out."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from accel_gpt.config.checks import is_positional

NAMES: Mapping[Any, str] = MappingProxyType(
    {int: "N", float: "NUMBER", str: "TEXT", bool: "true|false"}
)


def format_help(cls: type, prog: str, only: Sequence[str] = ()) -> str:
    """The help of `prog`, whose options are the fields of `cls`: docstring, types, defaults.

    The fields of a dataclass in a field are a section of their own, as `--section.key`. `only`:
    the keys to show; empty: all.
    """
    words = [prog]
    for field in dataclasses.fields(cls):
        if is_positional(annotations(cls)[field.name]):
            name = field.name.upper()
            name += " ..." * (get_origin(get_args(annotations(cls)[field.name])[0]) is tuple)
            words.append(name if field.default is dataclasses.MISSING else f"[{name}]")
    parser = argparse.ArgumentParser(
        usage=" ".join([*words, "[--option value ...]"]),
        description=inspect.getdoc(cls),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28
        ),
        add_help=False,
    )
    add_options(parser.add_argument_group("options"), parser, cls, "", only)
    return parser.format_help()


def add_options(
    group: Any, parser: argparse.ArgumentParser, cls: type, prefix: str, only: Sequence[str]
) -> None:
    """Add the fields of `cls` to `group`, those of its sections to groups of their own."""
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", annotations(cls)[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            title = f"{key}: {(hint.__doc__ or '').partition('.')[0]}"
            add_options(parser.add_argument_group(title), parser, hint, f"{key}.", only)
            continue
        text = descriptions(cls)[field.name].replace("%", "%%")
        if is_positional(hint):
            parser.add_argument(key, metavar=key.upper(), help=text)
        elif not only or key in only:
            default = typed(field.default).replace("%", "%%")
            group.add_argument(
                f"--{key}", metavar=value_name(hint), help=f"{text} (default: {default})"
            )


def annotations(cls: type) -> Mapping[str, Any]:
    """The types of the fields of `cls`, extras included."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def descriptions(cls: type) -> Mapping[str, str]:
    """The docstring below each field of `cls`, on one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for node, after in itertools.pairwise(body.body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(node.target)] = " ".join(ast.literal_eval(after.value).split())
    return MappingProxyType(found)


def typed(value: Any) -> str:
    """A default as it is typed on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(typed, value)) or "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shlex.quote(str(value))


def value_name(hint: Any) -> str:
    """What stands for the value of an option in its help."""
    while get_origin(hint) is typing.Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"{value_name(get_args(hint)[0])},..."
    if get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join(value_name(one) for one in get_args(hint) if one is not type(None))
    return NAMES.get(hint, "VALUE")
