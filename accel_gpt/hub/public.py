"""Select what everybody may see of a run, for the model card and the other files of a push.

Of the config, each option says what is public (`published` in `config/options.py`). Metrics, the
texts of samples, device, commit and versions are public. Of a path or URL at most the last part is,
if it is a plain name. Everything else stays private.

Writes metrics.jsonl, metrics.csv, tensorboard/ and the copy of a checkpoint that a push uploads.
"""

import hashlib
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_gpt.config.compare import option_of
from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.options import Published, all_options
from accel_gpt.config.parse import leaves
from accel_gpt.data.hub_client import parse_repo
from accel_gpt.errors import CheckpointError, UserError
from accel_gpt.files import link, sha256
from accel_gpt.records import read_object
from accel_gpt.training.checkpoint import write_json
from accel_gpt.training.machine import PACKAGES
from accel_gpt.training.metrics import as_csv, as_jsonl
from accel_gpt.training.resume import NOT_TOLD
from accel_gpt.training.run_folder import RunFolder, number
from accel_gpt.training.trackers import as_code

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
METRIC = re.compile(r"step|tokens|time|(?:train|data|perf|eval)/\w{1,60}(?:/.+)?")
LAUNCH_KEYS = ("commit", "device", "mixed_precision", "processes")
HOMES = ("home", "users")  # folders whose children are named for people
EVENTS = "events.out.tfevents.0000000000.accel_gpt"


# --------------------------------------------------------------------------- names


def public_name(path: str) -> str | None:
    """Return the last part of a path or URL; None if it names a host, a bucket or a person.

    A word that is not a path stays as it is. The name has letters, digits and `._+*-` only.
    """
    before, mark, after = path.strip().partition("://")
    local = after.partition("/")[2] if mark else before  # without the host or bucket
    parts = [part for part in re.split(r"[/\\:]+", re.split("[?#;&]", local)[0]) if part]
    if not parts or parts[-1] in (".", ".."):
        return None
    name = parts[-1]
    is_home = len(parts) > 1 and parts[-2].lower() in HOMES
    if is_home or name.startswith("~") or "@" in name or "=" in name:
        return None
    return re.sub(r"[^\w.+*-]+", "-", name)


def public_source(path: str) -> str:
    """Return the public name of a data source, with a hash if it is only part of its path.

    A run names its sources by their whole paths if their last parts are equal.
    """
    name = public_name(path) or "data"
    return name if name == path else f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:4]}"


def public_metric(key: str) -> str:
    """Return the key of a metric; its third part, a data source, by its public name."""
    *parts, last = key.split("/", 2)
    known = [public_name(part) or "hidden" for part in parts]
    source = public_source(last) if len(parts) == 2 else public_name(last) or "hidden"
    return "/".join([*known, source])


def hub_dataset(name: str) -> str | None:
    """Return the id in `hf://datasets/user/name`, or `user/name` itself unless it is a folder."""
    found = re.match(r"hf://datasets/([^/@?#]+/[^/@?#]+)", name)
    repo = found[1] if found else name
    if not HUB_ID.fullmatch(repo) or (not found and Path(repo).exists()):
        return None
    return repo


def hub_model(name: str) -> str | None:
    """Return the repository of `model.init_from`, if the Hub's cache shows that it is one.

    A folder `runs/gpt` looks like a repository too, so what is not in the cache is not one.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        repo, revision = parse_repo(name)
    except UserError:
        return None
    if Path(name).exists():
        return None
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return repo if isinstance(found, str) else None


def initial_model_name(name: str) -> str | None:
    """Return the public name of the run, folder or repository in `model.init_from`."""
    return hub_model(name) or public_name(re.sub(r"(?<=/)([\w.-]+)@[\w.-]+$", r"\1", name))


# --------------------------------------------------------------------------- config


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public keys of a config, dotted, names in place of paths."""
    hints = leaves(Config)
    found: dict[str, Any] = {}
    for key, option in all_options(Config).items():
        if not option.published or key not in config:
            continue
        value = public_value(option.published, hints[key], config[key])
        if value is not None or config[key] is None:
            found[key] = value
    return found


def public_value(published: Published | None, hint: Any, value: Any) -> Any:
    """Return what may be shown of a value, given the type of its option; None: nothing."""
    if is_harmless(hint, value):
        return value
    if published in (None, True, False):
        return None
    if isinstance(value, list):  # a mixture
        return [
            {"path": public_name(str(one.get("path"))) or "data", "weight": number(one["weight"])}
            for one in value
        ]
    if not isinstance(value, str):
        return None
    if published == "model":
        return initial_model_name(value)
    if published == "dataset":
        return hub_dataset(value)
    repo = hub_dataset(value) if value.startswith("hf://") else None
    return f"hf://datasets/{repo}" if repo else public_name(value)


