"""Write text and tables to the terminal; end a process with one sentence and a code."""

import contextlib
import errno
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import NoReturn

from accel_gpt.errors import AccelGPTError, MachineError, UserError, first_line
from accel_gpt.launcher import SAFE_PATH, is_main, stop_signals
from accel_gpt.own_code import place_in_own_code

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
# of CPU, CUDA and C++, in a `RuntimeError` of torch
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|std::bad_alloc")
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
INTERRUPTED = "interrupted"
FAILURE_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's variable: a file for the error of this process


# --------------------------------------------------------------------------- streams


def printable(text: str) -> str:
    """Escape control characters, so that the text of a model cannot control the terminal."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def prepare_streams() -> None:
    """Redirect standard streams that the caller closed, as with `2>&-`, to /dev/null.

    Otherwise the next opened file gets descriptor 0, 1 or 2, and libraries print into it. Both
    outputs escape what their encoding lacks, as \\u2615.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115 - open to the end
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


def print_line(text: str) -> None:
    """Write a line to standard error on rank 0."""
    if is_main():
        write_err(text)


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


def note_failure(failure: AccelGPTError) -> None:
    """Report why this process fails to torchrun, or to the Python call that started it.

    torchrun prints the reason of the earliest failure last, below its own traceback.
    """
    path = os.environ.get(FAILURE_FILE)
    if path:
        before_others = int(time.time()) - 1  # torchrun dates other failures in whole seconds
        content = {
            "message": f"error: {failure}",
            "timestamp": before_others,
            "class": type(failure).__name__,
        }
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run `main(argv)` and return its exit code.

    A user's mistake, an error in the file of --code, a full disk, or a path that cannot be opened
    becomes one sentence on stderr.
    """
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(argv)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        failure = expected_failure(error)
        if failure is None:
            raise
        rank = os.environ.get("RANK", "0")
        process = "" if rank == "0" else f"[process {rank}] "
        write_err(f"{process}error: {failure}")
        note_failure(failure)
        return failure.exit_code
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


def expected_failure(error: Exception) -> AccelGPTError | None:
    """Return the failure in one sentence that an error stands for; None for a bug of ours."""
    place = place_in_own_code(error)
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, AccelGPTError):
        # a message that does not name the file, of a function of ours that the file calls
        file = place.partition(",")[0] if place else ""
        return error if file in str(error) else type(error)(f"{place}: {error}")
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return MachineError(f"out of memory ({first_line(error)[:200]})")
    if isinstance(error, RuntimeError) and UNUSED in str(error):
        return UserError(
            "a step did not use all parameters of the model in its loss, but DDP waits for the "
            "gradient of each"
        )
    if place is not None:
        return UserError(f"{place}: {type(error).__name__}: {first_line(error)}")
    if number in MACHINE_ERRORS or any(reason in str(error) for reason in MACHINE_REASONS):
        return MachineError(first_line(error))
    if number in PATH_ERRORS:
        return UserError(str(error))
    return None
