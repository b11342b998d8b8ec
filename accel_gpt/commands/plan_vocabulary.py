"""The vocabulary that a config will have, and the shapes of GPT-2, without torch or a network."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.depth import KNOWN_VOCABULARIES, tokenizer_vocabulary
from accel_gpt.config.experiment import Config
from accel_gpt.errors import DataError, require
from accel_gpt.files import is_count

PRINTABLE = 96  # ASCII's, and the line end: assumption for `chars` before the text is read
# Radford et al. 2019, table 2, with the 12 x 64 heads of the released weights
GPT2_SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
        "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
        "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
        "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    }
)


def inherit_known(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `model.init_from` brings; the published sizes of GPT-2 need no network for that."""
    from accel_gpt.hub.pretrained import inherit, inherit_shape

    name = str(given["model.init_from"])
    shape = GPT2_SHAPES.get(name.removeprefix("openai-community/"))
    if shape is None or Path(name).exists():
        return inherit(given)
    rest = {"block_size": 1024, "vocab_size": KNOWN_VOCABULARIES["gpt2"]}
    return inherit_shape(name, {**shape, **rest}, given)


def vocabulary_size(config: Config, given: int | None) -> tuple[int, str]:
    """Tokens in the vocabulary, and what says so; `UserError` where nothing does."""
    data = config.data
    if size := given or config.model.vocab_size:
        return size, "--vocab_size" if given else "model.vocab_size"
    folders = [folder for folder in data_folders(config) if folder.is_dir()]
    for folder in folders:
        if (folder / "dataset.json").is_file():
            return of_folder(folder), f"{folder}"
    name = data.tokenizer or (data.prepare.tokenizer if data.prepare.source else None)
    if name is None and folders and data.train:  # of another project
        from accel_gpt.data.sources import open_data

        return open_data(str(folders[0]), "train", data)[1].vocab_size, f"{folders[0]}"
    require(
        name is not None,
        f"the vocabulary of {data.train or 'data.train'} is not known before it is there; "
        "give --vocab_size, or the tokenizer as data.tokenizer",
    )
    if size := tokenizer_vocabulary(name, data.prepare.vocab_size):
        return size, f"tokenizer {name}"
    if name == "chars":
        return PRINTABLE, "assumption for chars; prepare the data, or give --vocab_size"
    if str(name).endswith(".json") and not Path(str(name)).exists():
        source = f"data.prepare.vocab_size: {name} is not there yet"
        return data.prepare.vocab_size, source
    from accel_gpt.data.tokenizer import named_tokenizer

    return named_tokenizer(str(name)).vocab_size, f"{name}"


def data_folders(config: Config) -> list[Path]:
    """The data folders of a config."""
    train = config.data.train
    return [Path(train)] if isinstance(train, str) else [Path(source.path) for source in train]


def of_folder(folder: Path) -> int:
    """The vocabulary in the index of a data folder; `DataError` where it has none."""
    from accel_gpt.data.shards import read_index

    size: Any = read_index(folder).get("vocab_size")
    if not is_count(size, 1):
        raise DataError(f"dataset.json of {folder} has no vocab_size; prepare it again")
    return int(size)
