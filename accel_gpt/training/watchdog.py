"""Ends a process that hangs, and says where it hangs."""

import faulthandler
import os
import sys
import threading
import time
from typing import Self

from accel_gpt.errors import duration
from accel_gpt.launcher import rank
from accel_gpt.training.terminal import show_cursor

PEER_FAILED = 70  # EX_SOFTWARE: this or another process failed
LOOKS = 20  # looks at the clock in the time that is allowed


class Watchdog:
    """A thread that writes the stacks of all threads and ends the process after `limit`, as `30m`,
    without a beat; `None`: no watch.

    Where a hanging call holds the interpreter, the thread cannot run: faulthandler, which needs no
    interpreter, then does the same as late again, with exit code 1.
    """

    def __init__(self, limit: str | None) -> None:
        self.limit, self.seconds = limit, duration("train.step_timeout", limit)
        self.last, self.done = time.monotonic(), threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.last = time.monotonic()
        if self.seconds:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()

    def beat(self) -> None:
        """Something was completed."""
        self.last = time.monotonic()

    def watch(self) -> None:
        """Look at the clock until closed, or too late."""
        assert self.seconds
        stderr = sys.__stderr__ or sys.stderr
        while not self.done.wait(self.seconds / LOOKS):
            faulthandler.dump_traceback_later(2 * self.seconds, exit=True, file=stderr)
            if time.monotonic() - self.last > self.seconds:
                self.end()
        faulthandler.cancel_dump_traceback_later()

    def end(self) -> None:
        """Tell where every thread stands, and end the process."""
        stderr = sys.__stderr__ or sys.stderr
        show_cursor()
        stderr.write(
            f"error: process {rank()} completed nothing for {self.limit} "
            "(train.step_timeout); it hangs here, or waits for another one that does:\n"
        )
        faulthandler.dump_traceback(file=stderr, all_threads=True)
        stderr.flush()
        os._exit(PEER_FAILED)
