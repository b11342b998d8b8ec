"""The lock of a run's folder: one run at a time works in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from accel_gpt.errors import BusyError, UserError
from accel_gpt.files import lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a run's folder, made if missing; the kernel frees it on any exit.

    Raises `UserError` where the folder cannot be written, `BusyError` where a run is at work in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock(folder / ".lock", wait=False)
    except BlockingIOError:
        owner = (folder / ".lock").read_text(errors="replace").strip() or "another process"
        raise BusyError(
            f"out_dir {folder} is in use by {owner}; wait for it, or set another out_dir"
        ) from None
    except OSError as error:
        raise UserError(f"out_dir {folder} cannot be written: {error.strerror}") from None
    with file:
        file.truncate(0)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {os.uname().nodename} since {now}")
        file.flush()
        yield
