"""What everybody may see of a run: an allow-list, by which a card and the files of a push are made.

Numbers, switches and a key's own choices are public, and so are versions in the form of a version.
Of paths and URLs only the last part is, if it is a plain name; everything else stays private. The
texts of samples are public: a user who pushes a run publishes them.
"""

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import leaves
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import link, sha256
from accel_gpt.hub.client import full_repo_name, parse_repo
from accel_gpt.redact import may_be_secret, public_metric, public_name, public_source
from accel_gpt.training.checkpoint import read_checkpoint_json, write_json
from accel_gpt.training.machine import PACKAGES
from accel_gpt.training.metrics import as_csv, as_jsonl
from accel_gpt.training.resume import FREE, NOT_TOLD
from accel_gpt.training.run_folder import RunFolder, number
from accel_gpt.training.trackers import as_code

SECTIONS = ("seed", "data", "model", "train", "optim", "schedule", "eval", "sample")
HUB_IDS = ("data.prepare.dataset", "data.train.dataset", "eval.hellaswag")
NAMES = (
    *("data.prepare.path", "data.prepare.dataset_config", "data.prepare.dataset_split"),
    *("data.prepare.text_field", "data.prepare.tokenizer", "data.train.path"),
    *("data.train.dataset_config", "data.train.dataset_split", "data.train.text_field"),
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
METRIC = re.compile(r"step|tokens|time|(?:train|data|perf|eval)/\w{1,60}(?:/.+)?")
NUMBER = re.compile(r"-?[0-9][0-9.]*(?:e[+-]?[0-9]+)?|-?inf|nan")
VERSION = re.compile(r"[\w.+!-]{1,40}")
COMMIT = re.compile(r"[0-9a-f]{7,64}(-dirty)?")
DEVICE = re.compile(r"[\w .,()@+-]{1,80}")
EVENTS = "events.out.tfevents.0000000000.accel_gpt"


# --------------------------------------------------------------------------- names


def hub_dataset(name: str) -> str | None:
    """Return the id in `hf://datasets/user/name`, or `user/name` itself unless it is a folder."""
    found = re.match(r"hf://datasets/([^/@?#]+/[^/@?#]+)", name)
    repo = found[1] if found else name
    if may_be_secret(repo) or not HUB_ID.fullmatch(repo) or (not found and Path(repo).exists()):
        return None
    return repo


def hub_model(name: str) -> str | None:
    """Return the repository of `model.init_from`, if the Hub's cache shows that it is one.

    A folder `runs/gpt` looks like a repository too, so what is not in the cache is not one.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        repo, revision = parse_repo(full_repo_name(name))
    except AccelGPTError:
        return None
    if Path(name).exists() or may_be_secret(repo):
        return None
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return repo if isinstance(found, str) else None


def initial_model_name(name: str) -> str | None:
    """Return the public name of the run, folder or repository in `model.init_from`."""
    return hub_model(name) or public_name(re.sub(r"(?<=/)([\w.-]+)@[\w.-]+$", r"\1", name))


# --------------------------------------------------------------------------- config and launch


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public keys of a config, dotted, names in place of paths."""
    train = config.get("data.train")
    hints = {**leaves(Config), **leaves(TextStream, "data.train.")}
    public: dict[str, Any] = {}
    for key, hint in hints.items():
        if key not in config or key.partition(".")[0] not in SECTIONS:
            continue
        value = config[key]
        if key == "data.train" and isinstance(train, list):
            public[key] = [
                {"path": public_name(str(s.get("path"))) or "data", "weight": number(s["weight"])}
                for s in train
            ]
        elif isinstance(value, bool | int | float) or (value is None and key != "data.train"):
            public[key] = value
        elif isinstance(value, str) and (shown := public_text(key, hint, value)):
            public[key] = shown
    return public


def public_text(key: str, hint: Any, value: str) -> str | None:
    """Return what is public of a text in a config; None: nothing."""
    if value in choices(hint):
        return value
    if key == "model.init_from":
        return initial_model_name(value)
    if key in HUB_IDS:
        return hub_dataset(value)
    if value.startswith("hf://") and (repo := hub_dataset(value)):
        return f"hf://datasets/{repo}"
    if key == "data.train":
        return public_name(value) or "data"
    return public_name(value) if key in NAMES else None


def choices(hint: Any) -> set[str]:
    """Return the texts that a type allows: those of each `Literal` in it."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {choice for choice in arguments if isinstance(choice, str)}
    return set().union(*map(choices, arguments))


def public_launch(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions, commit, precision, device and number of processes of a launch."""
    versions = launch.get("versions")
    named = versions if isinstance(versions, Mapping) else {}
    found = {name: str(named.get(name, "")) for name in ("python", *PACKAGES)}
    commit, device = str(launch.get("commit")), str(launch.get("device", ""))
    precision, processes = launch.get("mixed_precision"), launch.get("processes")
    return {
        "versions": {name: text for name, text in found.items() if VERSION.fullmatch(text)},
        "commit": commit if COMMIT.fullmatch(commit) else None,
        "mixed_precision": precision if precision in ("no", "bf16", "fp16", "fp8") else None,
        "device": device if DEVICE.fullmatch(device) else None,
        "processes": processes if isinstance(processes, int) else 1,
    }


# --------------------------------------------------------------------------- files


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record of metrics.jsonl, sources of a mixture by public names."""
    return {
        public_metric(key): value
        for key, value in record.items()
        if METRIC.fullmatch(key) and (value is None or isinstance(value, int | float))
    }


def write_logs(run: RunFolder, to: Path) -> None:
    """Write metrics.jsonl, metrics.csv and TensorBoard events of what is public in a run."""
    records = [public_record(record) for record in run.records()]
    if records:
        (to / "metrics.jsonl").write_bytes(as_jsonl(records))
    if rows := run.csv_records():
        cells = [
            {key: text for key, text in row.items() if NUMBER.fullmatch(str(text))} for row in rows
        ]
        (to / "metrics.csv").write_bytes(as_csv(cells))
    if records or run.samples:
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

    seconds = [number(record.get("time")) for record in records]
    times = [value for value in seconds if value == value]
    file = run.path / "metrics.jsonl"
    start = file.stat().st_mtime - max(times) if times else 0.0
    events = [Event(wall_time=start, file_version="brain.Event:2")]
    for record, time in zip(records, seconds, strict=True):
        values = [
            Summary.Value(tag=key, simple_value=number(value))
            for key, value in record.items()
            if "/" in key and value is not None
        ]
        when = {
            "wall_time": start + (time if time == time else 0),
            "step": int(record["step"] or 0),
        }
        events.append(Event(**when, summary=Summary(value=values)))
    for step in run.samples:
        samples = enumerate(run.sample_texts(step), start=1)
        shown = "\n\n".join(f"--- sample {i}\n{text}" for i, text in samples)
        summary = text_summary("samples", as_code(shown))  # type: ignore[no-untyped-call]
        events.append(Event(wall_time=start, step=step, summary=summary))
    with path.open("wb") as output:
        writer = RecordWriter(output)
        for event in events:
            writer.write(event.SerializeToString())


def copy_state(checkpoint: Path, to: Path) -> None:
    """Copy a checkpoint without the keys of its config that a resume may change, such as paths.

    A resume takes these from the config that it is given.
    """
    manifest = read_checkpoint_json(checkpoint / "manifest.json")
    to.mkdir()
    for name in ("manifest.json", *manifest["files"]):  # no other file that lies there
        link(str(checkpoint / name), str(to / name))
    for name in ("trainer_state.json", "model.json"):
        content = read_checkpoint_json(to / name)
        config = content["config"]
        private = {key for key in config if key.startswith((*FREE, "init_from"))}
        content["config"] = {
            key: NOT_TOLD if f"{key}.".startswith("data.val.") and value else value
            for key, value in config.items()
            if key not in private
        }
        if "versions" in content:
            versions = content["versions"]
            launch = public_launch({"versions": versions, "commit": versions.get("commit")})
            commit = {"commit": launch["commit"]} if launch["commit"] else {}
            content["versions"] = launch["versions"] | commit
        for source in content.get("data_sources", ()):
            source["name"] = public_source(source["name"])
        (to / name).unlink()  # it may be a hard link to the checkpoint's own file
        write_json(to / name, content)
        size, digest = (to / name).stat().st_size, sha256(to / name)
        manifest["files"][name] = {"size": size, "sha256": digest}
    (to / "manifest.json").unlink()
    write_json(to / "manifest.json", manifest)
