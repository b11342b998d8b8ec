"""Why a run stops before its end: a signal to any process, a dead launcher, the wall clock."""

import ctypes
import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist

SAME_PRESS_SECONDS = 2.0  # a terminal and the launcher both deliver one Ctrl-C; assumption
PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # what theirs set
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIME_LIMIT = "train.time_limit"
RESERVE_SHARE = 0.02  # of the limit, for the end of the processes; assumption


class StopSignal:
    """Remembers why to stop, for the end of the step; a second signal ends the process at once.

    The death of the launcher counts as SIGTERM and never as a second signal: those that it sent
    before it died have already been heard. `time_limit`: seconds from `started`, a reading of
    `time.monotonic`.
    """

    def __init__(
        self, processes: int, time_limit: float | None = None, started: float | None = None
    ) -> None:
        self.received: str | None = None
        self.at = 0.0
        self.group = dist.new_group(backend="gloo") if processes > 1 else None
        self.time_limit = time_limit
        self.started = self.asked = time.monotonic() if started is None else started
        self.longest = 0.0  # seconds between two questions: a step, with what followed it
        self.parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, self.handle)
        die_with_launcher()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; end at once on a later one."""
        now, orphaned = time.monotonic(), os.getppid() != self.parent
        if self.received and now - self.at > SAME_PRESS_SECONDS and not orphaned:
            os._exit(128 + number)
        self.parent = os.getppid()
        if not self.received:
            self.received, self.at = signal.Signals(number).name, now

    def agreed(self, other: bool = False, save_seconds: float = 0.0) -> tuple[bool, bool]:
        """Whether any process has a reason to stop, and whether `other` holds on any.

        A collective of the hosts, not of the devices. `save_seconds`: what a save takes after the
        step, which must fit into the time that is left.
        """
        if not self.received and self.out_of_time(save_seconds):
            self.received, self.at = TIME_LIMIT, time.monotonic()
        if self.group is None:
            return self.received is not None, other
        flags = torch.tensor([int(self.received is not None), int(other)])
        dist.all_reduce(flags, group=self.group)
        stop, others = flags.tolist()
        return bool(stop), bool(others)

    def out_of_time(self, save_seconds: float) -> bool:
        """Whether the next step, with as much margin again, and a save may not fit any more."""
        now = time.monotonic()
        self.longest, self.asked = max(self.longest, now - self.asked), now
        if self.time_limit is None:
            return False
        reserve = 2 * (self.longest + save_seconds) + RESERVE_SHARE * self.time_limit
        return now - self.started + reserve > self.time_limit


def die_with_launcher() -> None:
    """Get SIGTERM when the launcher dies, which would otherwise leave its processes behind.

    A process that a shell started outlives it, as those under nohup must. Linux only: prctl(2).
    """
    if sys.platform != "linux" or not any(name in os.environ for name in LAUNCHERS):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)
