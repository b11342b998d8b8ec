"""When the launches of a run began and ended, by `clock` in run.json and the `time` of metrics."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from accel_gpt.runs.folder import number


@dataclass(frozen=True)
class LaunchClock:
    """When a launch ran; all but `time` in seconds since 1970, by the clock of its machine."""

    started: float  # its process
    trained: float  # when the `time` of its metrics began to run
    time: float  # what `time` was then
    ended: float | None = None  # the last that is known of it; the next launch writes it

    @property
    def seconds(self) -> float:
        """Return the seconds of training."""
        return max((self.ended or 0.0) - self.trained, 0.0)

    @property
    def process_seconds(self) -> float:
        """Return the seconds from the start of the process to the end."""
        return max((self.ended or 0.0) - self.started, 0.0)


def clocks(launches: Sequence[Mapping[str, Any]], time: float) -> list[LaunchClock | None]:
    """Return the clock of each launch; None if it has none, or if a user edited it.

    `time`: the last `time` that the last launch is known by, from which its end follows; 0: none.
    """
    found: list[LaunchClock | None] = []
    for launch in launches:
        clock = None
        with contextlib.suppress(msgspec.ValidationError):
            clock = msgspec.convert(launch.get("clock"), LaunchClock)
        finite = clock and all(math.isfinite(value or 0.0) for value in vars(clock).values())
        found.append(clock if finite else None)
    if found and found[-1]:
        last = found[-1]
        found[-1] = replace(last, ended=last.trained + max(time - last.time, 0.0))
    return found


def last_time(records: Iterable[Mapping[str, Any]], launch: int) -> float:
    """Return the `time` of the last of `records`; 0 unless the launch with this number wrote it."""
    writer = time = 0.0
    for record in records:
        time = number(record.get("time"))
        writer = number(record.get("launch/number", writer))
    return time if writer == launch and math.isfinite(time) else 0.0
