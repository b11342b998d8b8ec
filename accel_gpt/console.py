"""Write text and tables to the terminal; end a process with one sentence and a code."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from accel_gpt.errors import AccelGPTError, MachineError, UserError, first_line
from accel_gpt.launcher import SAFE_PATH, stop_signals
from accel_gpt.own_code import place_in_own_code

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
# of CPU, CUDA and C++, in a `RuntimeError` of torch
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|std::bad_alloc")
PLACE_IN_TORCH = re.compile(r"^\[enforce fail at .*?(?=DefaultCPUAllocator)")  # before the reason
UNUSED = "find_unused_parameters"  # in the message of DDP
# errors of a path that the user gave: no permission, a folder, too long, its parent is a file,
# read-only
PATH_ERRORS = (
    errno.EACCES,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
# errors of the machine and of its limits, in an `OSError` or in the message of a library
MACHINE_ERRORS = (
    errno.EAGAIN,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOLCK,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.ESTALE,
)
MACHINE_REASONS = (*(os.strerror(number) for number in MACHINE_ERRORS), "can't start new thread")
SHARED_MEMORY = "/dev/shm"  # where libraries share memory between processes
INTERRUPTED = "interrupted"
FAILURE_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's variable: a file for the error of this process


# --------------------------------------------------------------------------- streams


def printable(text: str) -> str:
    """Escape control characters, so that the text of a model cannot control the terminal."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def open_closed_streams() -> None:
    """Redirect standard streams that the caller closed, as with `2>&-`, to /dev/null.

    Otherwise the next opened file gets descriptor 0, 1 or 2, and libraries print into it.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115 - open to the end


def escape_what_cannot_be_encoded() -> None:
    """Make the standard streams escape what their encoding lacks, as \\u2615."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_out(text: str) -> None:
    """Write to standard output; on a terminal, control characters are escaped."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)


def write_err(text: str) -> None:
    """Write a line to standard error, unless the terminal is gone or the disk of a log is full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


# --------------------------------------------------------------------------- tables and numbers


def table(rows: Sequence[Sequence[str]], *columns: str, gap: int = 2) -> str:
    """Format `rows` of cells as lines; an empty row is an empty line.

    Each of `columns` holds an alignment, `<` or `>`, and a minimum width: `<12`.
    """
    specs = []
    for number, column in enumerate(columns):
        width = int(column[1:] or 0)
        for row in rows:
            if row:
                width = max(width, len(row[number]))
        specs.append(f"{column[0]}{width}")
    text = ""
    for row in rows:
        cells = [f"{cell:{spec}}" for cell, spec in zip(row, specs, strict=bool(row))]
        text += (" " * gap).join(cells).rstrip() + "\n"
    return text


def format_clock(seconds: float) -> str:
    """Format a time as `0:03:20` or `2 days, 1:00:00`."""
    longest = timedelta.max.days * 86_400  # `timedelta` overflows beyond
    return str(timedelta(seconds=round(min(seconds, longest))))


def format_hours(hours: float) -> str:
    """Format a time as `40 s`, `25 min`, `2 h 10 min` or `3.4 days`."""
    minutes = round(60 * hours)
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if minutes < 2:
        return f"{3600 * hours:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


# --------------------------------------------------------------------------- the end of a process


def exit_while_importing() -> None:
    """Let Ctrl-C end this process with one sentence until `run_main` starts."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore it
        signal.signal(signal.SIGINT, exit_at_once)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal before any work has started."""
    os.write(2, INTERRUPTED.encode() + b"\n")
    os._exit(128 + number)


