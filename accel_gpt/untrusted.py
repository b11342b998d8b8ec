"""Files, YAML, JSON and numbers that others may have written: plain values or a `ValueError`.

Nothing in them is run or looked up: no tags of Python, no variables of the environment.
"""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

LARGEST = 100_000  # values of a YAML text, aliases counted as what they stand for; assumption
LARGEST_FILE = 1 << 28  # bytes of a text read at once; a tokenizer.json has up to 40 MB
LARGEST_NUMBER = 2**53  # whole numbers up to here are exact in JSON and in 64 bits


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, open for reading; `OSError` for all else: a read of a pipe may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a regular file; `OSError`, or `ValueError` for bytes that are none."""
    with open_file(path) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
    return content.decode("utf-8")


def read_json(path: str | Path, any_number: bool = False) -> Any:
    """`load_json` of `read_text`."""
    return load_json(read_text(path), any_number)


def load_json(text: str, any_number: bool = False) -> Any:
    """The value of a JSON text; `ValueError` for any other, and where it is nested too deeply.

    Also for whole numbers beyond 64 bits, which nothing here counts in, unless `any_number`.
    """
    try:
        return json.loads(text, parse_int=int if any_number else whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_number(text: str) -> int:
    """The number that decimal digits spell, of at most 64 bits; else `ValueError`."""
    if len(text) <= 18:  # the parser found digits: most numbers of a vocabulary
        return int(text)
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        raise ValueError(f"{text[:40]!r} is no whole number of at most 19 digits")
    return int(text)


def is_count(value: object, least: int = 0) -> bool:
    """Whether a value out of a file is a whole number from `least` to `LARGEST_NUMBER`."""
    return type(value) is int and least <= value <= LARGEST_NUMBER


def load_yaml(text: str) -> Any:
    """The value of a YAML text; `ValueError` with problem and line where it is none.

    A few lines of aliases of aliases can stand for more values than any memory holds.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if expanded(node, {}) > LARGEST:
            raise ValueError(f"it stands for more than {LARGEST:,} values")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or 'not YAML'}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (KeyError, AttributeError, TypeError, OverflowError) as error:  # !!bool x, !!timestamp x
        raise ValueError(f"a value is not what its tag says ({error})") from None


def expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for; `ValueError` where it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(expanded(part, known) for part in parts)
    if known[id(node)] == 0:
        raise ValueError("a part of it holds itself")
    return known[id(node)]