def is_harmless(hint: Any, value: Any) -> bool:
    """Return whether a value is a number, a switch, null, or a choice that its type lists."""
    if isinstance(value, str):
        return value in listed_choices(hint)
    return value is None or isinstance(value, bool | int | float)


def listed_choices(hint: Any) -> set[str]:
    """Return the texts in each `Literal` of a type."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {choice for choice in arguments if isinstance(choice, str)}
    found: set[str] = set()
    for argument in arguments:
        found |= listed_choices(argument)
    return found


# --------------------------------------------------------------------------- records


def public_launch(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions, commit, precision, device and number of processes of a launch."""
    found = {key: launch.get(key) for key in LAUNCH_KEYS}
    return found | {"versions": public_versions(launch.get("versions") or {})}


def public_versions(versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of Python and of the packages that a run records."""
    return {name: versions[name] for name in ("python", *PACKAGES) if name in versions}


def public_records(run: RunFolder) -> list[dict[str, Any]]:
    """Return the numbers in metrics.jsonl, sources of a mixture by public names."""
    return [
        {
            public_metric(key): value
            for key, value in record.items()
            if METRIC.fullmatch(key) and (value is None or isinstance(value, int | float))
        }
        for record in run.records()
    ]


# --------------------------------------------------------------------------- files


def write_logs(run: RunFolder, to: Path) -> None:
    """Write metrics.jsonl, metrics.csv and TensorBoard events of what is public in a run."""
    records = public_records(run)
    if not records:
        return
    (to / "metrics.jsonl").write_bytes(as_jsonl(records))
    (to / "metrics.csv").write_bytes(as_csv(run.csv_records()))
    (to / "tensorboard").mkdir()
    write_events(run, records, to / "tensorboard" / EVENTS)


def write_events(run: RunFolder, records: list[dict[str, Any]], path: Path) -> None:
    """Write a file of TensorBoard events: the metrics in `records`, and the samples of a run.

    The run's own files of events are not copied: they hold its config, and their names hold the
    host. The clock of the events ends when metrics.jsonl was last changed.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import text as text_summary

    seconds = [number(record.get("time") or 0.0) for record in records]
    start = (run.path / "metrics.jsonl").stat().st_mtime - max(seconds)
    events = [Event(wall_time=start, file_version="brain.Event:2")]
    for record, time in zip(records, seconds, strict=True):
        values = [
            Summary.Value(tag=key, simple_value=number(value))
            for key, value in record.items()
            if "/" in key and value is not None
        ]
        event = Event(
            wall_time=start + time, step=int(record["step"]), summary=Summary(value=values)
        )
        events.append(event)
    for step in run.samples:
        texts = [
            f"--- sample {index}\n{text}"
            for index, text in enumerate(run.sample_texts(step), start=1)
        ]
        summary = text_summary(  # type: ignore[no-untyped-call]
            "samples", as_code("\n\n".join(texts))
        )
        events.append(Event(wall_time=start, step=step, summary=summary))
    with path.open("wb") as output:
        writer = RecordWriter(output)
        for event in events:
            writer.write(event.SerializeToString())


def copy_state(checkpoint: Path, to: Path) -> None:
    """Copy a checkpoint, without what is private in trainer_state.json and model.json.

    Only the files that the manifest lists are copied.
    """
    manifest = read_object(checkpoint / "manifest.json", CheckpointError)
    to.mkdir()
    for name, entry in manifest["files"].items():
        if name == "trainer_state.json":
            write_json(to / name, public_state(read_object(checkpoint / name, CheckpointError)))
        elif name == "model.json":
            write_json(to / name, public_shape(read_object(checkpoint / name, CheckpointError)))
        else:
            link(str(checkpoint / name), str(to / name))
            continue
        entry["size"] = (to / name).stat().st_size
        entry["sha256"] = sha256(to / name)
    write_json(to / "manifest.json", manifest)


def public_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of trainer_state.json without what is private.

    Its config lacks the keys that a resume takes from the config that it is given, such as paths.
    In place of a text that is not one of the listed choices stands `NOT_TOLD`, which equals every
    value at a resume.
    """
    hints = leaves(Config)
    config: dict[str, Any] = {}
    for key, value in state["config"].items():
        if option_of(key).resume in ("free", "start"):
            continue
        config[key] = value if is_harmless(hints.get(key), value) else NOT_TOLD
    public = {**state, "config": config}
    if recorded := state.get("versions"):
        public["versions"] = public_versions(recorded)
        if "commit" in recorded:
            public["versions"]["commit"] = recorded["commit"]
    public["data_sources"] = [
        {**source, "name": public_source(source["name"])}
        for source in state.get("data_sources", ())
    ]
    return public


def public_shape(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of model.json without texts that are not listed choices."""
    hints = leaves(ModelConfig)
    config = {
        key: value for key, value in shape["config"].items() if is_harmless(hints.get(key), value)
    }
    return {**shape, "config": config}
