"""The lock of a run's folder: one run at a time works in it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from accel_gpt.errors import BusyError, UserError


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
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        lock.write(f"process {os.getpid()} on {os.uname().nodename} since {now}")
        lock.flush()
        yield
