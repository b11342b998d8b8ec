"""What a model card says, gathered from the plain files of a run and cleaned of what is private.

Reads a checkpoint (`trainer_state.json`, `model.json`, `tokenizer.json`), and where they are there
`run.json`, `metrics.jsonl` and `samples/` of its run and `dataset.json` of its data.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_gpt.config.changes import changed
from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.parse import build, leaves
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.errors import UserError
from accel_gpt.files import load_json, read_json
from accel_gpt.hub.privacy import hub_dataset, hub_model
from accel_gpt.hub.trained_on import Source, sources_of
from accel_gpt.redact import public_name, public_source
from accel_gpt.report.sample_texts import sample_files, texts_in
from accel_gpt.training.accelerator import PACKAGES
from accel_gpt.training.checkpoint import read_shape, read_state
from accel_gpt.training.metrics import read_lines
from accel_gpt.training.state import TrainState

MOST_SAMPLES = 3
# of no use to others; prompts are text of the user's, which the samples show
LEFT_OUT = ("data.cache_dir", "sample.prompts", "checkpoint.allow_change")
HUB_IDS = ("data.prepare.dataset", "data.train.dataset")
RESULTS = (
    "eval/train_loss",
    "eval/val_loss",
    "eval/val_perplexity",
    "eval/val_bits_per_byte",
    "eval/hellaswag_acc",
    "eval/hellaswag_acc_norm",
)


@dataclass(frozen=True)
class CardFacts:
    """All that a card says of a run; nothing in it is private."""

    step: int
    tokens: int
    seconds: float
    processes: int
    model: ModelConfig
    vocab_size: int
    init_name: str | None  # of the weights it started from; None: from scratch
    base_model: str | None  # the same where it is a Hub id
    sources: tuple[Source, ...]
    epochs: Mapping[str, float]
    tokenizer: str
    alphabet: str | None  # of a chars tokenizer
    plan: Plan | None
    config: Mapping[str, Any]  # dotted keys
    changed: Mapping[str, Any]  # the same, only what is not the default
    results: Mapping[str, tuple[int, float]]  # key -> step, value
    records: tuple[Mapping[str, float], ...] = ()
    samples: tuple[tuple[int, str], ...] = ()  # step and text, the newest first
    launch: Mapping[str, Any] = field(default_factory=dict)  # the last of those that led here
    devices: tuple[str, ...] = ()  # "8 x NVIDIA H100", of every launch


def gather(run: Path, checkpoint: Path) -> CardFacts:
    """The facts of a checkpoint and of its run, which may be missing.

    Raises `CheckpointError` where the checkpoint cannot be read.
    """
    state, (model, vocab_size) = read_state(checkpoint), read_shape(checkpoint)
    config, records = public_config(state.config), read_records(run, state.step)
    start = str(state.config.get("model.init_from") or "scratch")
    launches = read_launches(run, state.step)
    kind, alphabet = tokenizer_of(checkpoint)
    return CardFacts(
        *(state.step, state.tokens, state.seconds, state.world_size, model, vocab_size),
        init_name=None if start == "scratch" else start_name(start) or "another model",
        base_model=None if start == "scratch" else hub_model(start),
        sources=sources_of(state),
        epochs=last_values(records, "data/epochs"),
        tokenizer=kind,
        alphabet=alphabet,
        plan=plan_of(state),
        config=config,
        changed=changed(config),
        results=results_of(records, state),
        records=records,
        samples=read_samples(run, state.step),
        launch=public_launch(launches[-1]) if launches else {},
        devices=tuple(dict.fromkeys(filter(None, map(device_of, launches)))),
    )


# --------------------------------------------------------------------------- config


def public_config(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a config of ours has, their texts as names without places."""
    known = [key for key in leaves(Config) if key not in (*LEFT_OUT, "data.train")]
    public = {key: public_value(key, flat[key]) for key in known if key in flat}
    train = flat.get("data.train")
    if isinstance(train, list):
        public["data.train"] = [
            {"path": public_value("path", s.get("path")) or "data", "weight": s.get("weight", 1.0)}
            for s in train
            if isinstance(s, Mapping)
        ]
    elif train:
        public["data.train"] = public_value("data.train", train) or "data"
    stream = [key for key in leaves(TextStream, "data.train.") if key in flat]
    public |= {key: public_value(key, flat[key]) for key in stream}
    hidden = [key for key, value in public.items() if value is None and flat[key] is not None]
    return {key: value for key, value in public.items() if key not in hidden}


