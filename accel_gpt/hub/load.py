"""Load a pretrained model with its weights: from a run or checkpoint, a transformers folder, or
the Hub.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.hub_client import download_repo
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import CheckpointError, UserError, first_line, require
from accel_gpt.files import read_json
from accel_gpt.hub.hf_weights import Tensors, load_weights
from accel_gpt.hub.pretrained import Pretrained, find_pretrained
from accel_gpt.model.gpt import GPT
from accel_gpt.training.checkpoint import is_checkpoint, load_model, read_weights, verify
from accel_gpt.training.run_folder import RunFolder

STATE = "checkpoint"  # folder of a repository that holds a whole checkpoint
SAFETENSORS = "model.safetensors"


def load_pretrained(
    name: str,
    checkpoint: str = "last",
    device: torch.device | str = "cpu",
) -> tuple[GPT, Tokenizer]:
    """Load a model, in evaluation mode, and its tokenizer.

    `name`: a run (`checkpoint`: last, best or a step), a checkpoint, a transformers folder or a Hub
    id. Raises `UserError` if the model, its weights or its tokenizer is missing or unsupported,
    `CheckpointError` if a file is damaged.
    """
    pretrained = find_pretrained(name, checkpoint)
    if not pretrained.tokenizer:
        raise UserError(
            f"{name} has no tokenizer; put the tokenizer.json of the model beside its weights"
        )
    if pretrained.is_checkpoint:
        return load_model(pretrained.folder, device)
    try:
        config = ModelConfig(**pretrained.shape())
    except UserError as error:
        raise CheckpointError(f"config.json of {name} is not valid: {error}") from None
    assert config.vocab_size is not None
    tensors = open_transformers(pretrained, config, config.vocab_size)
    model = GPT.allocate(config, config.vocab_size)
    load_weights(model, config.preset, tensors, pretrained.name)
    return model.to(device).eval(), load_tokenizer(pretrained.tokenizer)


def open_initial_weights(
    config: Config, corpus: Corpus, log: Callable[[str], None]
) -> Callable[[GPT], None]:
    """Open the model of `model.init_from`; returns what loads its weights, a tensor at a time.

    Raises `UserError` if its tokenizer is not the tokenizer of the data.
    """
    pretrained = find_pretrained(config.model.init_from)
    if pretrained.tokenizer:
        names = f"model.init_from {pretrained.name}", "the data"
        load_tokenizer(pretrained.tokenizer).require_same(corpus.tokenizer, *names, UserError)
    else:
        kind = corpus.tokenizer.kind
        log(f"{pretrained.name} has no tokenizer: assuming the tokenizer of the data ({kind})")
    if pretrained.is_checkpoint:
        verify(pretrained.folder, model_only=True)
        return partial(read_weights, pretrained.folder)
    tensors = open_transformers(pretrained, config.model, corpus.vocab_size)
    return lambda gpt: load_weights(gpt, config.model.preset, tensors, pretrained.name)


def open_transformers(pretrained: Pretrained, config: ModelConfig, vocab_size: int) -> Tensors:
    """Open the weights of a transformers model, which must hold a GPT of shape `config`."""
    files = weight_files(pretrained)
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            tensors |= open_weights(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from None
    parameters = parameter_counts(replace(config, block_size=1), vocab_size)["total_unpadded"]
    size = sum(file.stat().st_size for file in files)
    if size < parameters:  # checked before memory is allocated: a number takes a byte at least
        raise CheckpointError(
            f"config.json of {pretrained.name} describes {parameters:,} parameters, more than the "
            f"{size:,} bytes of its weights can hold"
        )
    return tensors


def weight_files(pretrained: Pretrained) -> list[Path]:
    """Return the weight files of a transformers model, downloaded if need be.

    Raises `UserError` if there are no safetensors files.
    """
    folder = pretrained.folder
    if pretrained.on_hub:  # the single file, or parts and their index
        folder = download_repo(pretrained.name, "model*.safetensors*")
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    index = folder / f"{SAFETENSORS}.index.json"
    if index.is_file():
        return listed_files(index)
    raise UserError(
        f"{pretrained.name} has no {SAFETENSORS}, the only format of weights that is read; open "
        "the model with transformers and write it with save_pretrained, which writes safetensors"
    )


def listed_files(index: Path) -> list[Path]:
    """Return the files that an index of weights in several files names."""
    try:
        listed = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is damaged; download it again") from None
    for name in listed:
        plain = isinstance(name, str) and Path(name).name == name
        if not (plain and index.with_name(name).is_file()):
            raise CheckpointError(f"{index} names {name}, which is not beside it")
    return [index.with_name(name) for name in sorted(listed)]


def open_weights(file: Path) -> Tensors:
    """Open a safetensors file: name -> what returns the tensor."""
    opened: Any = safe_open(str(file), framework="pt")
    return {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118


def download_checkpoint(config: Config) -> Config:
    """Download the checkpoint that `checkpoint.resume` names on the Hub, and return the config
    with its folder there.

    A run that has checkpoints already resumes from those. Raises `UserError` if the repository has
    no checkpoint.
    """
    if RunFolder(config.out_dir).checkpoints:
        return config
    name = config.checkpoint.resume
    folder = download_repo(name, f"{STATE}/*") / STATE
    require(
        is_checkpoint(folder),
        f"{name} has no state to resume from; push it with hub.include_state, or start from its "
        "weights with model.init_from",
    )
    return replace(config, checkpoint=replace(config.checkpoint, resume=str(folder)))
