"""Named points at which a test lets this process fail; nothing happens unless the environment asks.

    ACCEL_GPT_FAULT="manifest.written=kill"     at the point of that name, the first time
    ACCEL_GPT_FAULT="*:17=half"                 at the 17th point of the writer, whatever its name
    ACCEL_GPT_FAULT_LOG=points.txt              add the name of every such point, a line each

A step of training is a point only by its name, `step`: the writer works beside it, and the order of
the two is another one each time.

Actions: kill; half (the file at hand is cut to half, as one that was being written, then kill);
enospc and eio (the `OSError` of a full and of a broken disk); sleep (2 s); hang. `NAME:N+=ACTION`
acts from the N-th time on, again and again.
"""

import errno
import os
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path

SLEEP_SECONDS, HANG_SECONDS = 2.0, 3600.0


def reach(name: str, path: Path | None = None) -> None:
    """Pass the point `name`, with the file that it is about."""
    asked, log = os.environ.get("ACCEL_GPT_FAULT"), os.environ.get("ACCEL_GPT_FAULT_LOG")
    counted = name != "step"
    if log and counted:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if not asked:
        return
    where, _, action = asked.partition("=")
    wanted, _, number = where.partition(":")
    if wanted != name and not (wanted == "*" and counted):
        return
    counts = reached()
    counts[wanted] += 1
    first, again = int(number.rstrip("+") or 1), number.endswith("+")
    if counts[wanted] == first or (again and counts[wanted] > first):
        act(action, name, path)


@cache
def reached() -> Counter[str]:
    """How often this process passed each point that was asked for."""
    return Counter()


def act(action: str, name: str, path: Path | None) -> None:
    """Fail as asked."""
    if action == "half" and path is not None and path.is_file():
        os.truncate(path, path.stat().st_size // 2)
    if action in ("kill", "half"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), str(path or name))
    time.sleep(HANG_SECONDS if action == "hang" else SLEEP_SECONDS)
