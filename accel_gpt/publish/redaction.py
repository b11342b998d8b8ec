"""Select what everybody may see of a run, for the model card and the other files of a push.

Numbers and switches are shown as they are. Of a path, URL or id only the last part is shown, or
`data` if that may name a host, a bucket or a person. Any other text of a config is shown only if it
is one of the choices that its option lists. Device, commit and samples are public.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, get_args

from accel_gpt.config.convert import alternatives
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import all_options
from accel_gpt.config.values import leaves
from accel_gpt.runs.folder import RunFolder, number
from accel_gpt.training.event_file import as_records, event_of_values, first_event

METRIC = re.compile(r"(step|tokens|time|(?:train|data|perf|eval)/\w{1,60})(?:/(.+))?")
HOMES = ("home", "users")  # folders whose children are named for people


def public_name(path: str) -> str:
    """Return the last part of a path, URL or id; `data` if nothing harmless is left."""
    *parents, name = re.split(r"[/\\:]", re.split("[?#;&]", path.strip())[0].rstrip("/\\:"))
    parent = parents[-1].lower() if parents else "."
    is_host = parent == "" and len(parents) > 1  # or a bucket, after ://
    is_plain = re.fullmatch(r"[\w*][\w.+* -]*", name) is not None
    return name if is_plain and not is_host and parent not in HOMES else "data"


def public_source(path: str) -> str:
    """Return the public name of a data source, with a hash if it is only part of its path.

    A run names its sources by their whole paths if their last parts are equal.
    """
    name = public_name(path)
    return name if name == path else f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:4]}"


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public keys of a config, dotted, names in place of paths."""
    found: dict[str, Any] = {}
    for key, option in all_options(Config).items():
        value = config.get(key)
        if not option.published or key not in config:
            continue
        if is_harmless(key, value):
            found[key] = value
        elif option.published == "name" and isinstance(value, str):
            found[key] = public_name(value)
        elif option.published == "name" and isinstance(value, list):  # a mixture
            found[key] = [
                {"path": public_name(str(one.get("path"))), "weight": number(one.get("weight"))}
                for one in value
            ]
    return found


def is_harmless(key: str, value: Any) -> bool:
    """Return whether a value is a number, a switch, null, or a choice that its option lists."""
    if not isinstance(value, str):
        return value is None or isinstance(value, bool | int | float)
    listed = [get_args(kind) for kind in alternatives(leaves(Config).get(key))]
    return any(value in choices for choices in listed)


def public_records(run: RunFolder) -> list[dict[str, Any]]:
    """Return the numbers in metrics.jsonl, sources of a mixture by public names."""
    records = []
    for record in run.records():
        public: dict[str, Any] = {}
        for key, value in record.items():
            metric = METRIC.fullmatch(key)
            if metric and (value is None or isinstance(value, int | float)):
                source = f"/{public_source(metric[2])}" if metric[2] else ""
                public[metric[1] + source] = value
        records.append(public)
    return records


def public_events(run: RunFolder) -> bytes:
    """Return the numbers of `public_records` as a file of TensorBoard.

    The run's own files are not copied: they hold its config. The last event gets the time at which
    metrics.jsonl was last changed.
    """
    records = public_records(run)
    seconds = [number(record.get("time") or 0.0) for record in records]
    start = (run.path / "metrics.jsonl").stat().st_mtime - max(seconds)
    events = [first_event(start)]
    for record, time in zip(records, seconds, strict=True):
        values = {
            key: number(value) for key, value in record.items() if "/" in key and value is not None
        }
        events.append(event_of_values(values, int(record["step"]), start + time))
    return as_records(events)
