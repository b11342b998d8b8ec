"""A pretrained model: a run or checkpoint of ours, a transformers folder, or a Hub repository.

Finds it and reads its shape, for a config that starts from it; `load.py` loads its weights. Needs
no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.data.hub_client import SCHEME, download_repo
from accel_gpt.data.tokenizer_json import HUB_FILES
from accel_gpt.errors import CheckpointError, require
from accel_gpt.files import read_json
from accel_gpt.hub.hf_config import read_hf_config

SMALL_FILES = ("config.json", *HUB_FILES)
TOKENIZER_KEYS = ("data.tokenizer", "data.prepare.tokenizer")
# fields of ModelConfig that a config may change, and those that are no part of the shape
CHANGEABLE = ("init_std", "norm_eps", "rope_")
NOT_SHAPE = ("init_from", "allow_pickle", "dropout", "zero_init", "depth")


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model that was found."""

    name: str  # as the user wrote it
    folder: Path
    is_checkpoint: bool  # a checkpoint of ours, not a transformers folder
    on_hub: bool = False  # its weights may still have to be downloaded

    @property
    def tokenizer(self) -> Path | None:
        """What `load_tokenizer` reads: the file, or the folder of GPT-2's two; None: nothing."""
        if (self.folder / "tokenizer.json").is_file():
            return self.folder / "tokenizer.json"
        return self.folder if (self.folder / "vocab.json").is_file() else None

    def shape(self) -> dict[str, Any]:
        """Read the fields of `ModelConfig` that describe its shape, `vocab_size` among them."""
        if self.is_checkpoint:
            from accel_gpt.training.checkpoint import read_shape

            config, vocab_size = read_shape(self.folder)
            fields = {key: v for key, v in asdict(config).items() if key not in NOT_SHAPE}
            return fields | {"vocab_size": vocab_size}
        try:
            content = read_json(self.folder / "config.json")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"config.json of {self.name} cannot be read: {error}") from None
        require(isinstance(content, Mapping), f"config.json of {self.name} is not a JSON object")
        return read_hf_config(content, self.name)


def find_pretrained(name: str, checkpoint: str = "last") -> Pretrained:
    """Find the model in a folder or on the Hub, of which only the small files are downloaded.

    `checkpoint`: last, best or a step of a run. Raises `UserError` if there is no model.
    """
    folder = Path(name).expanduser()
    if name.startswith(SCHEME) or not folder.exists():
        folder = download_repo(name, *SMALL_FILES)
        require(
            (folder / "config.json").is_file(),
            f"{name} on the Hub has no config.json; expected a model in transformers format",
        )
        return Pretrained(name, folder, is_checkpoint=False, on_hub=True)
    require(folder.is_dir(), f"{name} is a file; give the folder of a run or of a model")
    from accel_gpt.training.checkpoint import find_checkpoint, is_checkpoint

    if is_checkpoint(folder) or (folder / "checkpoints").is_dir():
        return Pretrained(name, find_checkpoint(folder, checkpoint), is_checkpoint=True)
    require(
        (folder / "config.json").is_file(),
        f"{name} is not an accel-gpt run or transformers model folder: it has neither checkpoints "
        "nor config.json",
    )
    return Pretrained(name, folder, is_checkpoint=False)


def inherit(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that `model.init_from` brings to a config: shape and tokenizer.

    `given`: the keys that the user set, dotted. Raises `UserError` if one contradicts the shape.
    """
    from accel_gpt.training.run_folder import RunFolder

    name, run = given["model.init_from"], RunFolder(given.get("out_dir", Config.out_dir))
    if run.checkpoints and run.config.get("model.init_from") == name:
        # the run resumes even if the model that it started from is gone or out of reach
        return {
            key: value
            for key, value in run.config.items()
            if (key.startswith("model.") or key in TOKENIZER_KEYS) and given.get(key) is None
        }
    pretrained = find_pretrained(name)
    inherited = inherit_shape(name, pretrained.shape(), given)
    if pretrained.tokenizer:
        unset = (key for key in TOKENIZER_KEYS if given.get(key) is None)
        inherited |= dict.fromkeys(unset, str(pretrained.tokenizer))
    return inherited


def inherit_shape(name: str, shape: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the shape of the model `name` brings to a config in which `given` are set.

    Raises `UserError` if one of those contradicts it.
    """
    inherited: dict[str, Any] = {}
    for field, value in shape.items():
        key = f"model.{field}"
        if key not in given:
            inherited[key] = value
        elif field == "block_size":
            rotary, scaling = shape["position"] == "rope", given.get("model.rope_scaling", "none")
            advice = ", or extend it by model.rope_scaling" if rotary else ""
            require(
                given[key] <= value or (rotary and scaling != "none"),
                f"model.block_size is {given[key]}, but {name} has {value} positions; set it to "
                f"at most as many, or leave it unset{advice}",
            )
        elif not field.startswith(CHANGEABLE):
            require(
                given[key] == value,
                f"{key} is {given[key]}, but {name}, which model.init_from names, has {value}; "
                f"leave {key} unset",
            )
    return inherited
