"""Write the model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

Reads the checkpoint, the run's folder and the template `model_card.jinja`, which gets only what
`redaction.py` allows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from accel_gpt.config.values import changed_keys, to_nested
from accel_gpt.files import is_local
from accel_gpt.hub import OPENAI, is_repo
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.publish.redaction import public_config, public_name, public_records
from accel_gpt.report.plots import loss_curves, short
from accel_gpt.runs.checkpoint import read_shape, read_state
from accel_gpt.runs.folder import RunFolder, is_number, number

TEMPLATE = Path(__file__).with_name("model_card.jinja")


def write_card(
    run: RunFolder,
    checkpoint: Path,
    folder: Path,
    repo: str,
    dtype: str,
    license: str | None = None,  # noqa: A002 - as the Hub names it
) -> None:
    """Write README.md, and loss.png if the run has metrics, into `folder`, an exported model.

    `repo`: user/name; `dtype`: of the weights. Raises `CheckpointError` for an unreadable
    checkpoint.
    """
    from huggingface_hub import ModelCard, ModelCardData

    state = read_state(checkpoint)
    shape, vocab_size = read_shape(checkpoint)
    records = [record for record in public_records(run) if record["step"] <= state.step]
    if records:
        loss_curves(records, folder / "loss.png")
    newest = {key: value for record in records for key, value in record.items()}
    results = {
        key: value for key, value in newest.items() if key.startswith("eval/") and is_number(value)
    }
    launches = [x for x in run.launches if number(x.get("step")) < state.step]
    initial = state.initial_weights
    settings = to_nested(changed_keys(public_config(state.config)))
    header = ModelCardData(
        license=license.lower() if license else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id(initial.name) if initial else None,
        datasets=hub_datasets(state.config) or None,
        tags=["accel_gpt"],
    )
    card = ModelCard.from_template(
        header,
        template_path=str(TEMPLATE),
        repo=repo,
        parameters=short(parameter_counts(shape, vocab_size)["total_unpadded"]),
        init_name=public_name(initial.name) if initial else None,
        data_names=[public_name(path) for path in data_paths(state.config)],
        state=state,
        records=records,
        results=results,
        model_class=json.loads((folder / "config.json").read_bytes())["architectures"][0],
        shape=shape,
        vocab_size=vocab_size,
        dtype=dtype,
        launch=launches[-1] if launches else {},
        config_yaml=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
    )
    card.save(folder / "README.md")


def data_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the folders and URLs of `data.train`, of all stages."""
    paths: list[Any] = []
    for values in (config, *config.get("stages", ())):
        train = values.get("data.train")
        paths += [source.get("path") for source in train] if isinstance(train, list) else [train]
    return list(dict.fromkeys(str(path) for path in paths if path))


def hub_datasets(config: Mapping[str, Any]) -> list[str]:
    """Return the Hub ids of the data sets that a run was trained on: its text, or its shards."""
    names = [config.get("data.prepare.source")]
    for path in data_paths(config):
        if path.startswith("hf://datasets/"):
            names.append("/".join(path.removeprefix("hf://datasets/").split("/")[:2]))
    ids = (hub_id(str(name or "").partition("?")[0]) for name in names)
    return list(dict.fromkeys(filter(None, ids)))


def hub_id(name: str) -> str | None:
    """Return a name as an id of the Hub; None for a path of this machine."""
    repo = name.partition("@")[0]
    if repo in OPENAI:
        return f"openai-community/{repo}"
    is_id = "/" in repo and is_repo(repo) and public_name(repo) != "data"
    return repo if is_id and not Path(repo).exists() and not is_local(repo) else None
