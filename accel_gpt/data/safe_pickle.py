"""nanoGPT's vocabulary of characters out of its pickle (meta.pkl), without running anything.

Two locks: only the opcodes of dicts, strings and numbers are let through, and the unpickler finds
no class or function, which every call that a pickle asks for has to name.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

from accel_gpt.errors import DataError
from accel_gpt.files import open_file

LARGEST = 16 << 20  # bytes; nanoGPT's vocabulary of all of Unicode has 12 MB
# no tuples: of some that share parts, a hash takes for ever
OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE"),
        *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    )
)


class PlainUnpickler(pickle.Unpickler):
    """Finds no class or function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Refuse."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_vocabulary(path: Path) -> str:
    """The characters of nanoGPT's meta.pkl in the order of their ids.

    Raises `DataError` when it holds something else (data/shakespeare_char/prepare.py writes it).
    """
    meta = read_plain(path)
    itos = meta.get("itos") if isinstance(meta, dict) else None
    chars: list[Any] = [itos.get(i) for i in range(len(itos))] if isinstance(itos, dict) else []
    plain = all(isinstance(c, str) and len(c) == 1 and not "\ud800" <= c <= "\udfff" for c in chars)
    if not chars or not plain or len({*chars}) < len(chars):
        raise DataError(
            f"{path} is no vocabulary of characters; expected a dict with itos, which gives each "
            "id from 0 on its character: remove it and set data.tokenizer"
        )
    return "".join(chars)


def read_plain(path: Path) -> Any:
    """The dicts, strings and numbers that a pickle file holds.

    Raises `DataError` for a file that holds anything else, is damaged, or exceeds `LARGEST` bytes.
    """
    try:
        with open_file(path) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST:
        raise DataError(f"{path} has more than {LARGEST:,} bytes; such a pickle is not read")
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in OPCODES:
                raise DataError(
                    f"{path} uses the pickle opcode {opcode.name}, which makes more than plain "
                    "values; only dicts, strings and numbers are read: nothing is run"
                )
            if "PUT" in opcode.name and int(argument or 0) > len(content):  # it takes memory
                raise ValueError(f"value {argument} of a file of {len(content)} bytes")
        return PlainUnpickler(io.BytesIO(content)).load()
    except DataError:
        raise
    except Exception as error:  # whatever pickle raises for what it does not understand
        raise DataError(f"{path} is a damaged pickle: {str(error)[:200]}") from None
