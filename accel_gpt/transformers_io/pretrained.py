"""Find a pretrained model: a run or checkpoint of ours, a transformers folder, or a Hub repository.

Reads its shape and its tokenizer for a config that starts from it; `load.py` loads its weights.
Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.options import own_options
from accel_gpt.data.index import INDEX
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer, named_tokenizer
from accel_gpt.data.tokenizer_json import HUB_FILES
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import is_local
from accel_gpt.hub import SCHEME, download_repo
from accel_gpt.json_files import read_json_object
from accel_gpt.own_code import Weights
from accel_gpt.runs.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_shape,
    require_no_choice,
)
from accel_gpt.runs.folder import RunFolder
from accel_gpt.transformers_io.hf_config import read_hf_config

ADAPTER = "adapter_config.json"  # of PEFT
ADAPTER_FILES = (ADAPTER, "adapter_model.safetensors", "adapter_model.bin")
SMALL_FILES = ("config.json", ADAPTER, *HUB_FILES)
TOKENIZER_KEYS = ("data.tokenizer", "data.prepare.tokenizer")


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model and where it lies."""

    name: str  # as the user wrote it
    folder: Path
    is_checkpoint: bool  # a checkpoint of ours, not a transformers folder
    weights: Weights = "evaluated"  # of a checkpoint
    on_hub: bool = False  # its weights may still have to be downloaded

    @property
    def tokenizer(self) -> Path | None:
        """Return tokenizer.json, if there is one."""
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer; raises `UserError` if there is none."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.name} has no tokenizer; put the tokenizer.json of the model beside its "
                "weights"
            )
        return load_tokenizer(self.tokenizer)

    def shape(self) -> dict[str, Any]:
        """Read the fields of `ModelConfig` that describe its shape, with `vocab_size`."""
        if self.is_checkpoint:
            config, vocab_size = read_shape(self.folder)
            fields = asdict(config)
            for name, option in own_options(ModelConfig).items():
                if option.inherited == "never":
                    del fields[name]
            return fields | {"vocab_size": vocab_size}
        content = read_json_object(self.folder / "config.json", CheckpointError)
        return read_hf_config(content, self.name)


def find_pretrained(
    name: str, checkpoint: str | None = None, weights: Weights = "evaluated"
) -> Pretrained:
    """Find a model in a folder, or on the Hub, from which it downloads only the small files.

    A folder with a config.json is in transformers format, unless it is also a run with checkpoints.
    `checkpoint`: see `find_checkpoint`. `weights`: which weights of a checkpoint. Raises
    `UserError` if there is no model, or an adapter beside it. The Hub is not asked for a path.
    """
    require(weights in get_args(Weights), f"weights is {weights!r}; expected evaluated or trained")
    folder = Path(name)
    on_hub = name.startswith(SCHEME) or not (folder.exists() or is_local(name))
    if on_hub:
        folder = download_repo(name, *SMALL_FILES)
    is_run = any(map(is_checkpoint, RunFolder(folder).checkpoints.values()))
    if is_run or (is_checkpoint(folder) and not (folder / "config.json").is_file()):
        found = find_checkpoint(folder, checkpoint)
        return Pretrained(name, found, is_checkpoint=True, weights=weights)
    require_no_adapter(name, folder)
    if not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.exists() else "does not exist"
        raise UserError(
            f"{name} {problem}; expected a run, a checkpoint, or a folder of transformers with "
            "config.json"
        )
    require_no_choice(name, checkpoint)
    require(
        weights == "evaluated",
        f"--weights is {weights}, but {name} is no checkpoint, so it has no other weights",
    )
    return Pretrained(name, folder, is_checkpoint=False, on_hub=on_hub)


def require_no_adapter(name: str, folder: Path) -> None:
    """Raise `UserError` if a folder holds an adapter, whose weights change those of the model."""
    for file in ADAPTER_FILES:
        require(
            not (folder / file).exists(),
            f"{name} holds {file}, an adapter of PEFT, which is not read; merge it first: peft."
            f"AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()."
            "save_pretrained(FOLDER)",
        )


def check_initial_tokenizer(config: Config) -> None:
    """Check, before text is tokenized, that `data.prepare` uses the tokenizer of the weights.

    A data folder that exists is compared when it is opened. A run that has checkpoints starts from
    those. Raises `UserError` if the tokenizers differ, or if `model.init_from` has none.
    """
    prepare = config.data.prepare
    folder = config.data.folder
    if not folder or prepare.source is None or Path(folder, INDEX).exists():
        return
    if RunFolder(config.out_dir).checkpoints:
        return
    pretrained = find_pretrained(config.model.init_from)
    require(
        prepare.tokenizer not in ("chars", "bpe"),
        f"data.prepare.tokenizer {prepare.tokenizer} makes a tokenizer, but the weights of "
        f"model.init_from {pretrained.name} have one; set it to {pretrained.tokenizer}",
    )
    tokenizer = named_tokenizer(prepare.tokenizer, "data.prepare.tokenizer")
    pretrained.load_tokenizer().require_same(
        tokenizer,
        f"model.init_from {config.model.init_from}",
        f"data.prepare.tokenizer {prepare.tokenizer}",
        UserError,
    )


def inherit(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that `model.init_from` brings to a config: shape and tokenizer.

    Each rank reads them; if they differ, `join_same_ranks` raises an error. `given`: the keys that
    the user set, dotted. Raises `UserError` if one contradicts the shape.
    """
    name = given["model.init_from"]
    prepares = given.get("data.prepare.source") is not None
    tokenizer_keys = TOKENIZER_KEYS if prepares else ("data.tokenizer",)
    run = RunFolder(given.get("out_dir", Config.out_dir))
    if run.checkpoints and run.config.get("model.init_from") == name:
        # the run resumes even if the model that it started from cannot be read
        return {
            key: value
            for key, value in run.config.items()
            if (key.startswith("model.") or key in tokenizer_keys) and given.get(key) is None
        }
    pretrained = find_pretrained(name)
    inherited = inherit_shape(name, pretrained.shape(), given)
    if pretrained.tokenizer:
        for key in tokenizer_keys:
            if given.get(key) is None:
                inherited[key] = str(pretrained.tokenizer)
    return inherited


def inherit_shape(name: str, shape: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the shape of the model `name` brings to a config with the keys `given`.

    Raises `UserError` if a given key contradicts the shape.
    """
    inherited: dict[str, Any] = {}
    for field, value in shape.items():
        key = f"model.{field}"
        if given.get(key) is None:  # null counts as not set: a run's config.yaml has all keys
            inherited[key] = value
        elif field == "block_size":
            check_block_size(name, shape, given)
        elif own_options(ModelConfig)[field].inherited == "always":
            require(
                given[key] == value,
                f"{key} is {given[key]}, but {name}, which model.init_from names, has {value}; "
                f"leave {key} unset",
            )
    return inherited


def check_block_size(name: str, shape: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `UserError` if a given context is longer than the positions of the model `name`."""
    rotary = shape["position"] == "rope"
    scaled = given.get("model.rope_factor", 1.0) != 1
    advice = ", or raise model.rope_factor too" if rotary else ""
    require(
        given["model.block_size"] <= shape["block_size"] or (rotary and scaled),
        f"model.block_size is {given['model.block_size']}, but {name} has {shape['block_size']} "
        f"positions; set it to at most as many, or leave it unset{advice}",
    )
