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
from typing import TYPE_CHECKING

from accel_gpt.errors import BusyError, DivergedError, UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

SAME_PRESS_SECONDS = 2.0  # a terminal and the launcher both deliver one Ctrl-C; assumption
PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again


class StopSignal:
    """Remembers that SIGTERM or SIGINT arrived, for the end of the step; a second one kills."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; end at once on a later one."""
        now = time.monotonic()
        if self.received and now - self.at > SAME_PRESS_SECONDS:
            os._exit(128 + number)
        if not self.received:
            self.received, self.at = signal.Signals(number).name, now

    def agreed(self, accelerator: "Accelerator", waiting_anyway: bool) -> bool:
        """Whether any process got a signal; a collective.

        It waits for the device, so on an accelerator it is asked at log lines only, which wait too.
        """
        if accelerator.num_processes == 1:
            return self.received is not None
        if accelerator.device.type != "cpu" and not waiting_anyway:
            return False
        if self.received:
            accelerator.set_trigger()
        return bool(accelerator.check_trigger())


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
        except OSError:
            owner = lock.read().strip() or "another process"
            raise BusyError(
                f"out_dir {folder} is in use by {owner}; wait for it, or set another out_dir"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def check_finite(loss: float, step: int) -> None:
    """Raise `DivergedError` for a loss that is not a number or infinite."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss at step {step:,} is {loss}; lower optim.lr, lengthen schedule.warmup_steps "
            "or use train.mixed_precision bf16; a new launch goes on from the last checkpoint"
        )
