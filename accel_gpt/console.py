"""What a process writes to its terminal, and how it ends: one sentence and an exit code."""

import contextlib
import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from accel_gpt.errors import AccelGPTError, UserError, first_line

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")  # on a CPU; on CUDA
# of a path that a user gave: not to be opened, too long, below a file
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR)
SHORTEST_PACE_SECONDS = 1.0  # a time left is estimated from no less; assumption


def printable(text: str) -> str:
    """Escape control characters in the text of a model: a terminal obeys them."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def open_closed_streams() -> None:
    """Let streams that the caller closed, as `2>&-`, lead nowhere: the next file that is opened
    would get the number of one, and with it what libraries write there.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def write_out(text: str) -> None:
    """Write to standard output; the control characters of a model not to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)


def write_err(text: str) -> None:
    """Write a line to standard error, beside the output."""
    sys.stderr.write(f"{text}\n")


class ProgressLine:
    """What is being done, on stderr: a line that is renewed on a terminal; elsewhere a line when
    10 s have passed without one.
    """

    def __init__(self, terminal: bool | None = None) -> None:
        self.terminal = sys.stderr.isatty() if terminal is None else terminal
        self.shown, self.drawn = time.monotonic(), False

    def show(self, text: str) -> None:
        """Print `text`, unless a line was printed just before."""
        now = time.monotonic()
        if now - self.shown >= (0.2 if self.terminal else 10.0):
            self.shown, self.drawn = now, True
            sys.stderr.write(f"\r{text}\x1b[K" if self.terminal else f"{text}\n")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line from the terminal."""
        if self.terminal and self.drawn:
            sys.stderr.write("\r\x1b[K")
        self.shown, self.drawn = time.monotonic(), False


class EvaluationProgress:
    """Says how far an evaluation is, and how long the rest of its batches takes."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def words(self, done: int, total: int) -> str:
        """Return how far the evaluation is; call before each batch."""
        if done == 0:
            self.started = time.monotonic()
        text = f"evaluating: batch {done:,} of {total:,}"
        spent = time.monotonic() - self.started
        if done == 0 or spent < SHORTEST_PACE_SECONDS:
            return text
        left = round(spent / done * (total - done))
        return f"{text}, left {timedelta(seconds=left)}"


def table(rows: Sequence[Sequence[str]], *columns: str, gap: int = 2) -> str:
    """Format `rows` of cells as lines; an empty row is an empty line.

    Each of `columns` is `<` or `>`, its alignment, and a minimum width: `<12`.
    """
    widths = [
        max(int(column[1:] or 0), *(len(row[i]) for row in rows if row))
        for i, column in enumerate(columns)
    ]
    specs = [f"{column[0]}{width}" for column, width in zip(columns, widths, strict=True)]
    lines = (
        (" " * gap).join(f"{cell:{spec}}" for cell, spec in zip(row, specs, strict=True)).rstrip()
        if row
        else ""
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


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


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process as an error does, so that temporary files are removed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def note_failure(text: str) -> None:
    """Give torch's launcher the reason for which this process ends: it prints that of the earliest
    failure last, below its own traceback.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        before_others = int(time.time()) - 1  # the launcher dates in seconds those without a reason
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": text, "timestamp": before_others}, file)


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`; a user's mistake, a full disk, or a path that cannot be opened
    becomes one sentence on stderr.
    """
    rank = os.environ.get("RANK", "0")
    open_closed_streams()
    try:
        return main(argv)
    except AccelGPTError as error:
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {error}\n")
        note_failure(f"error: {error}")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:  # torch raises the second where malloc fails
        if isinstance(error, RuntimeError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        sys.stderr.write(
            f"error: out of memory ({first_line(error)[-120:]}); lower the model's "
            "size, train.micro_batch_size or sample.num: accel-gpt plan shows what they take\n"
        )
        return UserError.exit_code
    except BrokenPipeError:  # whoever read our output has enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and error.errno not in PATH_ERRORS:
            raise
        advice = "; make room and launch again" if full else ""
        sys.stderr.write(f"error: {error}{advice}\n")
        return UserError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
