"""Plain values out of a pickle, without running anything that it asks for.

nanoGPT keeps its character vocabulary as one (meta.pkl). `pickletools` reads the opcodes; those
that make or call objects are refused here.
"""

import os
import pickletools
import warnings
from pathlib import Path
from typing import Any

from accel_gpt.errors import DataError

LIMIT = 16 << 20  # bytes; nanoGPT's vocabulary of all of Unicode has 12 MB
PROTOCOL = 5  # the newest, since Python 3.8
KEY_BITS = 64  # a longer number as a key takes too long to hash

CONSTANTS = (("NONE", None), ("NEWTRUE", True), ("NEWFALSE", False))
LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
SHORT_TUPLES = (("TUPLE1", 1), ("TUPLE2", 2), ("TUPLE3", 3))


def read_plain(path: Path) -> Any:
    """The dicts, lists, tuples, strings, numbers, booleans and None that a pickle file holds.

    Raises `DataError` for a file that holds anything else, is damaged, or has over `LIMIT` bytes.
    """
    try:
        size = os.stat(path).st_size
        content = path.read_bytes() if size <= LIMIT else b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if size > LIMIT:
        raise DataError(f"{path} has {size} bytes; a pickle is read up to {LIMIT} bytes")
    return parse(content, path)


def parse(content: bytes, where: str | Path) -> Any:
    """The plain value that `content`, a pickle of protocol 0 to 5, holds; see `read_plain`."""
    machine = _Machine()
    try:
        with warnings.catch_warnings(action="ignore"):  # of strings with odd escapes
            for opcode, argument, _ in pickletools.genops(content):
                machine.step(opcode.name, argument)
        (value,) = machine.stack
    except _Refused as error:
        raise DataError(
            f"{where} uses the pickle opcode {error}, which makes more than plain values; only "
            "dicts, lists, tuples, strings, numbers, booleans and None are read: nothing is run"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{where} is a damaged pickle: {str(error)[:200]}") from None
    return value


def read_vocabulary(path: Path) -> str:
    """The characters of nanoGPT's meta.pkl in the order of their ids.

    Raises `DataError` when it holds something else (data/shakespeare_char/prepare.py writes it).
    """
    meta = read_plain(path)
    itos = meta.get("itos") if isinstance(meta, dict) else None
    chars = "".join(ordered(itos))
    unpaired = any("\ud800" <= char <= "\udfff" for char in chars)
    if not chars or unpaired or len(set(chars)) < len(chars):
        raise DataError(
            f"{path} is no vocabulary of characters; expected a dict with itos, which gives each "
            "id from 0 on its character: remove it and set data.tokenizer"
        )
    stoi = {char: i for i, char in enumerate(chars)}
    for key, expected in (("stoi", stoi), ("vocab_size", len(chars))):
        if meta.get(key, expected) != expected:
            raise DataError(f"{path} contradicts itself: its itos and its {key} differ")
    return chars


def ordered(itos: Any) -> list[str]:
    """Characters by id; none unless each id from 0 on has one."""
    if not isinstance(itos, dict) or not all(type(i) is int for i in itos):
        return []
    chars = [itos.get(i) for i in range(len(itos))]
    whole = all(isinstance(char, str) and len(char) == 1 for char in chars)
    return [str(char) for char in chars] if whole else []


class _Refused(Exception):
    """Name of an opcode that plain values do not need."""


class _Machine:
    """The stack machine of the pickle format, as far as plain values need it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under each mark
        self.memo: dict[int, Any] = {}
        self.constants = dict(CONSTANTS)
        self.short_tuples = dict(SHORT_TUPLES)

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in LITERALS:
            self.stack.append(argument)
        elif name in self.constants:
            self.stack.append(self.constants[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise ValueError(f"it refers to the value {argument}, which it does not hold")
            self.stack.append(self.memo[argument])
        elif name == "PROTO":
            if argument > PROTOCOL:
                raise ValueError(f"protocol {argument}, expected at most {PROTOCOL}")
        elif name not in ("FRAME", "STOP"):
            self.gather(name)

    def gather(self, name: str) -> None:
        """Carry out an opcode that makes or fills a container."""
        if name == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif name == "EMPTY_DICT":
            self.stack.append({})
        elif name == "EMPTY_LIST":
            self.stack.append([])
        elif name == "EMPTY_TUPLE":
            self.stack.append(())
        elif name in self.short_tuples:
            self.stack.append(tuple(self.pop(self.short_tuples[name])))
        elif name == "TUPLE":
            self.push(tuple(self.pop_mark()))
        elif name == "LIST":
            self.push(self.pop_mark())
        elif name == "DICT":
            items = self.pop_mark()
            self.push({})
            self.set_items(items)
        elif name in ("APPEND", "APPENDS"):
            items = self.pop(1) if name == "APPEND" else self.pop_mark()
            self.target(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.pop(2) if name == "SETITEM" else self.pop_mark())
        else:
            raise _Refused(name)

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        """Take the last `count` values."""
        if len(self.stack) < count:
            raise ValueError("its stack is empty")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def pop_mark(self) -> list[Any]:
        """Take the values since the last mark."""
        if not self.below:
            raise ValueError("a mark is missing")
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def target(self, kind: type) -> Any:
        """The container that is being filled, the last value of the stack."""
        if not self.stack or type(self.stack[-1]) is not kind:
            raise ValueError(f"a {kind.__name__} is missing")
        return self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        """Put `items`, each key followed by its value, into a dict."""
        keys = items[::2]
        for key in keys:
            if isinstance(key, dict | list | tuple):
                raise ValueError(f"a {type(key).__name__} is a key; expected a string or a number")
            if isinstance(key, int) and key.bit_length() > KEY_BITS:
                raise ValueError(f"a key is a number of {key.bit_length()} bits")
        self.target(dict).update(zip(keys, items[1::2], strict=True))