def public_value(key: str, value: Any) -> Any:
    """Numbers as they are, texts as names; None for what must not be told."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        named = [public_value(key, item) for item in value]
        return [item for item in named if item is not None]
    if not isinstance(value, str):
        return None
    if key in HUB_IDS and (name := hub_dataset(value)):
        return name
    if key == "model.init_from":
        return hub_model(value) or start_name(value)
    if value.startswith("hf://") and (name := hub_dataset(value)):
        return f"hf://datasets/{name}"
    return public_name(value)


def start_name(source: str) -> str | None:
    """Name of the run, folder or Hub id that the weights came from, without a revision."""
    return public_name(re.sub(r"(?<=/)([\w.-]+)@[\w.-]+$", r"\1", source))


def plan_of(state: TrainState) -> Plan | None:
    """Batch and length of the run; None where its config is not one of this version."""
    try:
        return make_plan(build(Config, state.config), state.world_size)
    except (UserError, TypeError, ValueError):
        return None


def tokenizer_of(checkpoint: Path) -> tuple[str, str | None]:
    """Kind of the tokenizer beside the weights, and the characters of one of characters."""
    try:
        content = read_json(checkpoint / "tokenizer.json")
    except (OSError, ValueError):
        return "unknown", None
    if not isinstance(content, dict):
        return "unknown", None
    model = content.get("model")
    kind = content.get("kind") or (model.get("type") if isinstance(model, dict) else None)
    chars = content.get("chars")
    return public_name(str(kind or "unknown")) or "unknown", chars if isinstance(
        chars, str
    ) else None


# --------------------------------------------------------------------------- the run


def read_records(run: Path, step: int) -> tuple[Mapping[str, float], ...]:
    """The lines of metrics.jsonl up to `step`."""
    found = []
    for line in read_lines(run / "metrics.jsonl"):
        try:
            record = load_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and is_number(record.get("step")) and record["step"] <= step:
            found.append(record)
    return tuple(found)


def is_number(value: object) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and abs(value) < float("inf")


def last_values(records: tuple[Mapping[str, float], ...], prefix: str) -> dict[str, float]:
    """The newest number of each key that is `prefix` or begins with it, by what follows."""
    found = {}
    for record in records:
        for key, value in record.items():
            if is_number(value) and (key == prefix or key.startswith(f"{prefix}/")):
                name = key.removeprefix(prefix).removeprefix("/")
                found[public_source(name) if name else ""] = float(value)
    return found


def results_of(
    records: tuple[Mapping[str, float], ...], state: TrainState
) -> dict[str, tuple[int, float]]:
    """The newest of each figure of `RESULTS`, and the step at which it was measured."""
    found = {
        key: (int(record["step"]), float(record[key]))
        for record in records
        for key in RESULTS
        if is_number(record.get(key))
    }
    if "eval/val_loss" not in found and is_number(state.val_loss):
        found["eval/val_loss"] = (state.step, float(state.val_loss or 0))
    return found


def read_samples(run: Path, step: int) -> tuple[tuple[int, str], ...]:
    """Steps and texts of the newest samples up to `step`, at most `MOST_SAMPLES`."""
    steps = [pair for pair in sample_files(run).items() if pair[0] <= step]
    found: list[tuple[int, str]] = []
    for number, path in reversed(steps):
        found += [(number, text) for text in texts_in(path)][: MOST_SAMPLES - len(found)]
    return tuple(found)


def read_launches(run: Path, step: int) -> list[Mapping[str, Any]]:
    """The launches of run.json that led to `step`."""
    try:
        content = read_json(run / "run.json")
        launches = [one for one in content["launches"] if isinstance(one, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [one for i, one in enumerate(launches) if i == 0 or one.get("step", 0) < step]


def public_launch(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, commit and precision, each only in the form that it must have."""
    versions = launch.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    commit, precision = str(launch.get("commit")), launch.get("mixed_precision")
    return {
        "versions": {
            name: str(versions[name])
            for name in ("python", *PACKAGES)
            if re.fullmatch(r"[\w.+!-]{1,40}", str(versions.get(name, "")))
        },
        "commit": commit if re.fullmatch(r"[0-9a-f]{7,64}(-dirty)?", commit) else None,
        "mixed_precision": precision if precision in ("no", "bf16", "fp16", "fp8") else None,
    }


def device_of(launch: Mapping[str, Any]) -> str | None:
    """`8 x NVIDIA H100`."""
    device, processes = launch.get("device"), launch.get("processes")
    if not isinstance(device, str) or not isinstance(processes, int) or "/" in device:
        return None
    return f"{processes} x {' '.join(device.split())}"