def install_exit_handlers() -> None:
    """Raise `SystemExit` on each of `stop_signals()` but SIGINT, so temporary files are removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            if number != signal.SIGINT:  # raises KeyboardInterrupt
                signal.signal(number, leave)


def note_failure(text: str, kind: str) -> None:
    """Report why this process fails to torchrun, or to the Python call that started it.

    torchrun prints the reason of the earliest failure last, below its own traceback. `kind`: the
    class of the error in accel_gpt/errors.py.
    """
    path = os.environ.get(FAILURE_FILE)
    if path:
        before_others = int(time.time()) - 1  # torchrun dates other failures in whole seconds
        failure = {"message": text, "timestamp": before_others, "class": kind}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(failure, file)


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run `main(argv)` and return its exit code.

    A user's mistake, an error in the file of --code, a full disk, or a path that cannot be opened
    becomes one sentence on stderr.
    """
    open_closed_streams()
    escape_what_cannot_be_encoded()
    if signal.getsignal(signal.SIGINT) is exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(argv)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        text = describe_failure(error)
        if text is None:
            raise
        rank = os.environ.get("RANK", "0")
        process = "" if rank == "0" else f"[process {rank}] "
        write_err(f"{process}error: {text}")
        kind: type[AccelGPTError] = MachineError if is_of_machine(error) else UserError
        if isinstance(error, AccelGPTError):
            kind = type(error)
        note_failure(f"error: {text}", kind.__name__)
        return kind.exit_code
    except SystemExit as error:
        place = place_in_own_code(error)
        if place is None or error.code:  # a signal also ends a process so
            raise
        write_err(
            f"error: {place}: sys.exit() would look like a finished run; raise an error, or to "
            "save and stop call signal.raise_signal(signal.SIGINT)"
        )
        return UserError.exit_code
    except KeyboardInterrupt:
        write_err(INTERRUPTED)
        return 130


def run_process(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run `main` with the arguments of this process, and end the process with its exit code.

    Libraries start Python processes too, as multiprocessing does. None of them imports a file of
    the working folder.
    """
    os.environ[SAFE_PATH] = "1"
    sys.exit(run_main(main, sys.argv[1:]))


def raised_by_us(error: BaseException) -> bool:
    """Return whether a module of this package raised an error."""
    trace = error.__traceback__
    name = ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
    return name.startswith("accel_gpt.")


def describe_failure(error: Exception) -> str | None:
    """Return a sentence for an error that a user can mend; None for any other error."""
    place = place_in_own_code(error)
    if isinstance(error, AccelGPTError):
        # a message that does not name the file, of a function of ours that the file calls
        file = place.partition(",")[0] if place else ""
        return f"{place}: {error}" if file not in str(error) else str(error)
    if is_out_of_memory(error):
        reason = PLACE_IN_TORCH.sub("", first_line(error))[:200]
        return (
            f"out of memory ({reason}); lower the model's size, train.micro_batch_size or "
            "sample.num; accel-gpt plan shows the memory they need"
        )
    if isinstance(error, RuntimeError) and UNUSED in str(error):
        return (
            "a step did not use all parameters of the model in its loss, but DDP waits for the "
            "gradient of each; use all of them in each step, or remove those that no step uses"
        )
    if place is not None and not (isinstance(error, AssertionError) and raised_by_us(error)):
        return f"{place}: {type(error).__name__}: {first_line(error)}"
    if is_of_machine(error):
        return f"{first_line(error)}{room_or_limit(error)}"
    if isinstance(error, OSError) and error.errno in PATH_ERRORS:
        return str(error)
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory could not be allocated. torch raises a `RuntimeError` then."""
    found = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return isinstance(error, MemoryError) or bool(found)


def is_of_machine(error: Exception) -> bool:
    """Return whether the machine lacks something, or a limit of the process is reached.

    An error in the file of --code is not: its place says more.
    """
    if is_out_of_memory(error):
        return True
    if place_in_own_code(error) is not None:
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in MACHINE_ERRORS
    return any(reason in str(error) for reason in MACHINE_REASONS)


def room_or_limit(error: Exception) -> str:
    """Return the free room or the limit that an error of the machine is about; "" for others."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f" (ulimit -n allows {limit:,})"
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return f" (ulimit -f allows {limit:,} bytes)"
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    path = Path(getattr(error, "filename", None) or SHARED_MEMORY)  # an error of it has no name
    return f" ({free_room(path)})"


def free_room(path: Path) -> str:
    """Return the free room on the disk of a path, as `1,024 bytes and 7 inodes are free in /x`."""
    path = Path(os.path.abspath(path))
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return f"{free:,} bytes and {disk.f_favail:,} inodes are free in {folder}"
