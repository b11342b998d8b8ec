"""Read nanoGPT's vocabulary of characters from its pickle, meta.pkl, without executing code."""

import pickle
from pathlib import Path
from typing import Any, NoReturn

from accel_gpt.errors import DataError


class PlainUnpickler(pickle.Unpickler):
    """Unpickle plain values only, by rejecting every class and function that a pickle names."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Raise `UnpicklingError`."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and calling that executes code")


def read_vocabulary(path: Path) -> str:
    """Return the characters in nanoGPT's meta.pkl in the order of their ids.

    nanoGPT's data/shakespeare_char/prepare.py writes the file. Raises `DataError` if it holds
    anything else.
    """
    try:
        with path.open("rb") as file:
            meta = PlainUnpickler(file).load()
    except Exception as error:  # pickle has no common class of errors for damaged files
        raise DataError(
            f"{path} cannot be read: {error}; remove the file and set data.tokenizer"
        ) from None
    itos = meta.get("itos") if isinstance(meta, dict) else None
    chars: list[Any] = []
    if isinstance(itos, dict):
        chars = [itos.get(i) for i in range(len(itos))]
    plain = all(isinstance(c, str) and len(c) == 1 and not "\ud800" <= c <= "\udfff" for c in chars)
    if not chars or not plain or len(set(chars)) < len(chars):
        raise DataError(
            f"{path} holds no vocabulary of characters: itos must map the ids from 0 to different "
            "characters; remove the file and set data.tokenizer"
        )
    return "".join(chars)
