"""Write and read TensorBoard's event files.

A run has one file per launch. TensorBoard reads the files of a folder in the order of their names,
so a name begins with a count and not with the time: a clock may go back.
"""

import io
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_gpt.files import append_all_or_nothing

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

NAME = "events.out.tfevents.{:010d}.accel_gpt"


class EventFile:
    """The event file of a launch, with the interface of Accelerate's trackers."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = " ".join(path.name for path in folder.glob("*tfevents*"))
        numbers = map(int, re.findall(r"tfevents\.(\d+)", names))
        self.path = folder / NAME.format(max(numbers, default=-1) + 1)  # behind the others
        self.unwritten = b""  # while the disk is full

    def begin(self, step: int) -> None:
        """Begin the file. TensorBoard drops `step` and all later steps of earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        first = Event(wall_time=now, file_version="brain.Event:2")
        begin = SessionLog(status=SessionLog.START)
        self.append([first, Event(wall_time=now, step=step, session_log=begin)])

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Append one event with the numbers and texts of a step."""
        self.append([event_of_values(values, step, time.time())])

    def append(self, events: Iterable["Event"]) -> None:
        """Append events. Raises `OSError` if the disk is full; the next call writes them too."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        content = io.BytesIO()
        writer = RecordWriter(content)
        for event in events:
            writer.write(event.SerializeToString())
        self.unwritten += content.getvalue()
        append_all_or_nothing(self.path, self.unwritten)
        self.unwritten = b""

    def finish(self) -> None:
        """Write what the disk had no room for."""
        self.append([])


def event_of_values(values: Mapping[str, float | str], step: int, wall_time: float) -> "Event":
    """Return one event with the numbers and texts of a step. A text is shown unchanged."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard.summary import text

    summary = Summary()
    for tag, value in values.items():
        if isinstance(value, str):
            # a code block of Markdown: TensorBoard shows it unchanged
            code = "\n".join(f"    {line}" for line in value.splitlines())
            summary.MergeFrom(text(tag, code))  # type: ignore[no-untyped-call]  # as above
        else:
            summary.value.add(tag=tag, simple_value=value)
    return Event(wall_time=wall_time, step=step, summary=summary)
