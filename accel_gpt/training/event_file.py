"""Write and read TensorBoard's event files.

A run has one file per launch. TensorBoard reads the files of a folder in the order of their names,
so a name begins with a count and not with the time: a clock may go back.
"""

import io
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_gpt.files import append_all_or_nothing

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

NAME = "events.out.tfevents.{:010d}.accel_gpt"
# of a record: length (8 bytes), checksum (4 bytes), event, checksum (4 bytes)
HEADER_BYTES = 12
FOOTER_BYTES = 4
TEXT_ENDING = "/text_summary"  # that torch appends to the tag of a text


class EventFile:
    """The event file of a launch, with the interface of Accelerate's trackers."""

    name = "tensorboard"

    def __init__(self, folder: Path, charts: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        self.folder = folder
        self.charts = charts  # group -> chart -> what it shows
        self.path = folder / NAME.format(next_number(folder))
        self.unwritten = b""  # while the disk is full

    def begin(self, step: int) -> None:
        """Begin the file. TensorBoard drops `step` and all later steps of earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard.summary import custom_scalars

        self.folder.mkdir(parents=True, exist_ok=True)
        begin = SessionLog(status=SessionLog.START)
        charts = custom_scalars(self.charts)  # type: ignore[no-untyped-call]  # torch has no types
        self.append(
            [
                first_event(time.time()),
                Event(wall_time=time.time(), step=step, session_log=begin),
                Event(wall_time=time.time(), summary=charts),
            ]
        )

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Append one event with the numbers and texts of a step."""
        self.append([event_of_values(values, step, time.time())])

    def append(self, events: Iterable["Event"]) -> None:
        """Append events. Raises `OSError` if the disk is full; the next call writes them too."""
        self.unwritten += as_records(events)
        append_all_or_nothing(self.path, self.unwritten)
        self.unwritten = b""

    def finish(self) -> None:
        """Write what the disk had no room for."""
        self.append([])


def first_event(wall_time: float) -> "Event":
    """Return the event that each file begins with."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=wall_time, file_version="brain.Event:2")


def event_of_values(values: Mapping[str, float | str], step: int, wall_time: float) -> "Event":
    """Return one event with the numbers and texts of a step. A text is shown unchanged."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard.summary import text

    summary = Summary()
    for tag, value in values.items():
        if isinstance(value, str):
            code = as_code(value)
            summary.MergeFrom(text(tag, code))  # type: ignore[no-untyped-call]  # as above
        else:
            summary.value.add(tag=tag, simple_value=value)
    return Event(wall_time=wall_time, step=step, summary=summary)


def as_code(text: str) -> str:
    """Indent `text` as a code block of Markdown, so that TensorBoard shows it unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def as_records(events: Iterable["Event"]) -> bytes:
    """Return events as records of an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    return content.getvalue()


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder in the order in which TensorBoard reads them."""
    return sorted(folder.glob("*tfevents*"))


def next_number(folder: Path) -> int:
    """Return a number that orders a new event file behind the others of a folder."""
    numbers = [re.search(r"tfevents\.(\d+)", path.name) for path in event_files(folder)]
    return max((int(found[1]) for found in numbers if found), default=-1) + 1


def logged_values(folder: Path) -> dict[int, set[str]]:
    """Return the names of the values that TensorBoard shows for each step of a folder."""
    shown: dict[int, set[str]] = {}
    for path in event_files(folder):
        for event in read_events(path):
            if event.HasField("session_log"):
                shown = {step: names for step, names in shown.items() if step < event.step}
            names = shown.setdefault(event.step, set())
            names.update(value.tag.removesuffix(TEXT_ENDING) for value in event.summary.value)
    return shown


def read_events(path: Path) -> Iterator["Event"]:
    """Yield the events of a file up to the first record that is incomplete or damaged."""
    from tensorboard.compat.proto.event_pb2 import Event

    content = path.read_bytes()
    position = 0
    while position + HEADER_BYTES <= len(content):
        (size,) = struct.unpack_from("<Q", content, position)
        start = position + HEADER_BYTES
        position = start + size + FOOTER_BYTES
        if position > len(content):
            return
        try:
            event = Event.FromString(content[start : start + size])
        except Exception:  # protobuf, which tensorboard requires, has no other public class
            return
        yield event
