"""Read JSON files into dataclasses: where index, manifest and state are checked, once.

    @dataclass(frozen=True)
    class SavedFile:
        size: int
        sha256: str

    @dataclass(frozen=True)
    class Manifest:
        files: dict[str, SavedFile]

    manifest = load_record(Manifest, path, error=CheckpointError)

Keys, types and bounds of every field are checked. An error names file, key, value and what is
expected. Bounds are those of `config.options.option`; an integer without bounds is a count, from 0
to 2^53. A float may be an integer in the file, and stays one; without bounds it may be NaN or
infinite. `Any` stands for any value. A class lists keys that earlier versions wrote, and that are
ignored, in `FORMER_KEYS`.
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
    """A value is not what its field asks for; the message names its key and the value."""


def load_record(
    kind: type[T],
    path: Path,
    error: type[AccelGPTError],
    advice: str = "",
) -> T:
    """Read a JSON file into `kind`; raise `error`, with `advice` at its end, if it does not fit."""
    return parse_record(kind, read_object(path, error, advice), path, error, advice)


def load_record_or_none(kind: type[T], path: Path) -> T | None:
    """Read a JSON file that can be made again into `kind`; None if it is missing or damaged."""
    try:
        found: T = read_value(kind, read_json(path), "")
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
        raise error(f"{path} is damaged: it holds {shown(content)}, expected an object{ending}")
    return content


def parse_record(
    kind: type[T],
    content: Mapping[str, Any],
    path: Path,
    error: type[AccelGPTError],
    advice: str = "",
) -> T:
    """Convert the object that the file `path` holds to `kind`; see `load_record`."""
    try:
        found: T = read_value(kind, content, "")
    except MismatchError as problem:
        ending = f"; {advice}" if advice else ""
        raise error(f"{path} is damaged: {problem}{ending}") from None
    return found


# --------------------------------------------------------------------------- values


def read_value(hint: Any, value: Any, key: str, bounds: Option | None = None) -> Any:
    """Return the value of JSON at `key` as the type `hint`; raise `MismatchError`."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return to_record(hint, value, key)
    kind = get_origin(hint) or hint
    if kind is types.UnionType:
        (inner,) = (one for one in get_args(hint) if one is not types.NoneType)
        return None if value is None else read_value(inner, value, key, bounds)
    whole = kind is float and type(value) is int and abs(value) <= sys.float_info.max
    if type(value) is not kind and not whole:
        raise MismatchError(f"{key or 'it'} is {shown(value)}, expected {EXPECTED[kind]}")
    if kind is list:
        (item,) = get_args(hint)
        return [read_value(item, one, f"{key}[{index}]") for index, one in enumerate(value)]
    if kind is dict:
        _, item = get_args(hint)
        return {name: read_value(item, one, joined(key, name)) for name, one in value.items()}
    if bounds is None and kind is int:
        bounds = COUNT
    problem = bounds.problem(value) if bounds else None
    if problem:
        raise MismatchError(f"{key} is {shown(value)}; {problem}")
    return value


def to_record(kind: Any, value: Any, key: str) -> Any:
    """Return an object of JSON as the dataclass `kind`; raise `MismatchError`."""
    if not isinstance(value, Mapping):
        raise MismatchError(f"{key or 'it'} is {shown(value)}, expected an object")
    hints = field_types(kind)
    unknown = value.keys() - hints.keys() - set(getattr(kind, "FORMER_KEYS", ()))
    if unknown:
        raise MismatchError(f"{joined(key, min(unknown))} is an unknown key")
    missing = required_fields(kind) - value.keys()
    if missing:
        raise MismatchError(f"{joined(key, min(missing))} is missing")
    bounds = field_bounds(kind)
    return kind(
        **{
            name: read_value(hint, value[name], joined(key, name), bounds.get(name))
            for name, hint in hints.items()
            if name in value
        }
    )


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
    """Return the bounds of the fields of a dataclass that have some; see the module."""
    hints = field_types(kind)
    found = {}
    for name, bounds in own_options(kind).items():
        if hints[name] is int and bounds.at_most is None:
            bounds = dataclasses.replace(bounds, at_most=LARGEST_NUMBER)
        found[name] = bounds
    return found


def joined(key: str, name: str) -> str:
    """Return the key of an entry of an object, `splits.train`, on one line."""
    word = json.dumps(name)[1:-1][:100]
    return f"{key}.{word}" if key else word


def shown(value: Any) -> str:
    """Return a value of JSON, shortened, for an error."""
    if isinstance(value, list | dict):
        return EXPECTED[type(value)]
    return json.dumps(value)[:100]
