"""A terminal for tests: run a program in it, and read the screen as a person would."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

# a program gets Ctrl-C only from its controlling terminal
CONTROL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
CONTROL += "os.execvp(sys.argv[1], sys.argv[1:])"
# variables that rich obeys
PLAIN = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE")


class Terminal:
    """A pseudo-terminal of a given size with one program in it."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        cwd: Path | None = None,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self.master)
        kept = {key: value for key, value in os.environ.items() if key not in PLAIN}
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", CONTROL, *command], stdin=slave, stdout=slave,
            stderr=slave, cwd=cwd, start_new_session=True,
            env={**kept, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)
        self.written = b""
        self.open = True
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(10)
        if self.open:
            os.close(self.master)

    def hang_up(self) -> None:
        """Close the terminal, as the end of an ssh session does."""
        self.open = False
        self.reader.join(10)
        os.close(self.master)

    def read(self) -> None:
        """Collect all output."""
        while self.open:
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                part = os.read(self.master, 65536)
            except OSError:  # the last writer has ended
                return
            self.written += part

    def resize(self, columns: int, rows: int) -> None:
        """Resize the window."""
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        """Send text as typed on the keyboard."""
        os.write(self.master, key)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until the program has written `text`."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self.written:
            assert time.monotonic() < deadline, self.written
            assert self.process.poll() is None, self.written
            time.sleep(0.02)

    def finish(self, seconds: float = 60) -> int:
        """Read all output; return the exit code."""
        code = self.process.wait(seconds)
        self.reader.join(10)
        return code

    def screen(self) -> Any:
        """Return the screen and the lines that scrolled out above it."""
        import pyte

        screen = pyte.HistoryScreen(self.columns, self.rows, history=1000, ratio=1.0)
        pyte.ByteStream(screen).feed(self.written)
        return screen

    def lines(self) -> list[str]:
        """Return the lines of the screen that are not empty."""
        return [line.rstrip() for line in self.screen().display if line.strip()]


def in_python(code: str) -> list[str]:
    """Return the command that runs `code`."""
    return [sys.executable, "-c", code]
