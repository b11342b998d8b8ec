"""The model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

`model_card.jinja` is the template; its values are numbers, and texts that `public.py` lets through.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import build, changed_keys
from accel_gpt.config.plan import Plan, make_plan, plural
from accel_gpt.cost.flops import flops_per_token, parameter_counts
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import INDEX, open_split, read_index
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError
from accel_gpt.hub.client import check_repo
from accel_gpt.hub.public import (
    hub_dataset,
    hub_model,
    initial_model_name,
    public_config,
    public_launch,
    public_record,
)
from accel_gpt.redact import public_name, public_source, redact_tokens
from accel_gpt.report.plots import loss_curves, short
from accel_gpt.training.checkpoint import read_shape, read_state
from accel_gpt.training.run_folder import RunFolder, is_number, number
from accel_gpt.training.state import TrainState

MOST_SAMPLES, LONGEST_SAMPLE = 3, 3000  # texts, characters of one
MEASURES = (  # key of the metrics; title in the table; type in the model-index; format
    ("eval/val_loss", "Val loss, nats per token", "loss", "{:.4f}"),
    ("eval/val_perplexity", "Val perplexity per token", "perplexity", "{:.2f}"),
    ("eval/val_bits_per_byte", "Val bits per byte", "bits_per_byte", "{:.4f}"),
    ("eval/train_loss", "Train loss, nats per token", "", "{:.4f}"),
    ("eval/hellaswag_acc", "HellaSwag accuracy", "acc", "{:.2%}"),
    ("eval/hellaswag_acc_norm", "HellaSwag accuracy, normalized by length", "acc_norm", "{:.2%}"),
)
# what turns text around, hides in it or ends a line for some readers but not for Markdown's
UNSEEN = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class CardOptions:
    """What a card shows besides the run."""

    repo: str  # user/name
    model_class: str  # of transformers
    dtype: str  # of the exported weights
    license: str | None = None  # as the Hub names it
    data_license: str | None = None


def write_card(
    run: RunFolder, checkpoint: Path, tokenizer: Tokenizer, options: CardOptions, folder: Path
) -> None:
    """Write README.md, and loss.png if the run has a curve, into `folder`, which exists.

    Raises `UserError` for an invalid repository, `CheckpointError` for an unreadable checkpoint.
    """
    check_repo(options.repo)
    state = read_state(checkpoint)
    records = [public_record(r) for r in run.records() if r["step"] <= state.step]
    values = card_values(run, state, checkpoint, records)
    if values["has_curve"]:
        loss_curves(records, folder / "loss.png")
    prompt = json.dumps(usable_prompt(tokenizer), ensure_ascii=False)
    values |= {"options": options, "name": options.repo.rpartition("/")[2]}
    values |= {"tokenizer": tokenizer.kind, "prompt": prompt}
    text = f"---\n{metadata(values)}\n---\n\n{render(values)}"
    (folder / "README.md").write_text(redact_tokens(text), encoding="utf-8")


def card_values(
    run: RunFolder, state: TrainState, checkpoint: Path, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the values of the template that a run and its checkpoint give."""
    model, vocab_size = read_shape(checkpoint)
    config, sources = public_config(state.config), sources_of(state)
    results = read_results(records, state)
    init_from = str(state.config.get("model.init_from") or "scratch")
    from_scratch = init_from == "scratch"
    parameters = parameter_counts(model, vocab_size)
    val_tokens = [source.val_tokens or 0 for source in sources]
    held_out = [config.get("eval.tokens"), sum(val_tokens) if all(val_tokens) else 0]
    steps = {result["step"] for result in results.values()}
    # those that led to the checkpoint
    launches = [
        public_launch(launch)
        for index, launch in enumerate(run.launches)
        if index == 0 or number(launch.get("step")) < state.step
    ]
    launch = launches[-1] if launches else {}
    try:
        plan: Plan | None = make_plan(build(Config, state.config), state.world_size)
    except (AccelGPTError, TypeError, ValueError):  # the config of another version
        plan = None
    text = yaml.safe_dump(nested(changed_keys(config)), sort_keys=False, allow_unicode=True)
    return {
        "init_name": None if from_scratch else initial_model_name(init_from) or "another model",
        "base_model": None if from_scratch else hub_model(init_from),
        "state": state,
        "model": model,
        "vocab_size": vocab_size,
        "parameters": parameters,
        "size": short(float(f"{parameters['total_unpadded']:.3g}")),
        "flops": flops_per_token(model, vocab_size) * state.tokens,
        "plan": plan,
        "config": config,
        "yaml": text.rstrip(),
        "sources": sources,
        "data_name": " + ".join(source.hub_id or source.name for source in sources),
        "epochs": last_values(records, "data/epochs"),
        "results": results,
        "measured_at": steps.pop() if len(steps) == 1 else None,
        "held_out": min((tokens for tokens in held_out if tokens), default=0),
        "has_curve": any({"train/loss", "eval/val_loss"} & record.keys() for record in records),
        "samples": read_samples(run, state.step),
        "launch": launch,
        "launches": list({(one["device"], one["processes"]): one for one in launches}.values()),
        "precision": launch.get("mixed_precision") or config.get("train.mixed_precision"),
        "duration": duration(state.seconds),
        "device_hours": state.seconds * state.world_size / 3600,
    }


