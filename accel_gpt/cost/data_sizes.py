"""Estimate vocabulary size and numbers of tokens from a config, before training opens its data.

Needs no torch.
"""

from collections.abc import Sequence
from pathlib import Path

from accel_gpt.config.depth import tokenizer_vocab_size
from accel_gpt.config.experiment import Config
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.sources import open_data, train_paths, val_paths
from accel_gpt.data.tokenizer import named_tokenizer
from accel_gpt.errors import UserError

PRINTABLE = 96  # printable ASCII and the line end; assumption for `chars` before the text is read


def vocabulary_size(config: Config) -> tuple[int, str]:
    """Return the vocabulary size, and the option or file that it comes from.

    Raises `UserError` if the size is not known.
    """
    data = config.data
    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    for source in train_paths(data) if data.train else ():
        if Path(source.path, INDEX).is_file():
            return read_index(Path(source.path)).vocab_size, source.path
    name = data.tokenizer
    if name is None and data.prepare.source:
        name = data.prepare.tokenizer
    if name is not None:
        return tokenizer_size(config, name)
    for source in train_paths(data):
        if is_url(source.path) or Path(source.path).is_dir():
            _, tokenizer = open_data(source.path, "train", data)
            return tokenizer.vocab_size, source.path
    raise UserError(
        f"the vocabulary size is not known, because {data.train} is not prepared; set "
        "model.vocab_size or data.tokenizer"
    )


def tokenizer_size(config: Config, name: str) -> tuple[int, str]:
    """Return the vocabulary size of the tokenizer `name`, and where it comes from."""
    prepare = config.data.prepare
    known = tokenizer_vocab_size(name, prepare.vocab_size)
    if known:
        return known, f"tokenizer {name}"
    if name == "chars":
        return PRINTABLE, "assumption for chars, before the text is read"
    if name.endswith(".json") and not Path(name).exists():
        return prepare.vocab_size, f"data.prepare.vocab_size: {name} does not exist yet"
    return named_tokenizer(name).vocab_size, name


# --------------------------------------------------------------------------- numbers of tokens


def evaluated_tokens(config: Config) -> int | None:
    """Count the tokens that an evaluation reads; None if a whole split is not prepared yet."""
    train = [source.path for source in train_paths(config.data)]
    val_sets = [[source.path] for source in val_paths(config.data)] or [train]
    splits = [split_tokens(train, "train", config.eval.train_tokens)]
    splits += [split_tokens(folders, "val", config.eval.tokens) for folders in val_sets]
    known = [tokens for tokens in splits if tokens is not None]
    return sum(known) if len(known) == len(splits) else None


def split_tokens(folders: Sequence[str], split: str, limit: int | None) -> int | None:
    """Count the tokens in a split of all `folders` together, up to `limit`.

    Returns `limit` if a folder is not prepared yet.
    """
    if not folders:
        return limit
    for folder in folders:
        if not Path(folder, INDEX).is_file():
            return limit
    whole = 0
    for folder in folders:
        for shard in read_index(Path(folder)).splits.get(split, ()):
            whole += shard.tokens
    return whole if limit is None else min(limit, whole)
