"""YAML and JSON that others may have written, as plain values or as a `ValueError`.

Nothing in it is run or looked up: no tags of Python, no variables of the environment.
"""

import json
from typing import Any

import yaml

LARGEST = 100_000  # values of a YAML text, aliases counted as what they stand for; assumption


def load_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` for any other, and where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
