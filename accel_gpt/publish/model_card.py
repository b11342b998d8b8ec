"""Write the model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

Reads the checkpoint, the run's folder and the template `model_card.jinja`. The values of the
template are numbers, and texts that `redaction.py` allows.

The losses are in the header, as `model-index`. The Hub's newer `.eval_results/*.yaml` takes scores
of registered benchmarks only (https://huggingface.co/docs/hub/eval-results, read in November 2026).
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from accel_gpt.config.model import ModelConfig
from accel_gpt.config.values import changed_keys, to_nested
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError
from accel_gpt.files import is_local
from accel_gpt.hub import OPENAI, is_repo
from accel_gpt.model.sizes import flops_per_token, parameter_counts
from accel_gpt.publish.redaction import (
    public_config,
    public_name,
    public_records,
    public_source,
)
from accel_gpt.report.plots import loss_curves, short
from accel_gpt.runs.checkpoint import read_shape, read_state
from accel_gpt.runs.folder import RunFolder, is_benchmark, is_number, number
from accel_gpt.runs.state import TrainState

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

# key of metrics.jsonl -> its title, and its name in the header
MEASURES = MappingProxyType(
    {
        "eval/val_loss": ("Val loss, nats per token", "loss"),
        "eval/val_perplexity": ("Val perplexity per token", "perplexity"),
        "eval/val_bits_per_byte": ("Val bits per byte", "bits_per_byte"),
    }
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
    from huggingface_hub import ModelCard

    state = read_state(checkpoint)
    records = [record for record in public_records(run) if record["step"] <= state.step]
    newest = {key: value for record in records for key, value in record.items() if is_number(value)}
    has_curve = "train/loss" in newest or "eval/val_loss" in newest
    if has_curve:
        loss_curves(records, folder / "loss.png")
    if is_number(state.val_loss):
        newest.setdefault("eval/val_loss", state.val_loss)
    data_name = " + ".join(source_names(state))
    results = {key: value for key, value in newest.items() if key in MEASURES or is_benchmark(key)}
    init_from = state.config.get("model.init_from", "scratch")
    settings = to_nested(changed_keys(public_config(state.config)))
    config, vocab_size = read_shape(checkpoint)
    flops = flops_per_token(config, vocab_size) * state.tokens
    facts = {
        "Class": f"{model_class} of transformers",
        **facts_of_model(config, vocab_size),
        "Tokenizer": f"{tokenizer.kind}, {vocab_size:,} tokens",
        "Weights stored as": dtype,
        "Data": data_name,
        **facts_of_run(run, state),
        "Compute": f"{flops:.2e} FLOP, as 6 N + 12 L H D T for each token (PaLM, appendix B)",
    }
    header = card_header(
        repo=repo,
        model_class=model_class,
        init_from=init_from,
        datasets=hub_datasets(state.config),
        data_name=data_name,
        results=results,
        license=license,
        language=language,
    )
    body = render(
        {
            "repo": repo,
            "init_name": None if init_from == "scratch" else public_name(init_from),
            "data_name": data_name,
            "size": short(float(f"{facts['Parameters']:.3g}")),
            "state": state,
            "val_loss": results.get("eval/val_loss"),
            "results": {MEASURES.get(key, [key])[0]: value for key, value in results.items()},
            "has_curve": has_curve,
            "samples": newest_samples(run, state.step),
            "facts": {title: value for title, value in facts.items() if value},
            "prompt": json.dumps(usable_prompt(tokenizer), ensure_ascii=False),
            "new_tokens": min(200, config.block_size // 2),
            "yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip(),
        }
    )
    ModelCard(f"---\n{header.to_yaml()}\n---\n\n{body}").save(folder / "README.md")


def facts_of_model(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the sizes of a model, by title."""
    return {
        "Parameters": parameter_counts(config, vocab_size)["total_unpadded"],
        "Layers": config.n_layer,
        "Attention heads": f"{config.n_head} of {config.head_size} channels",
        "Key and value heads": config.kv_heads,
        "Channels": config.n_embd,
        "Context": f"{config.block_size:,} tokens",
    }


