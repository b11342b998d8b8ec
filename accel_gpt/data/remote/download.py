"""One file from a store: resumed where it broke off, tried again after a pause, and checked."""

import hashlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from accel_gpt.data.remote.stores import About, Remote, Unreachable, explained
from accel_gpt.errors import DataError
from accel_gpt.files import LARGEST_TEXT, write_all

T = TypeVar("T")
CHUNK = 1 << 16  # bytes read at once; a TLS record has 2^14
PROGRESS = 1 << 20  # bytes; a try that got this much further is no failure of the server
CORRUPT = 2  # times that a file with a wrong hash is fetched anew


class Patience(NamedTuple):
    """How long to go on; with these six tries a fault of half a minute is outlasted."""

    tries: int = 6
    first_pause: float = 1.0
    """Seconds; doubled after each try."""
    longest_pause: float = 30.0
    """Seconds, also of what the server asks for."""
    timeout: float = 60.0
    """Seconds without a byte."""
    room: float = 60.0
    """Seconds that a shard is waited for which has no room in the cache."""

    def pause(self, tries: int, asked: float) -> float:
        """Seconds before the next try, random so that many processes do not come at once."""
        longest = min(self.longest_pause, self.first_pause * 2.0 ** (tries - 1))
        return max(min(asked, self.longest_pause), longest * random.uniform(0.5, 1))


def insist(
    call: Callable[[], T], what: str, patience: Patience, wait: Callable[[float], None]
) -> T:
    """The result of `call`, tried again while it is `Unreachable`; `DataError` in the end."""
    tries = 0
    while True:
        try:
            return call()
        except Unreachable as error:
            tries += 1
            give_up(tries, what, patience, error)
            wait(patience.pause(tries, error.wait))


def give_up(tries: int, what: str, patience: Patience, error: Unreachable) -> None:
    """`DataError` after the last try."""
    if tries >= patience.tries:
        raise DataError(
            f"{what} could not be fetched in {tries} tries: {error}; check the network and launch "
            "again"
        ) from None


class Received:
    """The bytes of a file that are here, and their hash; what was there before is read again."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.count, self.hash = file, 0, hashlib.sha256()
        while data := file.read(1 << 20):
            self.hash.update(data)
            self.count += len(data)

    def add(self, data: bytes) -> None:
        """Append to the file."""
        write_all(self.file, memoryview(data))
        self.hash.update(data)
        self.count += len(data)

    def restart(self) -> None:
        """Forget everything."""
        self.file.seek(0)
        self.file.truncate(0)
        self.count, self.hash = 0, hashlib.sha256()


def download(
    remote: Remote,
    name: str,
    part: Path,
    about: About,
    patience: Patience,
    wait: Callable[[float], None],
) -> str:
    """Complete the file `part`, which must exist; its SHA-256 (hex), equal to `about`'s.

    `wait` sleeps, and may raise to end the transfer. Raises `UserError` where the file may not be
    had, `DataError` where it never came right; an `OSError` is one of the local disk.
    """
    what = f"{remote.shown}/{name}"
    tries = corrupt = best = 0
    with part.open("r+b", buffering=0) as file:
        got = Received(file)
        while True:
            try:
                receive(remote, name, got, about.size, wait)
            except Unreachable as error:
                tries = tries + 1 if got.count < best + PROGRESS else 1
                best = max(best, got.count)
                give_up(tries, what, patience, error)
                wait(patience.pause(tries, error.wait))
                continue
            sha256 = got.hash.hexdigest()
            if got.count == (about.size or got.count) and about.sha256 in (None, sha256):
                return sha256
            corrupt += 1
            if corrupt > CORRUPT:
                raise DataError(
                    f"{what} came {corrupt} times with {got.count} bytes of SHA-256 {sha256}, "
                    f"expected {about.size} of {about.sha256}; it was changed: upload it again"
                )
            got.restart()


def receive(
    remote: Remote, name: str, got: Received, size: int | None, wait: Callable[[float], None]
) -> None:
    """Read on to the end, or beyond `size`; `Unreachable` where the answer breaks off."""
    if size is not None and got.count == size:
        return
    with explained(remote, name):
        opened = remote.open(name, got.count)
    try:
        if opened.begins != got.count:
            got.restart()
        if opened.begins not in (0, got.count):
            raise Unreachable(f"the answer begins at byte {opened.begins}")
        while size is None or got.count <= size:
            wait(0)
            with explained(remote, name):
                data = opened.read(CHUNK)
            if not data:
                break
            got.add(data)
            if size is None and got.count > LARGEST_TEXT:
                got.restart()
                raise DataError(
                    f"{remote.shown}/{name} goes on after {LARGEST_TEXT:,} bytes, and its server "
                    "does not tell its size; serve the folder with Content-Length"
                )
    finally:
        opened.close()
    if size is not None and got.count < size:
        raise Unreachable(f"it broke off after {got.count} of {size} bytes")
