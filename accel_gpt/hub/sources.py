"""Where a model is: a run or checkpoint of ours, a folder of transformers, a Hub repository.

Reads shapes and tokenizers, no weights: what the config needs before anything is built.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.errors import CheckpointError, require
from accel_gpt.hub.client import SCHEME, fetch, hub_name
from accel_gpt.hub.hf_config import read_shape
from accel_gpt.untrusted import load_yaml, read_json, read_text

SMALL_FILES = ("config.json", "tokenizer*.json", "chat_template.jinja", "vocab.json", "merges.txt")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
# what may be set over a source; everything else is its shape
CHANGEABLE = ("init_std", "norm_eps", "rope_")
NOT_SHAPE = ("init_from", "allow_pickle", "dropout", "zero_init", "depth")


@dataclass(frozen=True)
class Source:
    """A model that was found."""

    place: str  # as the user wrote it
    folder: Path
    ours: bool  # a checkpoint of ours, not a folder of transformers
    remote: str | None = None  # its repository, where it came from the Hub

    def has_tokenizer(self) -> bool:
        """Whether its tokenizer lies beside the weights."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)


def find_source(place: str, checkpoint: str = "last") -> Source:
    """The model at `place`; of a run that checkpoint; of a repository only its small files.

    Raises `UserError` where there is none.
    """
    folder = Path(place).expanduser()
    if place.startswith(SCHEME) or not folder.exists():
        remote = hub_name(place)
        folder = fetch(remote, SMALL_FILES)
        require(
            (folder / "config.json").is_file(),
            f"{place} on the Hub has no config.json; expected a model in transformers format",
        )
        return Source(place, folder, ours=False, remote=remote)
    require(folder.is_dir(), f"{place} is a file; give the folder of a run or of a model")
    from accel_gpt.training.checkpoint import find_checkpoint, is_checkpoint

    if is_checkpoint(folder) or (folder / "checkpoints").is_dir():
        return Source(place, find_checkpoint(folder, checkpoint), ours=True)
    require(
        (folder / "config.json").is_file(),
        f"{place} holds neither a run of ours nor a model in transformers format (config.json)",
    )
    return Source(place, folder, ours=False)


def shape_of(source: Source) -> dict[str, Any]:
    """The fields of `ModelConfig` that a source brings, `vocab_size` among them."""
    if source.ours:
        from accel_gpt.training.checkpoint import read_shape as read_own

        config, vocab_size = read_own(source.folder)
        own = {key: v for key, v in asdict(config).items() if key not in NOT_SHAPE}
        return own | {"vocab_size": vocab_size}
    path = source.folder / "config.json"
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json of {source.place} cannot be read: {error}") from None
    require(isinstance(content, Mapping), f"config.json of {source.place} holds no object")
    return read_shape(content, source.place)


def inherit(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `model.init_from` brings to a config, by dotted keys, beside the keys that are given.

    The shape of the model and its tokenizer. Raises `UserError` where a given key contradicts it.
    """
    place = given["model.init_from"]
    if begun := shape_of_begun(given):
        return begun
    source = find_source(place)
    brought: dict[str, Any] = {}
    for name, value in shape_of(source).items():
        key = f"model.{name}"
        if key not in given:
            brought[key] = value
        elif name == "block_size":
            require(
                given[key] <= value,
                f"model.block_size is {given[key]}, but {place} has {value} positions; set it to "
                "at most as many, or leave it unset",
            )
        elif not name.startswith(CHANGEABLE):
            require(
                given[key] == value,
                f"{key} is {given[key]}, but that of model.init_from {place} is {value}; "
                f"leave {key} unset",
            )
    if source.has_tokenizer():
        file = source.folder / "tokenizer.json"
        path = str(file if file.is_file() else source.folder)
        brought |= {
            key: path
            for key in ("data.prepare.tokenizer", "data.tokenizer")
            if given.get(key) is None
        }
    return brought


def shape_of_begun(given: Mapping[str, Any]) -> dict[str, Any]:
    """The shape in `config.yaml` of a run begun from the same place, whose weights lie there.

    So a run goes on when what it was started from has gone, or is out of reach.
    """
    saved = Path(given.get("out_dir", Config.out_dir)) / "config.yaml"
    if not any(saved.parent.glob("checkpoints/step_*")):
        return {}
    try:
        content = load_yaml(read_text(saved))
        model, data = dict(content["model"]), dict(content["data"])
        tokenizers = {"data.tokenizer": data["tokenizer"]}
        tokenizers["data.prepare.tokenizer"] = data["prepare"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if model.pop("init_from") != given["model.init_from"]:
        return {}
    brought = {f"model.{key}": value for key, value in model.items()} | tokenizers
    return {key: value for key, value in brought.items() if given.get(key) is None}
