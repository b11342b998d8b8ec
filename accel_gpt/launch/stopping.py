"""Stop a run before its end: on signals, a dead launcher, or a hang.

`StopSignal` stores the reason. `agree_to_stop` shares it with all ranks after each step.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from accel_gpt.config.options import duration
from accel_gpt.console import write_err
from accel_gpt.launcher import (
    PREEMPTED,
    SIGNALS,
    is_main,
    rank,
    stop_signals,
    stops_with_parent,
    world_size,
)
from accel_gpt.training.display import show_cursor

# The terminal and the launcher each deliver the same Ctrl-C, at most so far apart; assumption
SAME_PRESS_SECONDS = 2.0
PEER_FAILED = 70  # EX_SOFTWARE: this or another process failed
REASONS = ("", *(number.name for number in SIGNALS))
TICKS = 20  # of the watchdog within its limit
LISTENER_SECONDS = 5.0  # for the thread that receives signals; assumption
LEAVE_SECONDS = 2.0  # for the training thread to remove temporary files; assumption


class StopRequested(Exception):
    """Raised on all ranks together during an evaluation or samples: the run must save and stop."""


class SignalListener:
    """Calls `handle` in the main thread and `receive` in a thread of its own for each stop signal.

    The main thread may wait in a collective, where Python calls no handler.
    """

    def __init__(self, handle: Callable[[int], None], receive: Callable[[int], None]) -> None:
        self.handle_in_main = handle
        self.receive = receive
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.thread = threading.Thread(target=self.listen, name="signals", daemon=True)
        self.thread.start()
        self.wakeup = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        self.handlers = {number: signal.signal(number, self.handle) for number in stop_signals()}
        restore_signals_in_forks()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        self.handle_in_main(number)

    def listen(self) -> None:
        """Call `receive` for each signal; run by the thread."""
        with self.receiver:
            while received := self.receiver.recv(64):
                for number in received:
                    if number in SIGNALS:
                        self.receive(number)

    def close(self, ignore: bool = False) -> None:
        """End the thread; restore the handlers before, or ignore the signals from now on."""
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        for number, handler in self.handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)
        self.sender.close()  # ends the thread
        self.thread.join()


@cache
def restore_signals_in_forks() -> None:
    """Restore the default handlers in each process that this one forks; once for all listeners."""

    def restore() -> None:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(getattr(handler, "__self__", None), SignalListener):
                signal.set_wakeup_fd(-1)
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


@contextlib.contextmanager
def exiting_on_signals(exit_code: int | None = None) -> Iterator[None]:
    """Leave the block by `SystemExit` on a signal, and print the signal on rank 0.

    If this process waits in a collective for another rank, the process ends after `LEAVE_SECONDS`.
    `exit_code` None: 128 and the number of the signal; then SIGINT raises `KeyboardInterrupt`.
    """
    left = threading.Event()
    waits_for_others = world_size() > 1

    def tell(number: int) -> int:
        if is_main():
            write_err(f"{signal.Signals(number).name}: stopped")
        return 128 + number if exit_code is None else exit_code

    def leave(number: int) -> None:
        if number == signal.SIGINT and exit_code is None:
            raise KeyboardInterrupt
        sys.exit(tell(number))

    def end(number: int) -> None:
        if waits_for_others and not left.wait(LEAVE_SECONDS):
            show_cursor()
            os._exit(tell(number))

    listener = SignalListener(leave, end)
    try:
        yield
    finally:
        left.set()
        listener.close()


class StopSignal:
    """Stores the reason to stop until all ranks check for one; a second signal ends the process.

    The death of the launcher counts as SIGTERM. It never counts as a second signal, since the
    launcher may have sent a signal before it died.

    While `starting`, there is nothing to save yet, so the first signal ends the process.
    """

    def __init__(self, starting: bool = False) -> None:
        self.starting = starting
        self.announce: Callable[[str], None] | None = None  # prints a line, on rank 0
        self.announced = False
        self.before_exit: Callable[[], None] = lambda: None  # if a signal ends it while `starting`
        self.saves = True  # a stop saves a step: False before the first
        self.received: str | None = None
        self.first: float | None = None  # time of the first signal
        self.saved = False  # the last checkpoint is on disk
        self.group: dist.ProcessGroup | None = None  # the gloo group; None: one process
        self.launched = stops_with_parent()
        self.parent = os.getppid()
        self.listener = SignalListener(self.handle, self.receive)

    def handle(self, number: int) -> None:
        """Store the first signal. Before the first step, it ends the process."""
        if self.starting:
            # the thread prints a line and ends the process
            self.listener.thread.join(LISTENER_SECONDS)
            raise SystemExit(PREEMPTED)
        self.received = self.received or signal.Signals(number).name

    def receive(self, number: int) -> None:
        """Acknowledge the first signal; end the process at a second one or before step 1."""
        now = time.monotonic()
        parent = os.getppid()
        orphaned = self.launched and parent != self.parent
        self.parent = parent
        if self.first is None:
            self.first = now
            name = signal.Signals(number).name
            if not self.starting:
                self.acknowledge(name)
            else:
                show_cursor()
                if is_main():
                    write_err(f"{name}: stopped before the first step")
                    sys.stderr.flush()
                self.before_exit()
                os._exit(PREEMPTED)
        elif now - self.first > SAME_PRESS_SECONDS and not orphaned:
            show_cursor()
            os._exit(PREEMPTED if self.saved else 128 + number)

    def request(self) -> None:
        """Stop after this step, without a line: an error follows, and says why."""
        self.announced = True
        self.received = self.received or signal.SIGTERM.name

    def acknowledge(self, name: str) -> None:
        """Print once, on rank 0, that the signal was received."""
        if self.announce is None or self.announced:
            return
        self.announced = True
        if not self.saves:
            self.announce(f"{name}: stopping before the first step")
            return
        again = "press again" if name == signal.SIGINT.name else "send it again"
        self.announce(f"{name}: saving after this step; {again} to abandon it")

    def close(self) -> None:
        """Ignore signals from now on.

        A signal while the interpreter ends would change the exit code, and the job would not be
        requeued. After an error, torchrun sends SIGTERM to the rank that prints it, since another
        rank ends first.
        """
        if self.listener.thread.is_alive():
            self.listener.close(ignore=True)

    def agree_to_stop(self, other: bool = False) -> tuple[bool, bool]:
        """Return whether any rank has a reason to stop, and whether `other` is true on any rank.

        An all-reduce between the hosts, over gloo.
        """
        flags = torch.tensor([REASONS.index(self.received or ""), int(other)])
        if self.group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        number, other_on_any = flags.tolist()
        self.received = self.received or REASONS[number] or None  # possibly from another rank
        if self.received:
            self.acknowledge(self.received)
        return bool(number), bool(other_on_any)

    def check(self) -> None:
        """Raise `StopRequested` on all ranks if any has a reason to stop; a collective.

        Called before each batch of an evaluation.
        """
        stopping, _ = self.agree_to_stop()
        if stopping:
            raise StopRequested


class Watchdog:
    """Dumps the stacks of all threads and ends the process after `limit` without a heartbeat.

    `limit`: `train.step_timeout`. `problem`: describes the hang in the message.

    A thread counts its own ticks. While the process is paused (SIGSTOP, Ctrl-Z, a frozen
    container), the thread does not tick, so a pause does not count.
    """

    def __init__(self, limit: str, problem: str = "completed nothing") -> None:
        self.seconds = duration("train.step_timeout", limit) or 0.0
        self.reason = (
            f"{problem} within {limit} (train.step_timeout); it hangs here, or waits for another "
            "process that hangs"
        )
        self.ticks = 0  # since the last heartbeat
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def heartbeat(self) -> None:
        """Note that the run made progress."""
        self.ticks = 0

    def watch(self) -> None:
        """Count ticks until the run ends or hangs; run by the thread."""
        while not self.done.wait(self.seconds / TICKS):
            self.ticks += 1
            if self.ticks > TICKS:
                stderr = sys.__stderr__ or sys.stderr
                show_cursor()
                stderr.write(f"error: process {rank()} {self.reason}:\n")
                faulthandler.dump_traceback(file=stderr, all_threads=True)
                stderr.flush()
                os._exit(PEER_FAILED)
