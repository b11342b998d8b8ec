"""One run in a folder, and one error where one of its processes has gone."""

import fcntl
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object

from accel_gpt.errors import BusyError, PeerError, UserError

SHOWN = 4  # differences that a sentence names
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


def require_same(
    state: PartialState | Accelerator, values: Mapping[str, Any], kind: type[UserError] = UserError
) -> None:
    """Raise `kind` on the main process unless `values` are the same on all ranks; the others leave
    with its exit code. A collective.
    """
    if state.num_processes == 1:
        return
    every = gather_object([dict(values)])
    differences = [
        f"{key} is {every[0].get(key)} on rank 0 and {own.get(key)} on rank {rank}"
        for rank, own in enumerate(every)
        for key in every[0] | own
        if own.get(key) != every[0].get(key)
    ]
    if not differences:
        return
    if dist.is_initialized():  # else its threads may abort a process that ends after the others
        dist.destroy_process_group()
    if not state.is_main_process:
        sys.exit(kind.exit_code)
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    raise kind(
        f"the processes of this run differ: {', '.join(differences[:SHOWN])}{more}; start all "
        "with the same config, data, code and versions"
    )


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
