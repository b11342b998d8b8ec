"""The curves of a run for the Hub: TensorBoard's files and the metrics, without what is private.

Reads `tensorboard/`, `metrics.jsonl` and `metrics.csv` of a run. The Hub shows what lies in files
with `tfevents` in their names.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_gpt.files import load_json
from accel_gpt.redact import public_metric, redact_tokens
from accel_gpt.training.metrics import COLUMNS, read_lines

NUMBER = r"(?:-?[0-9][0-9.]*(?:e[+-]?[0-9]+)?|-?inf|nan)?"
PUBLIC_ROW = re.compile(rf"[0-9]+(?:,{NUMBER})*\n")
SAMPLES = ("samples", "samples/text_summary")  # tags that `publish_samples` gives


def copy_logs(run: Path, to: Path) -> None:
    """Copy TensorBoard's events, into `to`/tensorboard, and the metrics of `run`; what there is.

    Of the events, scalars, samples and the marks of resumes stay: hyperparameters and the config
    hold paths, and file names the name of the machine. Sources of a mixture lose theirs as well.
    """
    events = to / "tensorboard"
    events.mkdir(parents=True, exist_ok=True)
    copied = 0
    for path in sorted((run / "tensorboard").rglob("*tfevents*"), key=lambda path: path.name):
        if path.is_file() and (records := public_events(path)):
            write_events(events / f"events.out.tfevents.{copied:010d}.accel_gpt", records)
            copied += 1
    if (run / "metrics.csv").is_file():
        rows = [line for line in read_lines(run / "metrics.csv") if is_public_row(line)]
        (to / "metrics.csv").write_text("".join(rows), encoding="utf-8")
    if (run / "metrics.jsonl").is_file():
        lines = map(public_line, read_lines(run / "metrics.jsonl"))
        (to / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def public_line(line: str) -> str:
    """A line of metrics.jsonl as it is, unless a key has a place in it; "" where it is none."""
    try:
        record = load_json(line)
        public = {public_metric(key): value for key, value in record.items() if is_figure(value)}
    except (ValueError, AttributeError):
        return ""
    return line if list(public) == list(record) else json.dumps(public) + "\n"


def is_public_row(line: str) -> bool:
    """Whether a line of metrics.csv is names of our columns, or numbers, and nothing else."""
    return bool(PUBLIC_ROW.fullmatch(line)) or {*line.strip().split(",")} <= {*COLUMNS}


def is_figure(value: object) -> bool:
    """Whether a value may be shown: a number, or null for one that is not finite."""
    return value is None or isinstance(value, int | float)


def public_events(path: Path) -> list[bytes]:
    """The events of a file that may be shown, written anew; none where nothing is to be shown.

    A torn end is left out, as TensorBoard does.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    kept, started = [], 0.0
    for event in LegacyEventFileLoader(str(path)).Load():
        started = started or event.wall_time
        kept += [public.SerializeToString() for public in public_event(event)]
    head = Event(wall_time=started, file_version="brain.Event:2")
    return [head.SerializeToString(), *kept] if kept else []


def public_event(event: Any) -> Iterator[Any]:
    """The event with what may be shown of it and nothing else, unless that is nothing."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    when = {"wall_time": event.wall_time, "step": event.step}
    if event.HasField("session_log"):  # from this step on, what was before is forgotten
        yield Event(**when, session_log=SessionLog(status=event.session_log.status))
    values = [v for value in event.summary.value for v in public_value(value)]
    if values:
        yield Event(**when, summary=Summary(value=values))


def public_value(value: Any) -> Iterator[Any]:
    """A scalar, or the text of samples, in a value that holds nothing else."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.util.tensor_util import make_ndarray

    tag, plugin = public_metric(value.tag), value.metadata.plugin_data.plugin_name
    if value.HasField("simple_value"):
        yield Summary.Value(tag=tag, simple_value=value.simple_value)
    elif value.HasField("tensor") and plugin == "scalars":
        number = make_ndarray(value.tensor).reshape(-1)
        if number.size == 1 and number.dtype.kind in "fiu":
            yield Summary.Value(tag=tag, simple_value=float(number[0]))
    elif value.HasField("tensor") and plugin == "text" and value.tag in SAMPLES:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        copied = Summary.Value(tag=value.tag, tensor=value.tensor, metadata=metadata)
        for i, text in enumerate(copied.tensor.string_val):
            copied.tensor.string_val[i] = redact_tokens(text.decode("utf-8", "replace")).encode()
        yield copied


def write_events(path: Path, records: list[bytes]) -> None:
    """Write serialized events in TensorBoard's format."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
