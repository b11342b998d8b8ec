"""What keeps a run from being lost or spoilt: signals, the lock on its folder, a finite loss."""

import fcntl
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from accel_gpt.errors import BusyError, DivergedError, UserError

SAME_PRESS_SECONDS = 2.0  # a terminal and the launcher both deliver one Ctrl-C; assumption
MAX_SKIPPED = 50  # the scale has fallen from 65,536 to below 1e-10 by then
PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again


class StopSignal:
    """Remembers that SIGTERM or SIGINT arrived, for the end of the step; a second one kills."""

    def __init__(self, processes: int) -> None:
        self.received: str | None = None
        self.at = 0.0
        self.group = dist.new_group(backend="gloo") if processes > 1 else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; end at once on a later one."""
        now = time.monotonic()
        if self.received and now - self.at > SAME_PRESS_SECONDS:
            os._exit(128 + number)
        if not self.received:
            self.received, self.at = signal.Signals(number).name, now

    def agreed(self) -> bool:
        """Whether any process got a signal; a collective of the hosts, not of the devices."""
        if self.group is None:
            return self.received is not None
        flag = torch.tensor(int(self.received is not None))
        dist.all_reduce(flag, group=self.group)
        return bool(flag.item())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a run's folder, made if missing; the kernel frees it on any exit.

    Raises `UserError` where the folder cannot be written, `BusyError` where a run is at work in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"out_dir {folder} cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock.read().strip() or "another process"
            raise BusyError(
                f"out_dir {folder} is in use by {owner}; wait for it, or set another out_dir"
            ) from None
        except OSError as error:
            raise UserError(f"out_dir {folder} cannot be locked: {error.strerror}") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def check_finite(loss: float, grad_norm: float, step: int) -> None:
    """Raise `DivergedError` where the loss or the gradient is not a number or infinite.

    Asked before anything is logged or saved: a poisoned step is never kept.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise DivergedError(
            f"at step {step:,} the loss is {loss} and the gradient norm {grad_norm}; lower "
            "optim.lr, lengthen schedule.warmup_steps or use "
            "train.mixed_precision bf16; a new launch goes on from the last checkpoint"
        )


def count_skipped(before: int, step: int) -> int:
    """One more update in a row that fp16 skipped; `DivergedError` when it never ends."""
    if before >= MAX_SKIPPED:
        raise DivergedError(
            f"after step {step:,} the gradient overflowed {before} times in a row in fp16; lower "
            "optim.lr or use train.mixed_precision bf16"
        )
    return before + 1
