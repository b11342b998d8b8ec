"""Say what is wrong with a file that an index or a manifest describes.

The same words hold for token shards, checkpoints, copies of checkpoints, and files of others:

    missing      it is listed, but it does not exist
    altered      its size or content is not the listed one
    unreadable   the operating system does not read it now: a `MachineError`, since it may be intact

A file that nothing lists is not ours: it is no damage, and nothing reads it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from accel_gpt.errors import MachineError
from accel_gpt.files import sha256

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Expected:
    """What a file must be. None: anything."""

    path: Path
    size: int | None = None
    """Bytes."""
    digest: str | None = None
    """What `hash_file` returns."""
    hash_file: Callable[[Path], str] = sha256


def find_damage(files: Sequence[Expected]) -> str | None:
    """Return the first damage of `files`, as the begin of a sentence; None if there is none.

    Looks at all sizes before it hashes a file. Raises `MachineError` if a file cannot be read.
    """
    for file in files:
        damage = wrong_size(file)
        if damage:
            return damage
    hashed = [file for file in files if file.digest is not None]
    with ThreadPoolExecutor() as pool:  # hash files in parallel
        return next(filter(None, pool.map(wrong_content, hashed)), None)


def wrong_size(file: Expected) -> str | None:
    """Return the damage if a file is missing or has another size."""
    try:
        size = file.path.stat().st_size
    except OSError as error:
        return damage_of(file.path, error)
    if file.size in (None, size):
        return None
    return f"{file.path} was altered: it has {size:,} bytes, expected {file.size:,}"


def wrong_content(file: Expected) -> str | None:
    """Return the damage if the hash of a file is another one."""
    try:
        digest = file.hash_file(file.path)
    except OSError as error:
        return damage_of(file.path, error)
    if digest == file.digest:
        return None
    begins = f"its SHA-256 begins with {digest[:12]}, expected {str(file.digest)[:12]}"
    return f"{file.path} was altered: {begins}"


def damage_of(path: Path, error: OSError) -> str:
    """Return the damage that an error of reading `path` shows: the file is missing.

    Any other error is no damage: raises a `MachineError` with the reason of the operating system.
    """
    if isinstance(error, MISSING):
        return f"{path} is missing"
    raise MachineError(f"{path} cannot be read: {error.strerror or error}") from None
