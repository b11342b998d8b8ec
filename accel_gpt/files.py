"""Reading and writing files: whole or not at all, bounded, locked; fault points for tests.

Files that others may have written hold plain values or raise `ValueError`: nothing in them is run
or looked up, no Python tags, no environment variables.

    ACCEL_GPT_FAULT="manifest.written=kill"     at the fault point of that name, the first time
    ACCEL_GPT_FAULT="*:17=half"                 at the 17th fault point of the writer, any name
    ACCEL_GPT_FAULT_LOG=points.txt              append the name of each fault point, one a line

Actions: kill; half (truncate the current file to half, then kill); enospc and eio (the `OSError` of
a full and of a broken disk); sleep (2 s); hang. `NAME:N+=ACTION` acts from the N-th time on.
`step`, a training step, counts by its name only: its order relative to the writer varies.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

LARGEST_TEXT = 1 << 28  # bytes of a text file; a tokenizer.json has up to 40 MB
LARGEST_NUMBER = 2**53  # integers up to here are exact in JSON and in 64 bits
YAML_VALUES = 100_000  # of one YAML text, aliases counted as what they stand for; assumption
SLEEP_SECONDS, HANG_SECONDS = 2.0, 3600.0  # of the fault actions


# --------------------------------------------------------------------------- writing


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    """Write a file completely or not at all. Returns its SHA-256 in hex."""
    temporary = path.with_name(f"{path.name}.tmp")
    hasher = hashlib.sha256()
    with temporary.open("wb", buffering=0) as file:
        for part in parts:
            hasher.update(part)
            write_all(file, memoryview(part).cast("B"))
        os.fsync(file.fileno())
    temporary.rename(path)
    return hasher.hexdigest()


def strict_json(value: Any, indent: int | None = None) -> str:
    """Write JSON. A number that is not finite becomes null: JSON has no NaN and no infinity."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def without_nan(value: Any) -> Any:
    """Copy a value of lists and mappings, with None for each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`; one system call writes at most 2 GB."""
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except OSError as error:
        error.filename = str(file.name)  # Python sets it for `open` only
        raise


def sha256(path: Path) -> str:
    """Hash a file. Returns hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_tree(folder: Path, to: Path) -> None:
    """Copy a folder, by hard links where the file system has them."""
    shutil.copytree(folder, to, copy_function=link)


def link(source: str, target: str) -> None:
    """Copy a file, by a hard link where the file system has them."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def lock(path: Path, wait: bool = True, shared: bool = False, notice: str = "") -> TextIO:
    """Lock the file `path`, created if missing unless `shared`; closing what is returned unlocks.

    The kernel unlocks it too when the process ends. Where another process holds it: prints `notice`
    on stderr and waits, or raises `BlockingIOError` if not `wait`. Who held it may have removed the
    file (see `locked_file`): then what was locked has no name, and it is opened anew.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK if shared else os.O_RDWR | os.O_CREAT
    file = os.fdopen(os.open(path, flags, 0o644), "r" if shared else "r+", encoding="utf-8")
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            sys.stderr.write(notice)
            fcntl.flock(file, kind)
    except BaseException:
        file.close()
        raise
    if shared or is_at(file, path):
        return file
    file.close()
    return lock(path, wait, shared, notice)


@contextmanager
def locked_file(path: Path, wait: bool = True, notice: str = "") -> Iterator[TextIO]:
    """Hold the lock of `path`, and remove the file before it is unlocked."""
    with lock(path, wait, notice=notice) as file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                if is_at(file, path):
                    path.unlink()


def is_at(file: TextIO, path: Path) -> bool:
    """Whether `path` names the open `file`, and no other or none."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


# --------------------------------------------------------------------------- reading


def describe_path(path: str | Path) -> str:
    """Say what a path is, as the end of a sentence: is a file, is a folder, does not exist."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return "does not exist"
    kinds = (
        (stat.S_ISREG, "is a file"),
        (stat.S_ISDIR, "is a folder"),
        (stat.S_ISFIFO, "is a named pipe"),
        (stat.S_ISSOCK, "is a socket"),
    )
    return next((words for is_kind, words in kinds if is_kind(mode)), "is a device")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; `OSError` for any other: reading a pipe may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: str | Path, largest: int = LARGEST_TEXT) -> str:
    """Read a UTF-8 text of at most `largest` bytes; raises `OSError` or `ValueError`."""
    with open_file(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content.decode("utf-8")


def read_json(path: str | Path, any_number: bool = False, largest: int = LARGEST_TEXT) -> Any:
    """Read a JSON file, see `load_json`; raises `OSError` or `ValueError`."""
    return load_json(read_text(path, largest), any_number)


def load_json(text: str, any_number: bool = False) -> Any:
    """Parse JSON; raises `ValueError`, also for deep nesting and integers beyond 64 bits.

    `any_number` accepts integers of any size.
    """
    try:
        return json.loads(text, parse_int=int if any_number else whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_number(text: str) -> int:
    """Parse decimal digits as an integer of at most 64 bits; raises `ValueError`."""
    if len(text) <= 18:  # the JSON parser found digits: most numbers of a vocabulary
        return int(text)
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        raise ValueError(f"{text[:40]!r} is no whole number of at most 19 digits")
    return int(text)


def is_count(value: object, least: int = 0) -> bool:
    """Whether a value out of a file is an integer from `least` to `LARGEST_NUMBER`."""
    return type(value) is int and least <= value <= LARGEST_NUMBER


def load_yaml(text: str) -> Any:
    """Parse YAML; raises `ValueError` with the line and the problem.

    A few lines of aliases of aliases can stand for more values than any memory holds, so the values
    are counted before they are built.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if expanded_size(node, {}) > YAML_VALUES:
            raise ValueError(f"it stands for more than {YAML_VALUES:,} values")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or 'not YAML'}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (KeyError, AttributeError, TypeError, OverflowError) as error:  # !!bool x, !!timestamp x
        raise ValueError(f"a value is not what its tag says ({error})") from None


def expanded_size(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values that a node stands for; `ValueError` where it contains itself, or a mapping
    has a key twice, of which YAML's loader would drop the first.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)] if pairs else []
        for i, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:i]):
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value} stands there twice")
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(expanded_size(part, known) for part in parts)
    if known[id(node)] == 0:
        raise ValueError("a part of it holds itself")
    return known[id(node)]


# --------------------------------------------------------------------------- faults, for tests


def fault_point(name: str, path: Path | None = None) -> None:
    """Fail here, with the file `path`, if the environment asks for it; see the module."""
    requested, log = os.environ.get("ACCEL_GPT_FAULT"), os.environ.get("ACCEL_GPT_FAULT_LOG")
    if log and name != "step":
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if not requested:
        return
    where, _, action = requested.partition("=")
    wanted, _, number = where.partition(":")
    if wanted != name and not (wanted == "*" and name != "step"):
        return
    counts = fault_counts()
    counts[wanted] += 1
    first, again = int(number.rstrip("+") or 1), number.endswith("+")
    if counts[wanted] == first or (again and counts[wanted] > first):
        fail(action, name, path)


@cache
def fault_counts() -> Counter[str]:
    """How often this process reached each requested fault point."""
    return Counter()


def fail(action: str, name: str, path: Path | None) -> None:
    """Carry out the action of a fault."""
    if action == "half" and path is not None and path.is_file():
        os.truncate(path, path.stat().st_size // 2)
    if action in ("kill", "half"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), str(path or name))
    time.sleep(HANG_SECONDS if action == "hang" else SLEEP_SECONDS)
