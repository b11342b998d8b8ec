"""The model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

`model_card.jinja` is the template; its values are numbers, and texts that `public.py` lets through.
"""

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import build, changed_keys, to_nested
from accel_gpt.config.plan import make_plan, plural
from accel_gpt.cost.flops import flops_per_token, parameter_counts
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.shards import open_split
from accel_gpt.data.sources import is_url, trained_sources
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError
from accel_gpt.hub.public import (
    hub_dataset,
    hub_model,
    initial_model_name,
    public_config,
    public_launch,
    public_name,
    public_records,
    public_source,
)
from accel_gpt.report.plots import loss_curves, short
from accel_gpt.training.checkpoint import read_shape, read_state
from accel_gpt.training.run_folder import RunFolder, is_number, number
from accel_gpt.training.state import TrainState

MOST_SAMPLES, LONGEST_SAMPLE = 3, 3000  # texts, characters of one
# controls, and what turns text around, hides in it or ends a line for some readers of Markdown
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
    license: str | None = None,  # noqa: A002
    data_license: str | None = None,
) -> None:
    """Write README.md, and loss.png if the run has a curve, into `folder`, which exists.

    `repo`: user/name; `model_class`: of transformers; `dtype`: of the exported weights. Raises
    `CheckpointError` for an unreadable checkpoint.
    """
    state = read_state(checkpoint)
    records = [record for record in public_records(run) if record["step"] <= state.step]
    newest = {
        key: (record["step"], value)
        for record in records
        for key, value in record.items()
        if is_number(value)
    }
    has_curve = bool({"train/loss", "eval/val_loss"} & newest.keys())
    if is_number(state.val_loss):
        newest.setdefault("eval/val_loss", (state.step, state.val_loss))
    if has_curve:
        loss_curves(records, folder / "loss.png")
    values = values_of_model(checkpoint, state) | values_of_run(run, state)
    values |= {
        "state": state,
        "newest": newest,
        "has_curve": has_curve,
        "repo": repo,
        "model_class": model_class,
        "model_type": re.sub(r"(LMHeadModel|ForCausalLM)$", "", model_class).lower(),
        "dtype": dtype,
        "license": single_line(license or ""),
        "data_license": data_license,
        "tokenizer": tokenizer.kind,
        "prompt": json.dumps(usable_prompt(tokenizer), ensure_ascii=False),
    }
    (folder / "README.md").write_text(render(values), encoding="utf-8")


def values_of_model(checkpoint: Path, state: TrainState) -> dict[str, Any]:
    """Return the values of the template that describe the model and where its weights came from."""
    model, vocab_size = read_shape(checkpoint)
    parameters = parameter_counts(model, vocab_size)
    init_from = state.config.get("model.init_from", "scratch")
    scratch = init_from == "scratch"
    return {
        "init_name": None if scratch else initial_model_name(init_from) or "another model",
        "base_model": None if scratch else hub_model(init_from),
        "model": model,
        "vocab_size": vocab_size,
        "parameters": parameters,
        "size": short(float(f"{parameters['total_unpadded']:.3g}")),
        "flops": flops_per_token(model, vocab_size) * state.tokens,
    }


def values_of_run(run: RunFolder, state: TrainState) -> dict[str, Any]:
    """Return the values of the template that describe the run up to the checkpoint."""
    config, sources = public_config(state.config), sources_of(state)
    hub_ids = list(dict.fromkeys(one["hub_id"] for one in sources if one.get("hub_id")))
    data_name = " + ".join(source.get("hub_id") or source["name"] for source in sources)
    # those that led to the checkpoint
    launches = [
        public_launch(launch)
        for index, launch in enumerate(run.launches)
        if index == 0 or number(launch.get("step")) < state.step
    ]
    devices = (f"{one['processes']} x {one['device']}" for one in launches if one["device"])
    launch = launches[-1] if launches else {}
    try:
        plan = make_plan(build(Config, state.config), state.world_size)
    except (UserError, TypeError, ValueError):  # the config of another version
        plan = None
    text = yaml.safe_dump(to_nested(changed_keys(config)), sort_keys=False, allow_unicode=True)
    sampled = sorted((step for step in run.samples if step <= state.step), reverse=True)
    samples = ((step, text) for step in sampled for text in run.sample_texts(step))
    return {
        "plan": plan,
        "config": config,
        "yaml": text.rstrip(),
        "sources": sources,
        "hub_ids": hub_ids,
        "data_name": data_name,
        # the Hub takes nothing but what looks like an id
        "data_type": hub_ids[0] if hub_ids else re.sub(r"[^\w.-]+", "-", data_name),
        "samples": list(islice(samples, MOST_SAMPLES)),
        "launch": launch,
        "hardware": "; then ".join(dict.fromkeys(devices)),
        "precision": launch.get("mixed_precision") or config.get("train.mixed_precision"),
    }


def sources_of(state: TrainState) -> list[dict[str, Any]]:
    """Return the sources of the data, each with its public name and share of the sequences; with
    its Hub id and tokens, where its folder is still there, unchanged.
    """
    config = state.config
    train = config.get("data.train")
    paths = [source.get("path") for source in train] if isinstance(train, list) else [train]
    folders = dict(read_folder(str(path)) for path in paths)
    recorded = trained_sources(vars(state))
    total = sum(source.weight for source in recorded)
    found = [
        {
            "name": public_source(source.name),
            "share": source.weight / total,
            **folders.get(source.fingerprint, {}),
        }
        for source in recorded
    ]
    if len(found) == 1:
        prepare = {key: config.get(f"data.prepare.{key}") for key in ("source", "path", "dataset")}
        origins = ({"path": paths[0]}, prepare)
        found[0]["name"] = public_name(str(paths[0] or "")) or "data"
        found[0].setdefault("hub_id", next(filter(None, map(hub_id_of, origins)), None))
    return found


def hub_id_of(prepared: Mapping[str, Any]) -> str | None:
    """Return the Hub data set that data was prepared from, if any."""
    if prepared.get("source") == "dataset":
        return hub_dataset(str(prepared.get("dataset")))
    path = str(prepared.get("path"))
    return hub_dataset(path) if path.startswith("hf://") else None


def read_folder(path: str) -> tuple[str, dict[str, Any]]:
    """Return fingerprint, Hub id and tokens of a data folder; ("", {}) if it is not a local one."""
    try:
        if is_url(path) or not (Path(path) / INDEX).is_file():
            return "", {}
        train, index = open_split(path, "train"), read_index(Path(path))
        val = open_split(path, "val").tokens if index.splits.get("val") else None
    except (UserError, OSError):
        return "", {}
    repo = hub_id_of(index.prepared)
    return train.fingerprint, {"hub_id": repo, "train_tokens": train.tokens, "val_tokens": val}


def usable_prompt(tokenizer: Tokenizer) -> str:
    """Return a word that the tokenizer can encode."""
    try:
        tokenizer.encode("The")
    except UserError:  # a vocabulary of characters without these
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
    return Markup(re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", single_line(str(value))))


def code(text: str) -> Markup:
    """Quote a name as code."""
    return Markup(f"`{single_line(text).replace('`', '')}`")


def fenced(text: str, language: str) -> Markup:
    """Put text into a block of code that it cannot end, without control characters."""
    text = UNSEEN.sub("\ufffd", text.replace("\r\n", "\n"))
    if len(text) > LONGEST_SAMPLE:
        text = f"{text[:LONGEST_SAMPLE]} [...]"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}{language}\n{text}\n{fence}")


def single_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return " ".join(UNSEEN.sub(" ", text).split())
