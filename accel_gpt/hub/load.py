"""Models with their weights: from a run or checkpoint, a folder of transformers, or the Hub."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.hub.client import fetch, remote_files
from accel_gpt.hub.hf_weights import Tensors, fill
from accel_gpt.hub.sources import Source, find_source, shape_of
from accel_gpt.model.gpt import GPT
from accel_gpt.training.checkpoint import load_model
from accel_gpt.training.corpus import Corpus
from accel_gpt.untrusted import read_json

SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
PATTERNS = ("model*.safetensors", "model.safetensors.index.json")


def load_pretrained(
    place: str,
    checkpoint: str = "last",
    allow_pickle: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[GPT, Tokenizer]:
    """The model at `place`, in evaluation mode, and its tokenizer.

    `place` is a run (of which `checkpoint`), a checkpoint, a folder of transformers or a Hub id.
    Raises `UserError` where one of the two is missing or not known, `CheckpointError` where a file
    is damaged.
    """
    source = find_source(place, checkpoint)
    require(
        source.has_tokenizer(),
        f"{place} holds no tokenizer (tokenizer.json); put that of the model beside its weights",
    )
    if source.ours:
        return load_model(source.folder, device)
    try:
        config = ModelConfig(**shape_of(source))
    except CheckpointError:
        raise
    except UserError as error:
        raise CheckpointError(f"config.json of {place} is not to be trusted: {error}") from None
    assert config.vocab_size is not None
    model = load_foreign(source, config, config.vocab_size, allow_pickle)
    return model.to(device).eval(), load_tokenizer(source.folder)


def load_foreign(source: Source, config: ModelConfig, vocab_size: int, allow_pickle: bool) -> GPT:
    """A model of transformers in our shape `config`, which may have a shorter context."""
    files, open_one = weight_files(source, allow_pickle)
    tensors = open_all(files, open_one)
    smallest = parameter_counts(replace(config, block_size=1), vocab_size)["total_unpadded"]
    room = sum(file.stat().st_size for file in files)
    if room < smallest:  # asked before memory is: a number holds a byte at least
        raise CheckpointError(
            f"config.json of {source.place} asks for {smallest:,} parameters, more than the "
            f"{room:,} bytes of its weights hold"
        )
    model = GPT.unfilled(config, vocab_size)
    fill(model, config.preset, tensors, source.place)
    return model


def start_model(config: Config, corpus: Corpus, resuming: bool, say: Callable[[str], None]) -> GPT:
    """The model that a run trains; unless its weights are about to be restored, maybe another's.

    Raises `UserError` where that has another tokenizer than the data.
    """
    place = config.model.init_from
    if resuming or place == "scratch":
        return GPT(config.model, corpus.vocab_size)
    source = find_source(place)
    if source.has_tokenizer():
        check_tokenizer(load_tokenizer(source.folder), corpus.tokenizer, place)
    else:
        say(f"{place} holds no tokenizer: that of the data ({corpus.tokenizer.kind}) is assumed")
    if not source.ours:
        return load_foreign(source, config.model, corpus.vocab_size, config.model.allow_pickle)
    model = GPT.unfilled(config.model, corpus.vocab_size)
    weights = load_model(source.folder)[0].state_dict()
    if model.wpe is not None:
        weights["wpe.weight"] = weights["wpe.weight"][: config.model.block_size]
    model.load_state_dict(weights)
    return model


def check_tokenizer(theirs: Tokenizer, data: Tokenizer, place: str) -> None:
    """Raise `UserError` unless both give the same ids."""
    if theirs.fingerprint != data.fingerprint:
        raise UserError(
            f"model.init_from {place} has another tokenizer ({theirs.kind} of "
            f"{theirs.vocab_size:,}) than the data ({data.kind} of {data.vocab_size:,}); prepare "
            "the data with --tokenizer of its tokenizer.json"
        )


# --------------------------------------------------------------------------- files of weights


def weight_files(
    source: Source, allow_pickle: bool
) -> tuple[list[Path], Callable[[Path], Tensors]]:
    """The files with the weights of a model of transformers, fetched first where they are on the
    Hub, and what opens one.

    Raises `UserError` where there are no weights, or pickled ones and not `allow_pickle`.
    """
    folder = fetch(source.remote, PATTERNS) if source.remote else source.folder
    if files := listed_files(folder, SAFETENSORS):
        return files, safe_tensors
    listed = remote_files(source.remote) if source.remote else [p.name for p in folder.iterdir()]
    require(
        any(name in listed for name in PICKLES),
        f"{source.place} holds no weights; expected model.safetensors",
    )
    require(
        allow_pickle,
        f"{source.place} holds its weights as a pickle only (.bin), which can run code when it is "
        "read carelessly; convert it to safetensors, or accept it with --model.allow_pickle "
        "(sample, export: --allow_pickle): it is then read without running anything",
    )
    if source.remote:
        folder = fetch(source.remote, ("pytorch_model*.bin", "pytorch_model.bin.index.json"))
    return listed_files(folder, PICKLES), pickled_tensors


def listed_files(folder: Path, names: tuple[str, str]) -> list[Path]:
    """The files that hold the weights, by the index (the first of `names`) or the single file."""
    index, single = (folder / name for name in names)
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        listed = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is damaged; fetch it again") from None
    for name in listed:
        inside = isinstance(name, str) and Path(name).name == name
        if not (inside and (folder / name).is_file()):
            raise CheckpointError(f"{index} names {name}, which is not beside it")
    return [folder / name for name in sorted(listed)]


def open_all(files: list[Path], open_one: Callable[[Path], Tensors]) -> Tensors:
    """The tensors of several files as one mapping."""
    found: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            found |= open_one(file)
        except Exception as error:  # SafetensorError, UnpicklingError, RuntimeError, OSError
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if type(error).__name__ == "UnpicklingError":  # torch recommends weights_only=False
                said = "it holds more than tensors, or is damaged; nothing in it was run"
            raise CheckpointError(f"{file} cannot be read: {said}") from None
    return found


def safe_tensors(file: Path) -> Tensors:
    """What reads each tensor of a .safetensors file."""
    opened: Any = safe_open(str(file), framework="pt")
    return {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118


def pickled_tensors(file: Path) -> Tensors:
    """What gives each tensor of a .bin file; nothing in it is run."""
    content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: partial(Tensor.detach, tensor) for name, tensor in content.items()}
