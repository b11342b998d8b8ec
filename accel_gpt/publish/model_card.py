"""Write the model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

Reads the checkpoint, the run's folder and the template `model_card.jinja`. The values of the
template are numbers, and texts that `redaction.py` allows.

The losses are in the header, as `model-index`. The Hub's newer `.eval_results/*.yaml` takes scores
of registered benchmarks only (https://huggingface.co/docs/hub/eval-results, read in November 2026).
"""

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan, plural
from accel_gpt.config.values import build, changed_keys, to_nested
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError
from accel_gpt.hub import is_repo
from accel_gpt.model.gpt import GPT
from accel_gpt.publish.redaction import (
    public_config,
    public_name,
    public_records,
    public_source,
    public_versions,
)
from accel_gpt.report.plots import loss_curves, short
from accel_gpt.runs.checkpoint import read_shape, read_state
from accel_gpt.runs.folder import RunFolder, is_benchmark, is_number, number
from accel_gpt.runs.state import TrainState
from accel_gpt.transformers_io.pretrained import GPT2_SHAPES


@dataclass(frozen=True)
class Measure:
    """A result of an evaluation that the card shows."""

    key: str  # of metrics.jsonl
    title: str
    form: str
    metric: str | None = None  # its name on the Hub; None: it is not in the header


MEASURES = (
    Measure("eval/val_loss", "Val loss, nats per token", "%.4f", "loss"),
    Measure("eval/val_perplexity", "Val perplexity per token", "%.2f", "perplexity"),
    Measure("eval/val_bits_per_byte", "Val bits per byte", "%.4f", "bits_per_byte"),
    Measure("eval/train_loss", "Train loss, nats per token", "%.4f"),
)
MOST_SAMPLES = 3
LONGEST_SAMPLE = 3000  # characters
# control characters and marks of text direction: invisible, or line ends in some viewers
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def write_card(
    run: RunFolder,
    checkpoint: Path,
    tokenizer: Tokenizer,
    folder: Path,
    repo: str,
    model_class: str,
    dtype: str,
    license: str | None = None,  # noqa: A002 - as the Hub names it
    language: str | None = None,
) -> None:
    """Write README.md, and loss.png if the run has a curve, into `folder`, which exists.

    `repo`: user/name; `model_class`: of transformers; `dtype`: of the exported weights;
    `language`: codes of the languages of the text, separated by commas. Raises `CheckpointError`
    for an unreadable checkpoint.
    """
    state = read_state(checkpoint)
    records = [record for record in public_records(run) if record["step"] <= state.step]
    newest = newest_metrics(records)
    has_curve = "train/loss" in newest or "eval/val_loss" in newest
    if is_number(state.val_loss):
        newest.setdefault("eval/val_loss", (state.step, state.val_loss))
    if has_curve:
        loss_curves(records, folder / "loss.png")
    values = {
        **values_of_model(checkpoint, state),
        **values_of_run(run, state),
        "state": state,
        "own": state.code.functions if state.code else [],
        "newest": newest,
        "has_curve": has_curve,
        "repo": repo,
        "model_class": model_class,
        "dtype": dtype,
        "tokenizer": tokenizer.kind,
        "prompt": json.dumps(usable_prompt(tokenizer), ensure_ascii=False),
        "measures": known_measures(newest),
    }
    values["header"] = header(values, license, language)
    (folder / "README.md").write_text(render(values), encoding="utf-8")


def known_measures(newest: Mapping[str, Any]) -> list[Measure]:
    """Return the losses that a run recorded, and each result of a benchmark."""
    benchmarks = [key for key in newest if is_benchmark(key)]
    return [
        *(measure for measure in MEASURES if measure.key in newest),
        *(Measure(key, key.removeprefix("eval/"), "%.4f") for key in benchmarks),
    ]


