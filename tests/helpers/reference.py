"""Write the reference pages of docs/ from the code; `tests/test_docs.py` compares them."""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import accel_gpt
from accel_gpt.commands.options import COMMANDS, TrainCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import REQUIRED, Option, all_options, field_types, own_options
from accel_gpt.config.parse import value_name
from accel_gpt.config.values import is_section, leaves
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import MLP, Block, CausalSelfAttention, KVCache, Matrix, RMSNorm
from accel_gpt.model.loss import Head

DOTTED = re.compile(r".*\..*").fullmatch
RUN = ("Run", "Run.metrics", "Run.sample", "Run.evaluate", "Run.export", "Run.push_to_hub")
PYTHON = ("run", "load", *RUN)


KEY = re.compile(rf"\b(?:{'|'.join(sorted(filter(DOTTED, leaves(Config)), reverse=True))})\b")
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")


def escape(text: str) -> str:
    """Return a description as Markdown that shows the same characters."""
    return text.replace("<", "&lt;").replace("*", r"\*")


def cell(text: str) -> str:
    """Return a description for a cell of a table, with keys as code."""
    return KEY.sub(r"`\g<0>`", escape(text).replace("|", r"\|"))


def values_of(kind: Any, name: str) -> str:
    """Return the values that an option takes, as code: choices, or a placeholder."""
    words = value_name(field_types(kind)[name]).split("|")
    return ", ".join(f"`{word}`" for word in words)


def default(value: Any) -> str:
    """Return a default in YAML syntax."""
    if value is REQUIRED:
        return "required"
    shown = json.dumps(value, default=lambda other: other.path)
    if isinstance(value, str) and value:
        shown = value
    return f"`{shown}`"


# --------------------------------------------------------------------------- keys


def keys_page() -> Iterator[str]:
    """Write the page of all keys of a config; each has a heading and the anchor `#section.key`."""
    yield from textwrap.dedent(
        """\
        # Config keys

        A config is a YAML file with the keys that differ from their defaults:

        ```yaml
        out_dir: runs/small
        train:
          max_steps: 1000
        ```

        To set a key on the command line, write `--train.max_steps 1000`. It overrides the file.
        If its value does not use some keys of the file, they are left out, and a line names them.
        In a path, a leading `~` is your home folder.

        `accel-gpt train --help-all` prints this page.

        Each key has its values, its default, and what a resume does with a new value.

        | values | what to write |
        |---|---|
        | `N` | a whole number |
        | `NUMBER` | a number |
        | `VALUE` | a mapping in YAML |
        | `A,...` | numbers with commas, or a list in YAML: `[{path: a}, {path: b}]` |

        | resume | effect of a new value |
        |---|---|
        | free | the run uses the new value |
        | start | none: the key only acts before the first step |
        | ask | the run does not resume, unless `checkpoint.allow_change` names the key |
        | refuse | the run does not resume: start a new run |

        If the content of the train data has changed, set `checkpoint.allow_change: [data.train]`.
        """
    ).splitlines()
    yield ""
    yield from keys_of(Config, "", "The run")
    yield from sections_of(Config, "")


def sections_of(kind: Any, prefix: str) -> Iterator[str]:
    """Write the tables of the sections inside a section."""
    for name, hint in field_types(kind).items():
        value = getattr(kind(), name)
        if is_section(hint):
            yield from keys_of(type(value), f"{prefix}{name}.", f"{prefix}{name}")
            yield from sections_of(type(value), f"{prefix}{name}.")


def keys_of(kind: Any, prefix: str, title: str) -> Iterator[str]:
    """Write the keys of one section."""
    treated = all_options(Config)
    yield f"## {title}"
    yield ""
    if prefix:
        yield (inspect.getdoc(kind) or "").partition("\n")[0]
        yield ""
    values = kind()
    for name, described in own_options(kind).items():
        key = f"{prefix}{name}"
        yield f'### <a id="{key}"></a>{key}'
        yield ""
        shown = default(getattr(values, name))
        yield f"{values_of(kind, name)}; default {shown}; resume: {resume_of(treated[key])}"
        yield ""
        meaning = PAGE.sub(r"[\g<0>](../\1)", escape(described.description))
        yield KEY.sub(lambda found: f"[`{found[0]}`](#{found[0]})", meaning)
        yield ""


