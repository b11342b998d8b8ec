"""One run in a folder, and one error where one of its processes has gone."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from accel_gpt.errors import BusyError, PeerError, UserError

BACKENDS = ("gloo", "NCCL", "Connection closed by peer")  # in texts of errors without a class


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


@contextmanager
def peers(processes: int) -> Iterator[None]:
    """Turn what torch raises when another process has gone into a `PeerError`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        lost = isinstance(error, dist.DistError) or any(name in text for name in BACKENDS)
        if processes == 1 or not lost:
            raise
        raise lost_peer(text) from None


def lost_peer(text: str) -> PeerError:
    """The error of a process whose peer has gone, of which torch said `text`."""
    first = text.strip().partition("\n")[0]
    reason = re.sub(r"^\[[^]]*\] *", "", first).partition(". ")[0]  # without the file in C++
    return PeerError(
        f"another process of the run has gone or does not answer ({reason}); its own message "
        "tells why, and a new launch goes on from the last checkpoint"
    )
