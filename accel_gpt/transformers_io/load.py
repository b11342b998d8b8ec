"""Load a pretrained model with its weights: from a run or checkpoint, a transformers folder, or
the Hub.

Reads the files of a checkpoint, or config.json, the safetensors files and the tokenizer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.values import from_mapping, to_nested
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import CheckpointError, UserError, first_line, nearest, require
from accel_gpt.files import sha256
from accel_gpt.hub import download_repo
from accel_gpt.launch.ranks import on_main
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel, draw_weights, is_new
from accel_gpt.model.make import make_model
from accel_gpt.own_code import OwnCode, Weights
from accel_gpt.runs.checkpoint import (
    check_code,
    read_manifest,
    read_shape,
    read_state,
    verify_checkpoint,
    warn_of_other_code,
    weight_parts,
)
from accel_gpt.runs.state import InitialWeights
from accel_gpt.runs.tensor_files import read_weights, saved_tensors, weights_of
from accel_gpt.transformers_io.hf_weights import Tensors, load_weights
from accel_gpt.transformers_io.pretrained import Pretrained, find_pretrained

SAFETENSORS = "model.safetensors"
NO_CODE = OwnCode()


def load_pretrained(
    name: str,
    checkpoint: str | None = None,
    device: torch.device | str = "cpu",
    own: OwnCode = NO_CODE,
    weights: Weights = "evaluated",
) -> tuple[LanguageModel, Tokenizer]:
    """Load a model, in evaluation mode, and its tokenizer.

    `name`: a run, a checkpoint, a transformers folder or a Hub id. `checkpoint`: which one of a
    run; see `find_checkpoint`. `own`: the file of --code with whose `model()` the checkpoint was
    made. `weights`: which ones of a checkpoint to load, the evaluated or the trained ones; see
    `EvaluatedWeights`.

    Raises `UserError` if the model, its weights or its tokenizer is missing or unsupported,
    `CheckpointError` if a file is damaged.
    """
    return load_found(find_pretrained(name, checkpoint, weights), device, own)


def load_found(
    pretrained: Pretrained, device: torch.device | str = "cpu", own: OwnCode = NO_CODE
) -> tuple[LanguageModel, Tokenizer]:
    """Load the model that `find_pretrained` found, see `load_pretrained`."""
    if pretrained.is_checkpoint:
        return load_checkpoint(pretrained.folder, device, own, pretrained.weights)
    tokenizer = pretrained.load_tokenizer()
    config = ModelConfig(**pretrained.shape())
    assert config.vocab_size is not None
    tensors = open_transformers(weight_files(pretrained))
    model = GPT.allocate(config, config.vocab_size)
    load_weights(model, config.preset, tensors, pretrained.name)
    return model.to(device).eval(), tokenizer


def load_checkpoint(
    path: Path,
    device: torch.device | str = "cpu",
    own: OwnCode = NO_CODE,
    weights: Weights = "evaluated",
) -> tuple[LanguageModel, Tokenizer]:
    """Load the model of a checkpoint, in evaluation mode, and its tokenizer; verifies both first.

    Raises `CheckpointError` if the checkpoint is damaged.
    """
    verify_checkpoint(path, model_only=True)
    check_code(path, own, {"model"})
    warn_of_other_code(path, own)
    shape, vocab_size = read_shape(path)
    config = Config(model=shape) if own.model is None else recorded_config(path, own)
    model = make_model(config, vocab_size)
    read_weights(path, model, weights)
    return model.to(device).eval(), load_tokenizer(path)


def recorded_config(path: Path, own: OwnCode) -> Config:
    """Return the config that a checkpoint was trained with, for the functions of --code."""
    config = from_mapping(Config, to_nested(read_state(path).config), f"in {path}")
    return replace(config, model=read_shape(path)[0], own=own)


def load_initial_weights(config: Config, gpt: LanguageModel) -> InitialWeights:
    """Load the weights of `model.init_from` into the model of a new run; a collective.

    The weights of `model.new_weights` are drawn, as `draw_weights` does in a run from scratch.
    """
    pretrained = find_pretrained(config.model.init_from)
    new = config.model.new_weights
    if new:
        check_new_weights(gpt, new)
        draw_weights(gpt)
    if pretrained.is_checkpoint:
        folder = pretrained.folder
        verify_checkpoint(folder, model_only=True)
        check_code(folder, config.own, {"model"})
        warn_of_other_code(folder, config.own)
        read_weights(folder, gpt, pretrained.weights, new)
        listed = read_manifest(folder)
        parts = weight_parts(folder, pretrained.weights)
        digests = [listed[part.name].sha256 for part in parts]
        return InitialWeights(pretrained.name, read_state(folder).step, join_digests(digests))
    if not isinstance(gpt, GPT):
        raise UserError(
            f"model.init_from is {pretrained.name}, a model of transformers, but "
            f"{config.own.place('model')} returned another class than GPT; start from a "
            "checkpoint of accel_gpt, or set model.init_from to scratch"
        )
    files = weight_files(pretrained)
    tensors = open_transformers(files)
    load_weights(gpt, config.model.preset, tensors, pretrained.name, new)
    digests = on_main(lambda: [sha256(file) for file in files])
    return InitialWeights(pretrained.name, None, join_digests(digests))


def join_digests(digests: Sequence[str]) -> str:
    """Return the SHA-256 (hex) of a file; of several files, of their digests in order."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def check_new_weights(gpt: LanguageModel, patterns: Sequence[str]) -> None:
    """Raise `UserError` if a pattern of `model.new_weights` matches no weight of the model."""
    names = list(weights_of(gpt))
    for pattern in patterns:
        require(
            any(is_new(name, [pattern]) for name in names),
            f"model.new_weights has {pattern}, but no weight of the model matches it; the nearest "
            f"are {', '.join(nearest(pattern, names, cutoff=0.0))}",
        )


# --------------------------------------------------------------------------- transformers


def weight_files(pretrained: Pretrained) -> list[Path]:
    """Return the safetensors files of a transformers model; raise `UserError` if it has none."""
    folder = pretrained.folder
    if pretrained.on_hub:  # the single file, or parts
        folder = download_repo(pretrained.name, "model*.safetensors")
    whole = folder / SAFETENSORS
    files = [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    require(
        bool(files),
        f"{pretrained.name} has no {SAFETENSORS}, and no other format of weights is read; "
        "open the model with transformers and call save_pretrained, which writes safetensors",
    )
    return files


def open_transformers(files: Sequence[Path]) -> Tensors:
    """Open the weights of a transformers model; raise `CheckpointError` if a file is damaged."""
    try:
        return {name: saved.whole for name, saved in saved_tensors(files).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{files[0].parent}/model*.safetensors cannot be read: {first_line(error)}"
        ) from None
