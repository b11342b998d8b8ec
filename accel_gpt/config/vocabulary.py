"""Find the vocabulary size that a config sets or implies, before any data is opened. No torch."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.data import PrepareConfig, Weighted
from accel_gpt.errors import require
from accel_gpt.files import read_json

KNOWN_VOCABULARIES: Mapping[str, int] = MappingProxyType({"gpt2": 50257, "bytes": 257})


def implied_vocab_size(given: Mapping[str, Any]) -> int:
    """Return the vocabulary size that the config sets or implies.

    Raises `UserError` if the size is unknown.
    """
    tokenizer = given.get("data.tokenizer")
    if tokenizer is None and given.get("data.prepare.source"):
        tokenizer = given.get("data.prepare.tokenizer", PrepareConfig.tokenizer)
    trained = given.get("data.prepare.vocab_size", PrepareConfig.vocab_size)
    size = (
        given.get("model.vocab_size")
        or tokenizer_vocab_size(tokenizer, trained)
        or prepared_vocab_size(given.get("data.train"))
    )
    subject = f"the size of tokenizer {tokenizer}" if tokenizer else "its size"
    require(
        size is not None,
        f"the batch size follows from model.depth {given['model.depth']} and the vocabulary, but "
        f"{subject} is unknown; set model.vocab_size, or prepare the data first",
    )
    assert size is not None
    return int(size)


def tokenizer_vocab_size(name: str | None, trained: int) -> int | None:
    """Return the vocabulary size of the tokenizer `name`; None if the name is not enough.

    `trained` is the size of a bpe trained on the text.
    """
    if name == "bpe":
        return trained
    return KNOWN_VOCABULARIES.get(str(name))


def prepared_vocab_size(train: Any) -> int | None:
    """Return the vocabulary size of the first folder in `data.train`; None if unknown."""
    folder: Any = train
    if isinstance(train, tuple | list) and train:
        folder = train[0]
    if isinstance(folder, Mapping):
        folder = folder.get("path")
    elif isinstance(folder, Weighted):
        folder = folder.path
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        size = read_json(Path(folder) / "dataset.json")["vocab_size"]
        return size if type(size) is int and size > 0 else None
    return None
