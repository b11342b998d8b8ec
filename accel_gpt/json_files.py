"""Read JSON files into dataclasses with msgspec, and check every field.

    @dataclass(frozen=True)
    class SavedFile:
        size: Count
        sha256: str

    @dataclass(frozen=True)
    class Manifest:
        files: dict[str, SavedFile]

    manifest = load_json_as(Manifest, path, error=CheckpointError)

An error names the file, the key and the expected type or bounds. An unknown key is an error too,
because a later version may have written it and it may change what is computed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from accel_gpt.damage import damage_of
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import LARGEST_NUMBER, read_json

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_NUMBER)]


def load_json_as(kind: type[T], path: Path, error: type[AccelGPTError]) -> T:
    """Read a JSON file into `kind`; if it does not fit, raise `error`."""
    return convert_json(kind, read_json_object(path, error), path, error)


def load_json_or_none(kind: type[T], path: Path) -> T | None:
    """Read a JSON file into `kind`, without unknown keys; None if it is missing or damaged."""
    try:
        return msgspec.convert(read_json(path), kind)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def read_json_object(path: Path, error: type[AccelGPTError]) -> dict[str, Any]:
    """Read the object in a JSON file; raise `error` if there is none.

    Raises `MachineError` if the operating system does not read a file that exists.
    """
    try:
        content = read_json(path)
    except OSError as problem:
        raise error(damage_of(path, problem)) from None
    except ValueError as problem:
        raise error(f"{path} is not valid JSON ({problem})") from None
    if not isinstance(content, dict):
        raise error(f"{path} is damaged: it holds no object")
    return content


def convert_json(
    kind: type[T],
    content: Mapping[str, Any],
    path: Path,
    error: type[AccelGPTError],
    newer: type[AccelGPTError] | None = None,
) -> T:
    """Convert the `content` of the file `path` to `kind`; see `load_json_as`.

    If the only problem is an unknown key, raise `newer` if it is given.
    """
    try:
        found = msgspec.convert(content, kind)
    except msgspec.ValidationError as problem:
        raise error(f"{path} is damaged: {problem}") from None
    unknown = unknown_key(content, msgspec.to_builtins(found))
    if unknown:
        raise (newer or error)(unknown_key_message(path, unknown))
    return found


def unknown_key(content: Any, known: Any) -> str:
    """Return the path of a key in nested `content` that is not in `known`; "" if there is none."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            shown = json.dumps(name)[1:-1][:100]  # keeps line breaks out of the message
            if name not in known:
                return shown
            inner = unknown_key(value, known[name])
            if inner:
                return f"{shown}.{inner}"
    if isinstance(content, list):
        for number, value in enumerate(content):
            inner = unknown_key(value, known[number])
            if inner:
                return f"{number}.{inner}"
    return ""


def unknown_key_message(path: Path, key: str) -> str:
    """Return the error message for a key that only another version knows."""
    return f"another version of accel_gpt wrote {path}: {key} is an unknown key; update accel_gpt"
