"""Read, write and lock files; fault points for tests.

    ACCEL_GPT_FAULT="manifest.written=kill"     at the fault point of that name, the first time
    ACCEL_GPT_FAULT="*:17=half"                 at the 17th fault point of the writer, any name
    ACCEL_GPT_FAULT_LOG=points.txt              append the name of each fault point, one a line

Actions: kill; half (truncate the current file to half, then kill); enospc and eio (`OSError` as on
a full or broken disk); sleep (2 s); hang. `NAME:N+=ACTION` acts from the N-th time on.
`*` and the log leave out `step`, `evaluation` (a batch) and `sample` (a token): their order
relative to the writer varies.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import yaml

from accel_gpt.errors import MachineError

LOCAL_STARTS = ("/", "./", "../", "~", "runs/")  # of paths; the configs put runs into runs/
TOKEN_ENDINGS = (".bin", ".npy", ".ds")  # of token files
# flock's errors if a file system has no locks: Lustre, Drive, some NFS; 524: ENOTSUPP of Linux
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, 524)
REFUSALS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no room, or no right to write
TRY_AGAIN = frozenset((408, 425, 429))  # of the statuses of HTTP below 500
PAUSES = (0.5, 1.5)  # seconds before another try; assumption
LARGEST_NUMBER = 2**53  # integers up to here are exact in JSON and in 64 bits
BESIDE_WRITER = ("step", "evaluation", "sample")  # fault points of the training thread
SLEEP_SECONDS = 2.0  # of the fault action sleep
HANG_SECONDS = 3600.0  # of the fault action hang


# --------------------------------------------------------------------------- writing


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    """Write a file completely or not at all; return its SHA-256 in hex."""
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
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`; one system call writes at most 2 GB."""
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except OSError as error:
        error.filename = str(file.name)  # Python sets it for `open` only
        raise


def append_all_or_nothing(path: Path, content: bytes) -> None:
    """Append to a file; if the write fails, restore the file's former length."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            write_all(file, memoryview(content))
        except OSError:
            file.truncate(before)
            raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache; raises `MachineError` without one."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise MachineError(f"{error} Set HOME or XDG_CACHE_HOME.") from None
    return home / "accel_gpt"


def link_tree(folder: Path, to: Path) -> None:
    """Copy a folder, with hard links if the file system supports them."""
    shutil.copytree(folder, to, copy_function=link)


def link(source: str, target: str) -> None:
    """Copy a file, as a hard link if the file system supports it."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def locked_file(path: Path, wait: bool = True, notice: str = "") -> Iterator[TextIO]:
    """Hold the lock of `path`, and yield the file, which is made if it is missing.

    Removes the file before it is unlocked. The kernel releases the lock when the process ends. If
    another process holds the lock, prints `notice` on stderr and waits. If not `wait`, raises
    `BlockingIOError` instead. If the file system has no flock, nothing is locked.
    """
    with acquire_lock(path, wait, notice):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        file = os.fdopen(descriptor, "r+", encoding="utf-8")
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                if is_at(file, path):
                    path.unlink()
            file.close()


def acquire_lock(path: Path, wait: bool, notice: str) -> AbstractContextManager[object]:
    """Acquire the lock of `path`; return the context that releases it. See `locked_file`."""
    from filelock import Timeout, UnixFileLock

    lock = UnixFileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from None
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return contextlib.nullcontext()
    sys.stderr.write(notice)
    return lock.acquire()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of `path`; see `locked_file`."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_at(file: TextIO, path: Path) -> bool:
    """Return whether `path` still names the open `file`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


# --------------------------------------------------------------------------- reading


def is_url(path: str) -> bool:
    """Return whether `path` is a URL (scheme://...) and not a folder of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def read_url(url: str) -> bytes:
    """Read a small file behind a URL of fsspec. Raises whatever its file system raises."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return bytes(Patient(system).cat_file(path))


class Patient:
    """A file system of fsspec. A call that fails in a way that may pass is repeated.

    Its client repeats some failures, but not a connection that breaks at certain moments.
    """

    def __init__(self, system: Any) -> None:
        self.system = system

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the file system."""
        method = getattr(self.system, name)

        def call(*arguments: Any, **options: Any) -> Any:
            for pause in PAUSES:
                try:
                    return method(*arguments, **options)
                except Exception as error:
                    if not may_pass(error):
                        raise
                    time.sleep(pause)
            return method(*arguments, **options)

        return call


def may_pass(error: Exception) -> bool:
    """Return whether a failure of a file system may be gone at the next try."""
    if isinstance(error, OSError) and error.errno in LASTING:
        return False
    if isinstance(error, REFUSALS):
        return False
    return not is_refusal(http_status(error))


def http_status(error: Exception) -> int:
    """Return the status of the answer that an error tells; 0 if there was no answer."""
    answer = getattr(error, "response", error)  # of httpx; aiohttp: the error itself
    status: int = getattr(answer, "status_code", getattr(answer, "status", 0))
    return status


def is_refusal(status: int) -> bool:
    """Return whether a status of HTTP refuses a request for good."""
    return 400 <= status < 500 and status not in TRY_AGAIN


def is_local(name: str) -> bool:
    """Return whether a name that is no file or folder is still a path, not a Hub id user/name.

    It is a path if it begins like one, or if the folder in which it would lie exists.
    """
    parent = os.path.dirname(name.rstrip("/"))
    return name.startswith(LOCAL_STARTS) or (parent != "" and os.path.isdir(parent))


def read_json(path: str | Path) -> Any:
    """Read a JSON file; raises `OSError` or `ValueError`."""
    return json.loads(Path(path).read_bytes().decode())


class UniqueKeyLoader(yaml.SafeLoader):
    """Load YAML without executing code; a duplicate key in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping. The base class would keep only the last of two equal keys."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Parse YAML; raises `ValueError` with the line and the problem."""
    try:
        return UniqueKeyLoader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ValueError(f"{line}{problem}") from None


# --------------------------------------------------------------------------- faults, for tests


def fault_point(name: str, path: Path | None = None) -> None:
    """Inject a fault here if the environment requests it; see the module. `path`: current file."""
    requested = os.environ.get("ACCEL_GPT_FAULT")
    log = os.environ.get("ACCEL_GPT_FAULT_LOG")
    if log and name not in BESIDE_WRITER:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if not requested:
        return
    where, _, action = requested.partition("=")
    wanted, _, number = where.partition(":")
    if wanted != name and not (wanted == "*" and name not in BESIDE_WRITER):
        return
    counts = fault_counts()
    counts[wanted] += 1
    first = int(number.rstrip("+") or 1)
    is_due = counts[wanted] == first
    if number.endswith("+"):
        is_due = counts[wanted] >= first
    if is_due:
        fail(action, name, path)


@cache
def fault_counts() -> Counter[str]:
    """Return how often this process reached each requested fault point."""
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