def header(
    values: Mapping[str, Any],
    license: str | None,  # noqa: A002 - as the Hub names it
    language: str | None,
) -> str:
    """Return the metadata of the card as YAML, as the Hub reads them."""
    from huggingface_hub import ModelCardData

    results = [
        evaluation_result(measure, values)
        for measure in values["measures"]
        if measure.metric is not None
    ]
    model_type = re.sub(r"(LMHeadModel|ForCausalLM)$", "", values["model_class"]).lower()
    data = ModelCardData(
        language=[one.strip() for one in single_line(language or "").split(",") if one.strip()]
        or None,
        license=single_line(license or "").lower() or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=values["base_model"],
        datasets=values["hub_datasets"] or None,
        tags=["accel_gpt", model_type, "text-generation", "pretraining"],
        model_name=values["repo"].rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def evaluation_result(measure: Measure, values: Mapping[str, Any]) -> Any:
    """Return the newest value of a measure, for the header of a card."""
    from huggingface_hub import EvalResult

    data_type = re.sub(r"[^\w.-]+", "-", values["data_name"])  # the Hub accepts only an id here
    data_name = f"{values['data_name']}, held-out text"
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=data_type,
        dataset_name=data_name,
        dataset_split="val",
        metric_type=str(measure.metric),
        metric_name=measure.title,
        metric_value=round(float(values["newest"][measure.key][1]), 6),
    )


def newest_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Any]]:
    """Return the last number of each metric, with its step."""
    newest: dict[str, tuple[int, Any]] = {}
    for record in records:
        for key, value in record.items():
            if is_number(value):
                newest[key] = (record["step"], value)
    return newest


def values_of_model(checkpoint: Path, state: TrainState) -> dict[str, Any]:
    """Return the values of the template that describe the model and where its weights came from."""
    config, vocab_size = read_shape(checkpoint)
    model = GPT.allocate(config, vocab_size, device="meta")
    trained = model.parameter_count()
    tables = 1 if config.tie_embeddings else 2  # with rows that pad the vocabulary
    parameters = trained - tables * (model.padded_vocab_size - vocab_size) * config.n_embd
    init_from = state.config.get("model.init_from", "scratch")
    return {
        "init_name": None if init_from == "scratch" else public_name(init_from),
        "base_model": base_model(init_from),
        "model": config,
        "vocab_size": vocab_size,
        "parameters": parameters,
        "trained_parameters": trained,
        "size": short(float(f"{parameters:.3g}")),
        "flops": model.flops_per_token() * state.tokens,
    }


def values_of_run(run: RunFolder, state: TrainState) -> dict[str, Any]:
    """Return the values of the template that describe the run up to the checkpoint."""
    config = public_config(state.config)
    sources = sources_of(state)
    data_name = " + ".join(source["name"] for source in sources)
    launches = launches_before(run, state.step)
    launch = launches[-1] if launches else {}
    devices = [f"{one.get('processes')} x {one['device']}" for one in launches if one.get("device")]
    settings = to_nested(changed_keys(config))
    return {
        "plan": plan_of(state),
        "config": config,
        "yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip(),
        "sources": sources,
        "hub_datasets": hub_datasets(state.config),
        "data_name": data_name,
        "samples": newest_samples(run, state.step),
        "launch": launch,
        "hardware": "; then ".join(dict.fromkeys(devices)),
        "precision": launch.get("mixed_precision") or config.get("train.mixed_precision"),
    }


def base_model(init_from: str) -> str | None:
    """Return the Hub id of the model that a run began from; None for a folder of this machine."""
    name = init_from.partition("@")[0]
    if name in GPT2_SHAPES:
        return f"openai-community/{name}"
    is_id = "/" in name and is_repo(name) and public_name(name) != "data"
    return name if is_id and not Path(name).exists() else None


def hub_datasets(config: Mapping[str, Any]) -> list[str]:
    """Return the Hub ids of the data sets that a run was trained on.

    They are the text that its data folders were prepared from, and its shards on the Hub.
    """
    prepared = [
        {
            "source": config.get("data.prepare.source"),
            "dataset": config.get("data.prepare.dataset"),
        }
    ]
    names = []
    for path in train_names(config):
        if path.startswith("hf://datasets/"):
            repo = path.partition("?")[0].removeprefix("hf://datasets/").partition("@")[0]
            names.append("/".join(repo.split("/")[:2]))
        elif not is_url(path) and (Path(path) / INDEX).is_file():
            with contextlib.suppress(UserError):
                prepared.append(read_index(Path(path)).prepared)
    for settings in prepared:
        if settings.get("source") == "dataset":
            names.append(str(settings.get("dataset")))
    found = [name for name in names if "/" in name and is_repo(name) and not Path(name).exists()]
    return list(dict.fromkeys(found))