def facts_of_run(run: RunFolder, state: TrainState) -> dict[str, Any]:
    """Return what led to a checkpoint, by title."""
    launches = [
        launch
        for index, launch in enumerate(run.launches)
        if index == 0 or number(launch.get("step")) < state.step
    ]
    last = launches[-1] if launches else {}
    devices = [
        f"{launch.get('processes')} x {launch['device']}"
        for launch in launches
        if launch.get("device")
    ]
    precision = last.get("mixed_precision")
    return {
        "Steps": state.step,
        "Tokens seen": state.tokens,
        "Hardware": "; then ".join(dict.fromkeys(devices)),
        "Precision": "fp32" if precision == "no" else precision,
        "Time": f"{state.seconds / 3600:.1f} hours, evaluation and saving included",
        "Commit of accel_gpt": last.get("commit"),
    }


def card_header(
    repo: str,
    model_class: str,
    init_from: str,
    datasets: list[str],
    data_name: str,
    results: Mapping[str, float],
    license: str | None,  # noqa: A002 - as the Hub names it
    language: str | None,
) -> "ModelCardData":
    """Return the metadata of the card, as the Hub reads them.

    `results`: metrics by key; the header shows the `MEASURES`.
    """
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"[^\w.-]+", "-", data_name),  # the Hub accepts only an id here
            dataset_name=f"{data_name}, held-out text",
            dataset_split="val",
            metric_type=MEASURES[key][1],
            metric_name=MEASURES[key][0],
            metric_value=round(float(value), 6),
        )
        for key, value in results.items()
        if key in MEASURES
    ]
    languages = [code.strip() for code in single_line(language or "").split(",") if code.strip()]
    model_type = re.sub(r"(LMHeadModel|ForCausalLM)$", "", model_class).lower()
    return ModelCardData(
        language=languages or None,
        license=single_line(license or "").lower() or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id(init_from),
        datasets=datasets or None,
        tags=["accel_gpt", model_type, "text-generation", "pretraining"],
        model_name=repo.rpartition("/")[2] if evaluations else None,
        eval_results=evaluations or None,
    )


def hub_id(name: str) -> str | None:
    """Return a name as an id of the Hub; None for a path of this machine."""
    repo = name.partition("@")[0]
    if repo in OPENAI:
        return f"openai-community/{repo}"
    is_id = "/" in repo and is_repo(repo) and public_name(repo) != "data"
    return repo if is_id and not Path(repo).exists() and not is_local(repo) else None


def hub_datasets(config: Mapping[str, Any]) -> list[str]:
    """Return the Hub ids of the data sets that a run was trained on: its text, or its shards."""
    names = [config.get("data.prepare.source")]
    for path in recorded_paths(config):
        if path.startswith("hf://datasets/"):
            names.append("/".join(path.removeprefix("hf://datasets/").split("/")[:2]))
    found = (hub_id(str(name or "").partition("?")[0]) for name in names)
    return list(dict.fromkeys(filter(None, found)))


def recorded_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the folders and URLs of `data.train`."""
    train = config.get("data.train")
    paths = [source.get("path") for source in train] if isinstance(train, list) else [train]
    return [str(path or "") for path in paths]


def source_names(state: TrainState) -> list[str]:
    """Return the public names of the data sources, in a mixture with their shares."""
    sources = state.data_sources
    if len(sources) < 2:
        return [public_name(path) for path in recorded_paths(state.config)]
    total = sum(source.weight for source in sources)
    return [f"{public_source(one.name)} ({one.weight / total:.1%})" for one in sources]


def newest_samples(run: RunFolder, last_step: int) -> list[tuple[int, str]]:
    """Return the newest samples up to a step, each with its step."""
    steps = [step for step in sorted(run.samples, reverse=True) if step <= last_step]
    samples = [(step, text) for step in steps for text in run.sample_texts(step)]
    return samples[:MOST_SAMPLES]


def usable_prompt(tokenizer: Tokenizer) -> str:
    """Return a word that the tokenizer can encode."""
    try:
        tokenizer.encode("The")
        return "The"
    except UserError:  # a vocabulary of characters without these
        characters = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        return next((char for char in characters if char.isalnum()), characters[0])


# --------------------------------------------------------------------------- Markdown


def render(values: Mapping[str, Any]) -> str:
    """Fill in the template; every value is escaped for Markdown, except code."""
    environment = Environment(
        autoescape=True, finalize=to_markdown, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"fenced": fenced, "word": shell_word}
    template = Path(__file__).with_name("model_card.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values)


def to_markdown(value: object) -> Markup:
    """Escape a text, on one line, and format a number."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, int):
        return Markup(f"{value:,}")
    if isinstance(value, float):
        return Markup(f"{value:.4f}")
    return Markup(re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", single_line(str(value))))


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
