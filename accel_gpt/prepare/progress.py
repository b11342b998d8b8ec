"""Bytes done, bytes per second and time left, on stderr."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accel_gpt.console import ProgressLine

TICK = 1.0  # seconds


class Progress:
    """One line that is renewed on a terminal; elsewhere a line at most every 5 s."""

    def __init__(self, verb: str, total: int | None, done: int = 0) -> None:
        self.verb, self.total, self.done, self.before = verb, total, done, done
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal and self.shown > self.start:
            sys.stderr.write("\n")

    def add(self, amount: int) -> None:
        """Count `amount` bytes; they are shown at the next update."""
        self.done += amount
        now = time.monotonic()
        if now - self.shown < (0.1 if self.terminal else 5.0):
            return
        self.shown = now
        speed, total, left = (self.done - self.before) / (now - self.start), "", ""
        if self.total is not None:
            total = f" of {self.total / 1e6:.1f}"
            left = f", {max(0, self.total - self.done) / max(speed, 1.0):.0f} s left"
        line = f"{self.verb}: {self.done / 1e6:.1f}{total} MB, {speed / 1e6:.1f} MB/s{left}"
        sys.stderr.write(f"\r{line}\x1b[K" if self.terminal else f"{line}\n")
        sys.stderr.flush()


@contextmanager
def ticking(describe: Callable[[], str]) -> Iterator[None]:
    """Show what `describe` returns, and the seconds, while a library works that shows nothing."""
    line, start, done = ProgressLine(), time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(TICK):
            line.show(f"{describe()}, {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.clear()