def metadata(values: Mapping[str, Any]) -> str:
    """Return the YAML block: what the Hub sorts models by, and the results."""
    from huggingface_hub import EvalResult, ModelCardData

    hub_ids = list(dict.fromkeys(source.hub_id for source in values["sources"] if source.hub_id))
    options, data_name, results = values["options"], values["data_name"], []
    for result in values["results"].values():
        if not result["type"]:
            continue
        swag = result["type"].startswith("acc")
        results.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type="Rowan/hellaswag" if swag else slug(" ".join(hub_ids) or data_name),
                dataset_name="HellaSwag" if swag else f"{data_name}, held-out text",
                dataset_split="validation" if swag else "val",
                metric_type=result["type"],
                metric_name=result["title"],
                metric_value=round(result["value"], 6),
            )
        )
    family = re.sub(r"(LMHeadModel|ForCausalLM)$", "", options.model_class).lower()
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=one_line(options.license or "").lower() or None,
        base_model=values["base_model"],
        datasets=hub_ids or None,
        tags=["accel_gpt", family, "text-generation", "pretraining"],
        model_name=values["name"],
        eval_results=results or None,
    )
    return data.to_yaml()


# --------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class DataSource:
    """One source of the data, by its public name; None: not known."""

    name: str
    share: float  # of the sequences
    hub_id: str | None = None
    train_tokens: int | None = None
    val_tokens: int | None = None


def sources_of(state: TrainState) -> list[DataSource]:
    """Return what a run was trained on; tokens only of folders that are still there, unchanged."""
    config = state.config
    train = config.get("data.train")
    if stream := config.get("data.train.dataset") or config.get("data.train.path"):
        repo = hub_dataset(str(stream)) if config.get("data.train.dataset") else None
        return [DataSource(repo or public_name(str(stream)) or "text", 1.0, repo)]
    paths = [source.get("path") for source in train] if isinstance(train, list) else [train]
    folders = dict(read_folder(str(path)) for path in paths if path)
    recorded = state.data_sources or [{"name": "data", "weight": 1.0}]
    total = sum(float(source["weight"]) for source in recorded)
    found = []
    for source in recorded:
        folder = folders.get(str(source.get("fingerprint")), {})
        name = public_source(str(source["name"]))
        if len(recorded) == 1:
            name = public_name(str(train)) or "data"
            if not folder:
                keys = ("source", "path", "dataset")
                prepare = {key: config.get(f"data.prepare.{key}") for key in keys}
                remote = str(train).startswith("hf://")
                folder = {"hub_id": hub_dataset(str(train)) if remote else hub_id_of(prepare)}
        found.append(DataSource(name, float(source["weight"]) / total, **folder))
    return found


def hub_id_of(prepared: Mapping[str, Any]) -> str | None:
    """Return the Hub data set that data was prepared from, if any."""
    if prepared.get("source") == "dataset":
        return hub_dataset(str(prepared.get("dataset")))
    path = str(prepared.get("path") or "")
    return hub_dataset(path) if prepared.get("source") and path.startswith("hf://") else None


