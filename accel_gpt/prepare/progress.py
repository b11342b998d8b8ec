"""Bytes done, bytes per second and time left, on stderr."""

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """A bar on a terminal, elsewhere a line at most every 5 s."""

    def __init__(self, verb: str, total: int | None, done: int = 0) -> None:
        self.verb, self.total, self.done, self.before = verb, total, done, done
        self.start = self.shown = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            self.bar = byte_bar()
            self.bar.add_task(self.verb, total=self.total, completed=self.done)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.refresh()
            self.bar.stop()

    def add(self, amount: int) -> None:
        """Count `amount` bytes; they are shown at the next update."""
        self.done += amount
        now = time.monotonic()
        if now - self.shown < (5.0 if self.bar is None else 0.1):
            return
        self.shown = now
        if self.bar is None:
            sys.stderr.write(f"{self.verb}: {self.line(now - self.start)}\n")
        else:
            self.bar.update(self.bar.task_ids[0], completed=self.done, refresh=True)

    def line(self, seconds: float) -> str:
        """MB, MB/s and time left, as far as known."""
        speed = (self.done - self.before) / seconds
        if self.total is None:
            return f"{self.done / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s"
        left = max(0, self.total - self.done) / max(speed, 1.0)
        mb = f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        return f"{mb}, {speed / 1e6:.1f} MB/s, {left:.0f} s left"


def byte_bar() -> "Bar":
    """A bar without a thread, as processes are forked while it is shown."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
    )
