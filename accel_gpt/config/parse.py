"""The parser of YAML and of the command line: same conversions, same errors, into dataclasses."""

import dataclasses
import difflib
import functools
import math
import os
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.names import NAMES
from accel_gpt.config.options import all_options, field_types, own_options
from accel_gpt.config.removed import REMOVED, REMOVED_OPTIONS, is_removed, removed_value
from accel_gpt.config.shipped import resolve_config
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import LARGEST_NUMBER, load_yaml

T = TypeVar("T")

SCHEME = r"[A-Za-z][\w+.-]*://"
# user:password@, and a user alone in a web address, where it is an access token
PASSWORD = re.compile(rf"{SCHEME}[^\s/?#]*:[^\s/?#]*@\S*|(?i:https?)://[^\s/?#]+@\S*")
# parameters by which URLs are signed
SIGNATURE = re.compile(
    rf"{SCHEME}\S*[?&](sig|[\w-]*(?:signature|token|secret|password|credential|key|keyid))=\S*",
    re.IGNORECASE,
)


def load_config(
    argv: Sequence[str],
    prog: str,
    inherit: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> Config:
    """Parse `CONFIG --section.key value ...`, CONFIG a YAML file or the name of a shipped one.

    Precedence: defaults < preset < depth < `model.init_from` < file < command line; but a depth
    on the command line goes before the shape in the file. `inherit` maps the keys that are set to
    those that `model.init_from` brings. Raises `UserError` for a missing
    file, an unknown key, a wrong type or an impossible value.
    """
    path, *words = argv if argv and not argv[0].startswith("-") else ["", *argv]
    check_utf8("CONFIG", path)
    show_help_if_asked(Config, words, f"{prog} CONFIG", essential="--help-all" not in words)
    require(bool(path), f"no config file given; usage: {prog} CONFIG [--section.key v]")
    given = read_values(Config, str(resolve_config(path)), words)
    if (chosen := dict(read_options(Config, words))).get("model.depth") is not None:
        sizes = {key for key, one in all_options(Config).items() if one.size}
        given = {key: v for key, v in given.items() if key in chosen or key not in sizes}
    return config_of(given, inherit)


def config_of(
    given: Mapping[str, Any], inherit: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> Config:
    """The config in which the keys of `given` are set."""
    values = dict(given)
    if values.get("model.init_from", "scratch") != "scratch":
        values.update(inherit(values))
    if values.get("model.depth") is not None:
        from accel_gpt.config.depth import depth_defaults

        values |= depth_defaults(values)
    for key, value in PRESETS[values.get("model.preset", "gpt2")].items():
        values.setdefault(f"model.{key}", value)
    return build(Config, values)


def parse_command(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse the options of a command into its dataclass `cls`; positional fields come first."""
    show_help_if_asked(cls, argv, prog)
    return build(cls, dict(read_options(cls, argv)))


def parse_with_keys(cls: type[T], argv: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """Parse the options of a command that also sets keys of a config.

    Returns its dataclass `cls`, and the words of all options that `cls` does not have.
    """
    show_help_if_asked(cls, argv, prog)
    keys: list[str] = []
    return build(cls, dict(read_options(cls, argv, keys))), keys


def read_values(cls: type, path: str, argv: Sequence[str]) -> dict[str, Any]:
    """The values that the YAML file at `path` and, over it, the options in `argv` set, by key.

    Of keys of which one may be set, as train.max_steps and train.max_tokens, an option replaces the
    file's. The config.yaml of a run means the run in the folder where it lies now.
    """
    values = read_yaml(path)
    require(isinstance(values, dict), f"{path} holds no keys; see configs/ for examples")
    if cls is Config and is_config_of_run(path):
        values = relocate(values, str(Path(path).parent))
    found, options = dict(flatten(cls, values, f"in {path}")), dict(read_options(cls, argv))
    for group in exclusive_keys(cls):
        if any(options.get(key) is not None for key in group):
            found = {key: value for key, value in found.items() if key not in group}
    values = found | options
    return values | own_text(values, options)


def own_text(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that `data.text` stands for, over those of a file where it is among `options`.

    Raises `UserError` where data are named twice, or a text stands in the place of a data folder.
    """
    text, train = values.get("data.text"), values.get("data.train")
    if text is None:
        require(
            not (isinstance(train, str) and Path(train).is_file()),
            f"data.train is {train}, a file where a folder of token shards is expected; to train "
            f"on its text write --data.text {shlex.quote(str(train))} in place of --data.train",
        )
        return {}
    given = options if "data.text" in options else values
    for key in ("data.train", "data.prepare.path", "data.prepare.dataset"):
        require(not given.get(key), f"data.text is {text} and {key} is {given.get(key)}; give one")
    found = {"data.text": None, "data.prepare.path": text, "data.prepare.dataset": None}
    found["data.prepare.source"] = given.get("data.prepare.source") or "auto"
    found["data.train"] = own_text_folder(values.get("out_dir", Config.out_dir))
    if tokenizer := values.get("data.tokenizer"):
        found["data.prepare.tokenizer"] = values.get("data.prepare.tokenizer", tokenizer)
    return found


def own_text_folder(out_dir: str) -> str:
    """The folder in which the text that `data.text` names is prepared."""
    return str(Path(out_dir, "data"))


def read_yaml(path: str) -> Any:
    """Read a YAML file; an empty file is an empty mapping."""
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"fails: {error}"
        if isinstance(error, IsADirectoryError):
            reason = f"is a folder; a run's is {path.rstrip('/')}/config.yaml"
        raise UserError(f"config file {path} {reason}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None


# --------------------------------------------------------------------------- runs that moved


def is_config_of_run(path: str | Path) -> bool:
    """Whether a file is the config.yaml that a run has written into its folder."""
    return Path(path).name == "config.yaml" and Path(path).with_name("run.json").is_file()


def relocate(config: Mapping[str, Any], out_dir: str) -> dict[str, Any]:
    """The keys of a run's config, nested, for the folder `out_dir` in which the run lies now.

    Data folders inside the run's folder move with it: their paths begin with the `out_dir` in
    `config`, as both are relative to the folder in which the run was launched.
    """
    before, data = config.get("out_dir"), config.get("data")
    if not isinstance(before, str) or not before:
        return dict(config)
    moved = dict(config) | {"out_dir": out_dir}
    if isinstance(data, Mapping):
        moved["data"] = dict(data)
        moved["data"]["train"] = relocated(data.get("train", ""), before, out_dir)
        moved["data"]["val"] = relocated(data.get("val"), before, out_dir)
    return moved


def relocated(value: Any, before: str, after: str) -> Any:
    """`value` with the paths in it that lie in the folder `before` in the folder `after`."""
    if isinstance(value, Mapping):
        return {key: relocated(inner, before, after) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [relocated(inner, before, after) for inner in value]
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path, folder = os.path.normpath(value), os.path.normpath(before)
    if not Path(path).is_relative_to(folder) or path.startswith(".."):
        return value
    return str(Path(after, Path(path).relative_to(folder)))


# --------------------------------------------------------------------------- keys


def is_section(hint: Any) -> bool:
    """Whether a type is a dataclass, whose fields are keys below its own."""
    return dataclasses.is_dataclass(hint)


@functools.cache
def leaves(cls: type, prefix: str = "") -> Mapping[str, Any]:
    """Map the dotted key of every field, nested dataclasses included, to its type."""
    found: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        if is_section(hint):
            found.update(leaves(hint, f"{prefix}{name}."))
        else:
            found[prefix + name] = hint
    return types.MappingProxyType(found)


@functools.cache
def sections(cls: type) -> frozenset[str]:
    """The dotted names of all nested dataclasses."""
    return frozenset(k[: dot.start()] for k in leaves(cls) for dot in re.finditer(r"\.", k))


def exclusive_keys(cls: type, prefix: str = "") -> Iterator[list[str]]:
    """Groups of dotted keys of which at most one may be set."""
    for group in getattr(cls, "exclusive", ()):
        yield [prefix + name for name in group]
    for name, hint in field_types(cls).items():
        if is_section(hint):
            yield from exclusive_keys(hint, f"{prefix}{name}.")


def check_key(cls: type, key: str, where: str) -> Any:
    """Return the type of a key, or raise `UserError` that says in one line what to write."""
    known = leaves(cls)
    if key not in known:
        raise UserError(f"unknown key {key} {where}; {advice_on_key(cls, key)}")
    return known[key]


def advice_on_key(cls: type, key: str) -> str:
    """What to write in place of an unknown key.

    The name of another trainer (see `names.py`) comes first, then the same name in another section,
    then the nearest name.
    """
    known = leaves(cls)
    last = key.rpartition(".")[2]
    if answer := answer_of_names(cls, last):
        return answer
    if key in sections(cls):
        example = next(name for name in known if name.startswith(f"{key}."))
        return f"{key} is a section: set one of its keys, such as {example}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    names = {name.rpartition(".")[2]: name for name in known}
    names |= {name: name for name in (*known, *sections(cls))}
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.7):
        return f"did you mean {names[near[0]]}?"
    foreign = [name for name in NAMES if answer_of_names(cls, name)]
    if near := difflib.get_close_matches(last, foreign, n=1, cutoff=0.8):
        return answer_of_names(cls, near[0])
    return f"{'accel-gpt train --help-all' if cls is Config else '--help'} shows all keys"


def answer_of_names(cls: type, name: str) -> str:
    """What to write in place of another trainer's `name`; "" where nothing is known about it."""
    answer = NAMES.get(name, "")
    if answer in (*leaves(cls), *sections(cls)):
        return f"did you mean {answer}?"
    return answer if cls is Config else ""


def flatten(
    cls: type, values: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield checked and converted (dotted key, value) pairs of a nested mapping."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if is_removed(getattr(cls, "prefix", "") + key, value, where):
            continue
        if key not in sections(cls):
            yield key, convert(key, value, check_key(cls, key, where))
        elif value is not None:
            problem = f"{key} {where} is {value!r}; it is a section, with keys of its own"
            require(isinstance(value, Mapping), problem)
            yield from flatten(cls, value, where, f"{key}.")


def read_options(
    cls: type, argv: Sequence[str], others: list[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield checked and converted (key, value) pairs of `VALUE --key value --key=value --flag`.

    Unknown keys raise `UserError`; with `others` they are appended to it, with their values.
    """
    words, known = list(argv), leaves(cls)
    positional = [name for name, one in own_options(cls).items() if one.positional]
    several: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            advice = answer_of_names(cls, word) or "options are written --key value"
            problem = f"unexpected argument {word!r}; {advice}"
            require(bool(positional), problem)
            key = positional[0]
            if get_origin(known[key]) is tuple:
                several.append(word)
            else:
                yield positional.pop(0), convert(key, word, known[key])
            continue
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        has_value = bool(words) and not words[0].startswith("--")
        if others is not None and key not in known:
            others += [word, words.pop(0)] if has_value and not equals else [word]
            continue
        if key in REMOVED:
            raise UserError(f"--{key} no longer exists; {REMOVED[key].advice}")
        if key in REMOVED_OPTIONS and key not in known:
            raise UserError(f"--{key} no longer exists; {REMOVED_OPTIONS[key]}")
        hint = check_key(cls, key, "on the command line")
        if not equals:
            flag = bool in (hint, *get_args(hint)) and not has_value
            require(flag or bool(words), f"--{key} needs a value: {describe_type(hint)}")
            text = "true" if flag else words.pop(0)
        yield key, convert(key, parse_text(key, text, hint), hint)
    if several:
        yield positional[0], convert(positional.pop(0), several, tuple[str, ...])
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    missing = [key for key in positional if key in required]
    require(not missing, f"{' and '.join(missing).upper()} missing; see --help")


def show_help_if_asked(cls: type, argv: Sequence[str], prog: str, essential: bool = False) -> None:
    """Print the help of the options of `cls`, or of the essential ones, and exit."""
    if {"-h", "--help", "--help-all"} & set(argv):
        from accel_gpt.config.help import format_help

        write_out(format_help(cls, prog, essential))
        sys.exit(0)


# --------------------------------------------------------------------------- values


def alternatives(hint: Any) -> list[Any]:
    """The types of a union, or the one type; null left out."""
    union = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else [hint]
    return [option for option in union if option is not type(None)]


def parse_text(key: str, text: str, hint: Any) -> Any:
    """The YAML value that a word of the command line stands for, where `hint` has structure.

    Lists and mappings are written as in YAML; a list of words also as `a,b`.
    """
    origins = {get_origin(option) for option in alternatives(hint)}
    if text.startswith(("[", "{")) and origins & {tuple, Mapping}:
        try:
            return load_yaml(text)
        except ValueError:
            raise UserError(f"{key} is {text!r}, which is not valid YAML") from None
    return [word.strip() for word in text.split(",")] if origins == {tuple} else text


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert `value`, of YAML or of the command line, to the type `hint`; raises `UserError`."""
    option = fitting(value, hint)
    try:
        return to_type(key, value, option)
    except UserError:
        raise
    except OverflowError:
        raise UserError(
            f"{key} is {value!r:.60}; expected a finite number, up to {LARGEST_NUMBER:,}"
        ) from None
    except (KeyError, TypeError, ValueError):
        if sentence := removed_value(key, value):
            raise UserError(sentence) from None
        words = describe_type(hint if option in (int, bool) else option)
        raise UserError(f"{key} is {value!r:.200}; expected {words}") from None


def to_type(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; raises `KeyError`, `TypeError`, `ValueError`, `OverflowError`."""
    if isinstance(value, str):
        check_string(key, value)
    if get_origin(hint) is Literal:
        value = "no" if value is False else value  # YAML 1.1 reads an unquoted no as false
        return {choice: choice for choice in get_args(hint)}[value]
    if is_section(hint):
        if not isinstance(value, Mapping):
            raise TypeError
        return from_mapping(hint, value, f"in {key}")
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or (is_section(item) and not items):
            raise TypeError
        return tuple(to_type(key, one, item) for one in items)
    if hint is type(None):
        return None
    if get_origin(hint) is Mapping:
        if not value or not all(isinstance(t, str) and t for t in (*value, *value.values())):
            raise TypeError
        for text in (*value, *value.values()):
            check_string(key, text)
        return dict(value)
    return to_scalar(value, hint)


def check_string(key: str, text: str) -> None:
    """Raise `UserError` if a text is not UTF-8, or is a URL that holds credentials.

    Configs and commands are recorded and sent to trackers, so credentials must not be in them.
    """
    check_utf8(key, text)
    found = ""
    if PASSWORD.fullmatch(text):
        found = "a user and password"
    elif signature := SIGNATURE.fullmatch(text):
        found = f"the credential {signature[1]}"
    require(
        not found,
        f"{key} is a URL with {found} in it; remove credentials from the URL and set them in the "
        "environment",
    )


def check_utf8(key: str, text: str) -> None:
    """Raise `UserError` if a text, such as a path, holds bytes that are not UTF-8.

    Configs, indexes and records are UTF-8, so they could not name the path again.
    """
    # YAML writes an emoji as a pair of surrogates; a single one stands for a byte that is not UTF-8
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    try:
        joined.encode()
    except UnicodeEncodeError:
        shown = joined.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
        raise UserError(
            f"{key} is {shown}, which is not UTF-8; use UTF-8: rename the file or folder"
        ) from None


def fitting(value: Any, hint: Any) -> Any:
    """The one of a union's types that `value` has the shape of; `hint` where none has it."""
    if type(None) in get_args(hint) and value in (None, "null", "None", "none"):
        return type(None)
    options = alternatives(hint)
    return next((o for o in reversed(options) if len(options) == 1 or has_shape(value, o)), hint)


def has_shape(value: Any, hint: Any) -> bool:
    """Whether `value` may become the type `hint`, one of several."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping)
    return hint in (int, bool) or isinstance(value, list if get_origin(hint) is tuple else str)


def to_scalar(value: Any, hint: Any) -> Any:
    """`value` as a number, a text or a truth value; errors as `to_type`."""
    if hint is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool | dict | list | None):
        raise TypeError
    if hint is int:  # 1000, 1_000 or 1e3
        text = str(value)
        number = int(text) if re.fullmatch("[+-]?[0-9_]+", text) else float(text)
        if not abs(number) <= LARGEST_NUMBER:
            raise OverflowError
        if number != int(number):
            raise ValueError
        return int(number)
    if hint is float and not math.isfinite(float(value)):
        raise OverflowError
    return hint(value)


def describe_type(hint: Any) -> str:
    """A type in words, for errors."""
    options = alternatives(hint)
    if len(options) > 1:
        return " or ".join(map(describe_type, options))
    hint = options[0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        of_sections = f"a list of {describe_type(item)}"
        return of_sections if is_section(item) else "a list, or words separated by commas"
    if is_section(hint):
        return f"{{{', '.join(leaves(hint))}}}"
    if get_origin(hint) is Mapping:
        return "{name: text, ...}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[hint]


# --------------------------------------------------------------------------- objects


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from dotted keys; every other field keeps its default."""
    fields: dict[str, Any] = {}
    kind: Any = cls
    for name, hint in field_types(kind).items():
        if is_section(hint):
            inner = {k[len(name) + 1 :]: v for k, v in values.items() if k.startswith(f"{name}.")}
            fields[name] = build(hint, inner)
        elif name in values:
            fields[name] = values[name]
    return cls(**fields)


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from a nested mapping, as YAML has it; raises `UserError`."""
    return build(cls, dict(flatten(cls, values, where)))


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested mappings, tuples to lists."""
    return dataclasses.asdict(
        config, dict_factory=lambda kv: {k: list(v) if isinstance(v, tuple) else v for k, v in kv}
    )


def to_flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Convert a dataclass, or nested mappings, to dotted keys."""
    nested = to_plain(config) if is_section(config) else config
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(to_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def to_nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested mappings."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found


def changed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `config`, by dotted key, that are not the defaults of its preset."""
    preset = PRESETS.get(str(config.get("model.preset")), {})
    default = to_flat(Config()) | {f"model.{key}": value for key, value in preset.items()}
    return {key: value for key, value in config.items() if default.get(key) != value}


def to_yaml(config: Any) -> str:
    """Write a config as YAML that `load_config` reads back to an equal one."""
    # libyaml's, where PyYAML has it, writes the same text in a fifth of the time
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(to_plain(config), Dumper=dumper, sort_keys=False, allow_unicode=True)
