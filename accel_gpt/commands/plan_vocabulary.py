"""The vocabulary that a config will have, and the shapes of GPT-2, without torch or a network."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
from accel_gpt.files import read_json

PRINTABLE = 96  # ASCII's, and the line end: assumption for `chars` before the text is read
BYTES = 257  # and end-of-text
GPT2 = 50257
# Radford et al. 2019, table 2, with the 12 x 64 heads of the released weights
GPT2_SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
        "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
        "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
        "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    }
)
ASK = "give --vocab_size"


def inherit_known(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `model.init_from` brings; the published sizes of GPT-2 need no network for that."""
    place = str(given["model.init_from"])
    shape = GPT2_SHAPES.get(place.removeprefix("openai-community/"))
    if shape is None or Path(place).exists():
        from accel_gpt.hub.pretrained import inherit

        return inherit(given)
    brought = {**shape, "block_size": 1024, "vocab_size": GPT2}
    return {f"model.{k}": v for k, v in brought.items() if f"model.{k}" not in given}


def vocabulary(config: Config, given: int | None) -> tuple[int, str]:
    """Tokens in the vocabulary, and who says so; `UserError` where nobody does."""
    if given:
        return given, "--vocab_size"
    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    for folder in data_folders(config):
        if (folder / "dataset.json").is_file():
            return of_folder(folder), f"{folder}"
    tokenizer = config.data.tokenizer
    if tokenizer is None and config.data.prepare.source is None:
        for folder in data_folders(config):
            if config.data.train and folder.is_dir():  # of another project
                from accel_gpt.data.sources import open_data

                return open_data(str(folder), "train", config.data)[1].vocab_size, f"{folder}"
    elif tokenizer is None:
        tokenizer = config.data.prepare.tokenizer
    require(
        tokenizer is not None,
        f"the vocabulary of {config.data.train or 'data.train'} is not known before it is there; "
        f"{ASK}, or the tokenizer as data.tokenizer",
    )
    return of_tokenizer(str(tokenizer), config.data.prepare.vocab_size)


def data_folders(config: Config) -> list[Path]:
    """The data folders of a config."""
    train = config.data.train
    if isinstance(train, TextStream):
        return []
    return [Path(train)] if isinstance(train, str) else [Path(source.path) for source in train]


def of_folder(folder: Path) -> int:
    """The vocabulary that a data folder's index tells."""
    from accel_gpt.data.shards import read_index

    try:
        return int(read_index(folder)["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, AccelGPTError):
            raise
        raise DataError(f"dataset.json of {folder} has no vocab_size; prepare it again") from None


def of_tokenizer(name: str, bpe_size: int) -> tuple[int, str]:
    """The vocabulary that a tokenizer will have."""
    plain = {"gpt2": GPT2, "bytes": BYTES, "bpe": bpe_size}
    if name in plain:
        return plain[name], f"tokenizer {name}"
    if name == "chars":
        return PRINTABLE, "assumption for chars; prepare the data, or give --vocab_size"
    path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    require(path.is_file(), f"the vocabulary is not known: tokenizer {name} does not exist; {ASK}")
    try:
        return of_file(read_json(path)), name
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"the vocabulary of {path} cannot be read; {ASK}") from None


def of_file(content: Any) -> int:
    """One more than the largest id in a tokenizer.json, of Hugging Face's format or of ours."""
    if content.get("format") == "accel_gpt-tokenizer":
        return (
            of_tokenizer(content["kind"], 0)[0] if "chars" not in content else len(content["chars"])
        )
    vocabulary = content["model"]["vocab"]
    pairs = isinstance(vocabulary, list)  # of Unigram: [piece, score], the id is the place
    ids = range(len(vocabulary)) if pairs else vocabulary.values()
    added = [token["id"] for token in content.get("added_tokens") or []]
    return int(max([*ids, *added])) + 1
