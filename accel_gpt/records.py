"""Read JSON files into dataclasses, and check every field.

    @dataclass(frozen=True)
    class SavedFile:
        size: int
        sha256: str

    @dataclass(frozen=True)
    class Manifest:
        files: dict[str, SavedFile]

    manifest = load_record(Manifest, path, error=CheckpointError)

An error names file, key, value and expected type or bounds. `config.options.option` sets the bounds
of a field. An integer without bounds is a count, from 0 to 2^53. A float may be an integer in the
file, and stays one; without bounds it may be NaN or infinite. `Any` accepts any value. Keys of
earlier versions, listed in `FORMER_KEYS`, are ignored. Any other unknown key is an error, because a
later version may have written it and it may change what is computed. With `OPEN = True` a class
ignores unknown keys: for a log of what happened, and for files of another program, which ignores
them too.
"""

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from accel_gpt.config.options import Option, field_types, own_options
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import LARGEST_NUMBER, read_json

T = TypeVar("T")

DATACLASS = object()  # stands for the items of a dataclass
COUNT = Option("", at_least=0, at_most=LARGEST_NUMBER)
EXPECTED: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        list: "a list",
        dict: "an object",
    }
)


class MismatchError(ValueError):
    """The value at `keys` does not fit its field."""

    def __init__(self, problem: str, keys: tuple[str | int, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.keys = keys

    def __str__(self) -> str:
        path = ""
        for key in self.keys:
            # keeps line breaks in a key out of the message
            path += f"[{key}]" if isinstance(key, int) else f".{json.dumps(key)[1:-1][:100]}"
        return f"{path.removeprefix('.') or 'it'} {self.problem}"

    def inside(self, key: str | int) -> "MismatchError":
        """Return this error for the object or list that holds the value at `key`."""
        return type(self)(self.problem, (key, *self.keys))


class UnknownKeyError(MismatchError):
    """The dataclass has no field for a key, and no other key is missing."""


def load_record(
    kind: type[T],
    path: Path,
    error: type[AccelGPTError],
    advice: str = "",
) -> T:
    """Read a JSON file into `kind`; if it does not fit, raise `error` with `advice` at its end."""
    return parse_record(kind, read_object(path, error, advice), path, error, advice)


def load_record_or_none(kind: type[T], path: Path) -> T | None:
    """Read a JSON file into `kind`; return None if it is missing or damaged."""
    try:
        found: T = read_value(kind, read_json(path))
    except (OSError, ValueError):
        return None
    return found


def read_object(path: Path, error: type[AccelGPTError], advice: str = "") -> dict[str, Any]:
    """Read the object in a JSON file; raise `error` if there is none."""
    ending = f"; {advice}" if advice else ""
    try:
        content = read_json(path)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}{ending}") from None
    except ValueError as problem:
        raise error(f"{path} is not valid JSON ({problem}){ending}") from None
    if not isinstance(content, dict):
        raise error(
            f"{path} is damaged: it holds {short_json(content)}, expected an object{ending}"
        )
    return content


def parse_record(
    kind: type[T],
    content: Mapping[str, Any],
    path: Path,
    error: type[AccelGPTError],
    advice: str = "",
    newer: type[AccelGPTError] | None = None,
) -> T:
    """Convert the `content` of the file `path` to `kind`; see `load_record`.

    If the only problem is an unknown key, raise `newer` if it is given.
    """
    try:
        found: T = read_value(kind, content)
    except UnknownKeyError as problem:
        raise (newer or error)(unknown_key_message(path, str(problem), advice)) from None
    except MismatchError as problem:
        ending = f"; {advice}" if advice else ""
        raise error(f"{path} is damaged: {problem}{ending}") from None
    return found


def unknown_key_message(path: Path, problem: str, advice: str = "") -> str:
    """Return the error message for a key that only another version knows."""
    ending = f", or {advice}" if advice else ""
    return f"another version of accel_gpt wrote {path}: {problem}; update accel_gpt{ending}"


# --------------------------------------------------------------------------- values


def read_value(hint: Any, value: Any, bounds: Option | None = None) -> Any:
    """Convert a JSON value to the type `hint`; raise `MismatchError` if it does not fit."""
    kind, item, optional = parts_of(hint)
    if kind is Any or (optional and value is None):
        return value
    if item is DATACLASS:
        return read_fields(kind, value)
    whole = kind is float and type(value) is int and abs(value) <= sys.float_info.max
    if type(value) is not kind and not whole:
        raise MismatchError(f"is {short_json(value)}, expected {EXPECTED[kind]}")
    if kind is list:
        return [read_item(item, one, index) for index, one in enumerate(value)]
    if kind is dict:
        return {name: read_item(item, one, name) for name, one in value.items()}
    if bounds is None and (kind is not int or 0 <= value <= LARGEST_NUMBER):
        return value
    problem = (bounds or COUNT).problem(value)
    if problem:
        raise MismatchError(f"is {short_json(value)}; {problem}")
    return value


def read_item(hint: Any, value: Any, key: str | int, bounds: Option | None = None) -> Any:
    """Convert the value at `key` of an object or a list to the type `hint`."""
    try:
        return read_value(hint, value, bounds)
    except MismatchError as error:
        raise error.inside(key) from None


def read_fields(kind: Any, value: Any) -> Any:
    """Convert a JSON object to the dataclass `kind`; raise `MismatchError` if it does not fit."""
    if type(value) is not dict:
        raise MismatchError(f"is {short_json(value)}, expected an object")
    hints = field_types(kind)
    missing = required_fields(kind) - value.keys()
    if missing:
        raise MismatchError("is missing", (min(missing),))
    unknown = value.keys() - hints.keys() - set(getattr(kind, "FORMER_KEYS", ()))
    if unknown and not getattr(kind, "OPEN", False):
        raise UnknownKeyError("is an unknown key", (min(unknown),))
    bounds = field_bounds(kind)
    found = {
        name: read_item(hint, value[name], name, bounds.get(name))
        for name, hint in hints.items()
        if name in value
    }
    return kind(**found)


@functools.cache
def parts_of(hint: Any) -> tuple[Any, Any, bool]:
    """Split a type into its class, the type of its items, and whether it may be null."""
    if get_origin(hint) is types.UnionType:
        (inner,) = (one for one in get_args(hint) if one is not types.NoneType)
        kind, item, _ = parts_of(inner)
        return kind, item, True
    if dataclasses.is_dataclass(hint):
        return hint, DATACLASS, False
    arguments = get_args(hint)
    return get_origin(hint) or hint, arguments[-1] if arguments else None, False


@functools.cache
def required_fields(kind: Any) -> frozenset[str]:
    """Return the names of the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return frozenset(
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    )


@functools.cache
def field_bounds(kind: Any) -> Mapping[str, Option]:
    """Return the bounds of each field that has bounds; see the module."""
    hints = field_types(kind)
    found = {}
    for name, bounds in own_options(kind).items():
        limits = (bounds.above, bounds.at_least, bounds.below, bounds.at_most)
        if limits == (None, None, None, None):
            continue
        if hints[name] is int and bounds.at_most is None:
            bounds = dataclasses.replace(bounds, at_most=LARGEST_NUMBER)
        found[name] = bounds
    return found


def short_json(value: Any) -> str:
    """Return a JSON value, shortened, for an error."""
    if isinstance(value, list | dict):
        return EXPECTED[type(value)]
    return json.dumps(value)[:100]