def train_names(config: Mapping[str, Any]) -> list[str]:
    """Return the folders and URLs of `data.train`."""
    train = config.get("data.train")
    paths = [source.get("path") for source in train] if isinstance(train, list) else [train]
    return [str(path or "") for path in paths]


def launches_before(run: RunFolder, step: int) -> list[dict[str, Any]]:
    """Return the launches that led to the checkpoint of a step, with public versions."""
    return [
        {**launch, "versions": public_versions(launch.get("versions") or {})}
        for index, launch in enumerate(run.launches)
        if index == 0 or number(launch.get("step")) < step
    ]


def plan_of(state: TrainState) -> Plan | None:
    """Return the plan of a run; None if its config is not valid here."""
    try:
        return make_plan(build(Config, state.config), state.world_size)
    except UserError:
        return None


def newest_samples(run: RunFolder, last_step: int) -> list[tuple[int, str]]:
    """Return the newest samples up to a step, each with its step."""
    samples: list[tuple[int, str]] = []
    for step in sorted(run.samples, reverse=True):
        if step <= last_step and len(samples) < MOST_SAMPLES:
            samples += [(step, text) for text in run.sample_texts(step)]
    return samples[:MOST_SAMPLES]


def sources_of(state: TrainState) -> list[dict[str, Any]]:
    """Return the sources of the data: public name, share of the sequences, and tokens.

    The tokens are there only if the folder of the source is, unchanged.
    """
    paths = train_names(state.config)
    tokens = dict(tokens_of_folder(path) for path in paths)
    recorded = state.data_sources
    total = sum(source.weight for source in recorded)
    sources = [
        {
            "name": public_source(source.name),
            "share": source.weight / total,
            **tokens.get(source.fingerprint, {}),
        }
        for source in recorded
    ]
    if len(sources) == 1:
        sources[0]["name"] = public_name(paths[0])
    return sources


def tokens_of_folder(path: str) -> tuple[str, dict[str, Any]]:
    """Return fingerprint and tokens of a data folder; ("", {}) if it is not a local one."""
    if is_url(path) or not (Path(path) / INDEX).is_file():
        return "", {}
    try:
        train = open_split(path, "train")
    except UserError:
        return "", {}
    has_val = read_index(Path(path)).splits.get("val")
    val_tokens = open_split(path, "val").tokens if has_val else None
    return train.fingerprint, {"train_tokens": train.tokens, "val_tokens": val_tokens}


def usable_prompt(tokenizer: Tokenizer) -> str:
    """Return a word that the tokenizer can encode."""
    try:
        tokenizer.encode("The")
        return "The"
    except UserError:  # a vocabulary of characters without these
        characters = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        return next((one for one in characters if one.isalnum()), characters[0])


# --------------------------------------------------------------------------- Markdown


def render(values: Mapping[str, Any]) -> str:
    """Fill in the template; every value is escaped for Markdown, except code."""
    environment = Environment(
        autoescape=True, finalize=to_markdown, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": code, "fenced": fenced, "plural": plural, "word": shell_word}
    template = Path(__file__).with_name("model_card.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values)


def to_markdown(value: object) -> Markup:
    """Escape a text, on one line, and format a number."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, int):
        return Markup(f"{value:,}")
    return Markup(re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", single_line(str(value))))


def code(text: str) -> Markup:
    """Quote a name as code."""
    return Markup(f"`{single_line(text).replace('`', '')}`")


def shell_word(text: str) -> Markup:
    """Quote a name for a shell in a block of code."""
    return Markup(shlex.quote(single_line(text).replace("`", "")))


def fenced(text: str, language: str) -> Markup:
    """Put text into a block of code that the text cannot end; replace control characters."""
    text = UNSEEN.sub("\ufffd", text.replace("\r\n", "\n"))
    if len(text) > LONGEST_SAMPLE:
        text = f"{text[:LONGEST_SAMPLE]} [...]"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}{language}\n{text}\n{fence}")


def single_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return " ".join(UNSEEN.sub(" ", text).split())
