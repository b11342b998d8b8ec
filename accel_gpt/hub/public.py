"""What everybody may see of a run: an allow-list, by which a card and the files of a push are made.

Numbers, switches and a key's own choices are public, and so are device, commit and versions.
Of paths and URLs only the last part is, if it is a plain name; everything else stays private. The
texts of samples are public: a user who pushes a run publishes them.
"""

import hashlib
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_gpt.config.compare import option_of
from accel_gpt.config.experiment import Config
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

SECTIONS = ("seed", "data.", "model.", "train.", "optim.", "schedule.", "eval.", "sample.")
HUB_ID_KEYS = ("data.prepare.dataset", "eval.hellaswag")
NAMED_KEYS = (
    "data.prepare.path",
    "data.prepare.dataset_config",
    "data.prepare.dataset_split",
    "data.prepare.text_field",
    "data.prepare.tokenizer",
)
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


# --------------------------------------------------------------------------- records


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public keys of a config, dotted, names in place of paths."""
    hints = leaves(Config)
    keys = [key for key in hints if key in config and key.startswith(SECTIONS)]
    found = {key: public_value(key, hints[key], config[key]) for key in keys}
    return {k: value for k, value in found.items() if value is not None or config[k] is None}


def public_value(key: str, hint: Any, value: Any) -> Any:
    """Return what is public of a value in a config; None: nothing."""
    if isinstance(value, list) and key == "data.train":  # a mixture
        return [
            {"path": public_name(str(one.get("path"))) or "data", "weight": number(one["weight"])}
            for one in value
        ]
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value in choices(hint)):
        return value
    if not isinstance(value, str):
        return None
    if key == "model.init_from":
        return initial_model_name(value)
    if key in HUB_ID_KEYS:
        return hub_dataset(value)
    if value.startswith("hf://") and (repo := hub_dataset(value)):
        return f"hf://datasets/{repo}"
    if key == "data.train":
        return public_name(value) or "data"
    return public_name(value) if key in NAMED_KEYS else None


def choices(hint: Any) -> set[str]:
    """Return the texts that a type allows: those of each `Literal` in it."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {choice for choice in arguments if isinstance(choice, str)}
    return set().union(*map(choices, arguments))


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

    Written anew, as the run's own files hold its config, and in their names the host. Their clock
    ends where metrics.jsonl was last changed.
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
        step, summary = int(record["step"]), Summary(value=values)
        events.append(Event(wall_time=start + time, step=step, summary=summary))
    for step in run.samples:
        samples = enumerate(run.sample_texts(step), start=1)
        text = as_code("\n\n".join(f"--- sample {i}\n{text}" for i, text in samples))
        summary = text_summary("samples", text)  # type: ignore[no-untyped-call]
        events.append(Event(wall_time=start, step=step, summary=summary))
    with path.open("wb") as output:
        writer = RecordWriter(output)
        for event in events:
            writer.write(event.SerializeToString())


def copy_state(checkpoint: Path, to: Path) -> None:
    """Copy a checkpoint, its two files that hold the config by what is public in them."""
    manifest = read_object(checkpoint / "manifest.json", CheckpointError)
    to.mkdir()
    for name, entry in manifest["files"].items():  # no other file that lies there
        if name in ("trainer_state.json", "model.json"):
            write_json(to / name, public_state(read_object(checkpoint / name, CheckpointError)))
            entry |= {"size": (to / name).stat().st_size, "sha256": sha256(to / name)}
        else:
            link(str(checkpoint / name), str(to / name))
    write_json(to / "manifest.json", manifest)


def public_state(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of trainer_state.json or model.json without the keys of its config that a
    resume may change, such as paths: it takes these from the config that it is given.
    """
    public = {
        key: value
        for key, value in content["config"].items()
        if option_of(key).resume not in ("free", "start") and key != "init_from"
    }
    hidden = {key: NOT_TOLD for key in public if f"{key}.".startswith("data.val.") and public[key]}
    content["config"] = public | hidden
    if versions := content.get("versions"):
        commit = {"commit": versions["commit"]} if "commit" in versions else {}
        content["versions"] = public_versions(versions) | commit
    for source in content.get("data_sources", ()):
        source["name"] = public_source(source["name"])
    return content