def read_folder(path: str) -> tuple[str, dict[str, Any]]:
    """Return fingerprint, Hub id and tokens of a data folder; ("", {}) if it is not a local one."""
    try:
        if is_url(path) or not (Path(path) / INDEX).is_file():
            return "", {}
        train, index = open_split(path, "train"), read_index(Path(path))
        val = open_split(path, "val").tokens if index["splits"].get("val") else None
    except (AccelGPTError, OSError):
        return "", {}
    repo = hub_id_of(index.get("prepared") or {})
    return train.fingerprint, {"hub_id": repo, "train_tokens": train.tokens, "val_tokens": val}


def read_results(records: list[dict[str, Any]], state: TrainState) -> dict[str, dict[str, Any]]:
    """Return the newest value of each of `MEASURES`, and the step at which it was measured."""
    found = {}
    for key, title, kind, form in MEASURES:
        known = [r for r in records if is_number(r.get(key))]
        step, value = (known[-1]["step"], known[-1][key]) if known else (state.step, None)
        if key == "eval/val_loss" and value is None:
            value = state.val_loss
        if is_number(value):
            text = form.format(value)
            found[key] = {"title": title, "type": kind, "text": text, "value": value, "step": step}
    return found


def last_values(records: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Return the newest value of a key, or of `key/SOURCE` by source."""
    return {
        name.removeprefix(key).removeprefix("/"): value
        for record in records
        for name, value in record.items()
        if is_number(value) and (name == key or name.startswith(f"{key}/"))
    }


def read_samples(run: RunFolder, step: int) -> list[tuple[int, list[str]]]:
    """Return the newest samples up to `step`, the newest step first, `MOST_SAMPLES` in all."""
    found: list[tuple[int, list[str]]] = []
    left = MOST_SAMPLES
    for sampled in sorted((s for s in run.samples if s <= step), reverse=True):
        if texts := run.sample_texts(sampled)[:left]:
            found.append((sampled, texts))
            left -= len(texts)
    return found


def usable_prompt(tokenizer: Tokenizer) -> str:
    """Return a word that the tokenizer can encode."""
    try:
        tokenizer.encode("The")
    except AccelGPTError:  # a vocabulary of characters without these
        chars = map(tokenizer.decode, ([i] for i in range(tokenizer.vocab_size)))
        return next((char for char in chars if char.isalnum()), tokenizer.decode([0]))
    return "The"


# --------------------------------------------------------------------------- Markdown


def render(values: Mapping[str, Any]) -> str:
    """Fill in the template; every value is escaped for Markdown, except code."""
    environment = Environment(
        autoescape=True, finalize=to_markdown, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": code, "fenced": fenced, "plural": plural}
    template = Path(__file__).with_name("model_card.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values)


def to_markdown(value: object) -> Markup:
    """Escape a text, on one line, and format a number."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, int):
        return Markup(f"{value:,}")
    return Markup(re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", one_line(str(value))))


def code(text: str) -> Markup:
    """Quote a name as code."""
    return Markup(f"`{one_line(text).replace('`', '')}`")


def fenced(text: str, language: str) -> Markup:
    """Put text into a block of code that it cannot end; control characters are made visible."""
    text = CONTROLS.sub(
        lambda c: chr(0x2400 + ord(c[0]) if c[0] < " " else 0x2421), text.replace("\r\n", "\n")
    )
    text = UNSEEN.sub("\ufffd", text)
    if len(text) > LONGEST_SAMPLE:
        text = f"{text[:LONGEST_SAMPLE]} [...]"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}{language}\n{text}\n{fence}")


def one_line(text: str) -> str:
    """Return text without line breaks, control characters and tokens."""
    return " ".join(UNSEEN.sub(" ", CONTROLS.sub(" ", redact_tokens(text))).split())


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested mappings."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found


def duration(seconds: float) -> str:
    """Format seconds, as minutes or hours if they are many."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:,.1f} hours"


def slug(name: str) -> str:
    """Return a name in the form of a data set's id: word characters, at most one slash."""
    owner, _, rest = re.sub(r"[^\w./-]+", "-", name).strip("-").partition("/")
    return f"{owner}/{rest.replace('/', '-')}" if rest else owner
