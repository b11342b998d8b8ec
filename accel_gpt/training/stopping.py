"""Why a run stops before its end: a signal to any process, a dead launcher, the wall clock."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.errors import duration
from accel_gpt.launcher import started_by_launcher
from accel_gpt.training.accelerator import host_group
from accel_gpt.training.terminal import show_cursor

SAME_PRESS_SECONDS = 2.0  # a terminal and the launcher both deliver one Ctrl-C; assumption
PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER_WORDS = (b"torch", b"accelerate")  # in the command of one
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIME_LIMIT = "train.time_limit"
REASONS = ("", TIME_LIMIT, *(number.name for number in SIGNALS))
RESERVE_SHARE, RESERVE_SECONDS = 0.02, 1.0  # of the limit, at least; to end processes; assumption


class StopSignal:
    """Remembers why to stop, for the end of the step; a second signal ends the process at once.

    A thread hears signals, as the training thread may be waiting in a collective. The death of the
    launcher counts as SIGTERM and never as a second signal: those that it sent before it died have
    already been heard. `time_limit`: seconds from `started`, a reading of `time.monotonic`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        time_limit: float | None = None,
        started: float | None = None,
    ) -> None:
        self.received: str | None = None
        self.first: float | None = None  # when the first signal was heard
        self.saved = False  # all that the run has: nothing is left to lose
        self.group = group  # of the hosts; None: one process
        self.time_limit = time_limit
        self.started = time.monotonic() if started is None else started
        self.asked: float | None = None
        self.longest = 0.0  # seconds between two questions: a step, with what followed it
        self.launched, self.parent = started_by_launcher(), os.getppid()
        self.ear, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        threading.Thread(target=self.listen, name="signals", daemon=True).start()
        signal.set_wakeup_fd(self.mouth.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self.handle)
        os.register_at_fork(after_in_child=deafen)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal."""
        self.received = self.received or signal.Signals(number).name

    def listen(self) -> None:
        """Hear each signal when it arrives."""
        while heard := self.ear.recv(64):
            for number in heard:
                if number in SIGNALS:
                    self.hear(number)

    def hear(self, number: int) -> None:
        """End at once where this is a second signal."""
        now, orphaned = time.monotonic(), self.launched and os.getppid() != self.parent
        self.parent = os.getppid()
        if self.first is None:
            self.first = now
        elif now - self.first > SAME_PRESS_SECONDS and not orphaned:
            show_cursor()
            os._exit(PREEMPTED if self.saved else 128 + number)

    @staticmethod
    def ignore() -> None:
        """Ignore signals from now on: an interpreter that ends would die of one, and with another
        exit code nothing queues the job again.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def agreed(self, other: bool = False, save_seconds: float = 0.0) -> tuple[bool, bool]:
        """Whether any process has a reason to stop, and whether `other` holds on any.

        A collective of the hosts, not of the devices. `save_seconds`: what a save takes after the
        step, which must fit into the time that is left.
        """
        late = self.out_of_time(save_seconds)
        reason = self.received or (TIME_LIMIT if late else "")
        flags = torch.tensor([REASONS.index(reason), int(other)])
        if self.group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        stop, others = flags.tolist()
        self.received = self.received or REASONS[stop] or None  # of another process, perhaps
        return bool(stop), bool(others)

    def out_of_time(self, save_seconds: float) -> bool:
        """Whether the next step, with as much margin again, and a save may not fit any more.

        The first step is no measure for the others: it compiles and allocates.
        """
        now = time.monotonic()
        if self.asked is not None:
            self.longest = max(self.longest, now - self.asked)
        self.asked = now
        if self.time_limit is None:
            return False
        reserve = 2 * (self.longest + save_seconds)
        reserve += max(RESERVE_SHARE * self.time_limit, RESERVE_SECONDS)
        return now - self.started + reserve > self.time_limit


def deafen() -> None:
    """Let signals do to a forked process what they do to any: the run is not its own."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def listen_for_stop(config: Config, accelerator: Accelerator, started: float) -> StopSignal:
    """The reasons to stop that a run listens for from now on; a collective."""
    limit = duration("train.time_limit", config.train.time_limit)
    return StopSignal(host_group(config, accelerator), limit, started)


def die_with_launcher() -> None:
    """Get SIGTERM when the launcher dies, which would otherwise leave its processes behind.

    A process that a shell started outlives it, as those under nohup must. Linux only: prctl(2).
    """
    if sys.platform != "linux" or not started_by_launcher():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    first = Path("/proc/1/cmdline")  # in a container, that may be the launcher
    if os.getppid() == 1 and not any(word in first.read_bytes() for word in LAUNCHER_WORDS):
        os.kill(os.getpid(), signal.SIGTERM)  # it died just before
