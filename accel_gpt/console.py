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
from typing import TextIO

from accel_gpt.errors import AccelGPTError, UserError, first_line
from accel_gpt.redact import redact

# all but tabs and ends of lines; bytes that are no UTF-8; what turns the direction of text around
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff\u2028-\u202e\u2066-\u2069]|\r(?!\n)"
)
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")  # on a CPU; on CUDA
# of a path that a user gave: not to be opened, too long, below a file
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR)
SHORTEST_PACE_SECONDS = 1.0  # a time left is estimated from no less; assumption
LONGEST_SENTENCE = 1500  # characters of an error that are printed


def printable(text: str) -> str:
    """`text` without what steers a terminal, as a name in a file of others or a sample could."""
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


def visible(text: str, out: TextIO) -> str:
    """`text` as it may be written to `out`: a terminal would obey control characters."""
    return printable(text) if out.isatty() else text


def write_out(text: str) -> None:
    """Write to standard output; control characters of a model or a file never to a terminal."""
    sys.stdout.write(visible(text, sys.stdout))


def write_err(text: str) -> None:
    """Write a line to standard error, beside the output."""
    sys.stderr.write(visible(f"{text}\n", sys.stderr))


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
        text = redact(printable(str(error)))
        if len(text) > LONGEST_SENTENCE:  # a value out of a file
            text = f"{text[: LONGEST_SENTENCE // 2]} [...] {text[-LONGEST_SENTENCE // 2 :]}"
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {text}\n")
        note_failure(f"error: {text}")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:  # torch raises the second where malloc fails
        if isinstance(error, RuntimeError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        sys.stderr.write(
            f"error: out of memory ({printable(first_line(error))[-120:]}); lower the model's "
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
        sys.stderr.write(f"error: {redact(printable(str(error)))}{advice}\n")
        return UserError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