def resume_of(option: Option) -> str:
    """Return the effect of another value at a resume."""
    if option.null_is_another_run:
        return "ask; refuse if one of the two is null"
    if option.exact:
        return f"{option.resume}; ask with `train.reproducible`"
    return str(option.resume)


# --------------------------------------------------------------------------- commands


def commands_page() -> Iterator[str]:
    """Write the page of all commands with their options."""
    yield from textwrap.dedent(
        """\
        # Commands

        `accel-gpt COMMAND --help` prints the options of a command; `python -m accel_gpt` does what
        `accel-gpt` does. Write an option as `--name value` or `--name=value`. For a list, repeat
        the option or write `--name '[a, b]'`. Commands that take CONFIG also take every
        [config key](keys.md) as `--section.key value`.
        [Exit codes](exit-codes.md) says what the code of a command means.
        """
    ).splitlines()
    yield ""
    yield "| command | what it does |"
    yield "|---|---|"
    for name, kind in COMMANDS.items():
        yield f"| [`accel-gpt {name}`](#accel-gpt-{name}) | {cell(kind.summary)} |"
    yield ""
    for name, kind in COMMANDS.items():
        yield from command(name, Config if kind is TrainCommand else kind)


def command(name: str, kind: Any) -> Iterator[str]:
    """Write the description, examples and options of a command."""
    text, _, examples = (inspect.getdoc(kind) or "").partition("Examples:\n")
    yield f"## accel-gpt {name}"
    yield ""
    for paragraph in text.strip().split("\n\n"):
        yield from textwrap.wrap(paragraph, 118)
        yield ""
    yield "```sh"
    yield from textwrap.dedent(examples).rstrip().splitlines()
    yield "```"
    yield ""
    if kind is Config:
        yield "Its options are the [keys of the config](keys.md)."
        yield ""
        return
    defaults = {field.name: field.default for field in kind.__dataclass_fields__.values()}
    yield "| option | values | default | meaning |"
    yield "|---|---|---|---|"
    for option, described in own_options(kind).items():
        name = option.removesuffix("_")
        shown = name.upper() if described.positional else f"--{name}"
        cells = (
            f"`{shown}`",
            values_of(kind, option),
            default(defaults[option]),
            cell(described.description),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


# --------------------------------------------------------------------------- python


def python_section() -> Iterator[str]:
    """Write the signatures of the Python interface and their docstrings."""
    for name in PYTHON:
        found: Any = accel_gpt
        for part in name.split("."):
            found = getattr(found, part)
        yield f"### accel_gpt.{name}"
        yield ""
        if not isinstance(found, property):
            yield "```python"
            yield f"{name}({', '.join(parameters(found))})"
            yield "```"
            yield ""
        yield from (inspect.getdoc(found) or "").splitlines()
        yield ""


def parameters(function: Any) -> Iterator[str]:
    """Write the parameters of a function without their types."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield f"**{name}"
        elif parameter.default is inspect.Parameter.empty:
            yield name
        else:
            value = parameter.default
            yield f"{name}={json.dumps(value) if isinstance(value, str) else value}"


# --------------------------------------------------------------------------- parts of a GPT

# a class, and the methods that a file of --code overrides or calls
PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (GPT, ("forward",)),
    (Block, ("forward",)),
    (CausalSelfAttention, ("project", "forward")),
    (MLP, ("forward",)),
    (Matrix, ("forward",)),
    (RMSNorm, ("forward",)),
    (Head, ("forward",)),
    (KVCache, ("append",)),
)


def parts_table() -> Iterator[str]:
    """Write a row with the signatures of each part."""
    for part, methods in PARTS:
        written = [f"`{name}({', '.join(parameters(getattr(part, name)))})`" for name in methods]
        constructor = ", ".join(parameters(part))
        yield f"| `{part.__name__}` | `({constructor})` | {', '.join(written)} |"


PAGES: Mapping[str, Callable[[], Iterator[str]]] = MappingProxyType(
    {
        "docs/reference/keys.md": keys_page,
        "docs/reference/commands.md": commands_page,
    }
)
