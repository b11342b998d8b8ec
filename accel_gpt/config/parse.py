"""Parse YAML files and command lines into layers of keys, and merge the layers.

A layer maps dotted keys to values. `merge` is the only place where one layer meets another. Help is
in the layout of argparse. Shipped configs lie in `configs` of the package, in a checkout a link.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin

from accel_gpt.config.experiment import Config
from accel_gpt.config.options import all_options, default_of, field_types, own_options, typed
from accel_gpt.config.values import (
    EXTRA,
    NEAR,
    build,
    changed_keys,
    check_key,
    check_utf8,
    convert,
    describe_type,
    flatten,
    is_config_of_run,
    leaves,
    nearest_keys,
    parse_text,
    relocate,
    with_home,
)
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, did_you_mean, one_line, require
from accel_gpt.files import is_url, load_yaml, read_url

T = TypeVar("T")
Layer = Mapping[str, Any]

OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?")
YAML = (".yaml", ".yml")  # endings of config files
KIND_NAMES: Mapping[Any, str] = MappingProxyType(
    {int: "N", float: "NUMBER", str: "TEXT", bool: "true|false"}
)


def read_given(
    argv: Sequence[str], prog: str, tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Read the dotted keys that `CONFIG --section.key value ...` sets.

    CONFIG is a YAML file, its URL or the name of a shipped one. `tell`: see `merge`. Raises
    `UserError` for a missing file, an unknown key, a wrong type or an invalid value.
    """
    words = list(argv)
    path = ""
    if words and not words[0].startswith("-"):
        path = words.pop(0)
    check_utf8("CONFIG", path)
    show_help_if_asked(Config, words, f"{prog} CONFIG", essential="--help-all" not in words)
    require(
        bool(path),
        "no config file given; expected a YAML file or a name such as quickstart as CONFIG",
    )
    return read_values(Config, path if is_url(path) else str(resolve_config(path)), words, tell)


def read_values(
    cls: type, path: str, argv: Sequence[str], tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Read the keys that the YAML file at `path` and the options in `argv` set.

    If `path` is a URL, the folder there is by default the place of the run: it has the copies, and
    its name is the name of `out_dir`.
    """
    place: dict[str, Any] = {}
    if is_url(path):
        folder = path.partition("?")[0].rpartition("/")[0]
        place = {"out_dir": f"runs/{folder.rpartition('/')[2]}", "checkpoint.copy_to": folder}
    layers = [place, read_layer(cls, path), read_options(cls, argv)]
    return with_text_of_user(with_extra(merge(cls, layers, tell)))


def parse_command(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse the options of a command into its dataclass `cls`."""
    show_help_if_asked(cls, argv, prog)
    return build(cls, read_options(cls, argv))


def parse_with_keys(cls: type[T], argv: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """Parse the options of a command that also accepts keys of a config.

    Returns the options in the dataclass `cls`, and the words of all other options.
    """
    show_help_if_asked(cls, argv, prog)
    keys: list[str] = []
    return build(cls, read_options(cls, argv, keys)), keys


# --------------------------------------------------------------------------- layers


def merge(
    cls: type, layers: Sequence[Layer], tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the keys of all `layers` of a `cls`; a later layer overrides an earlier one.

    A key that a layer sets to a value other than null also removes, from the layers before it, what
    its option `replaces`, and what its value does not use. `tell` gets a line for a value that
    removes keys that differ from their defaults.
    """
    options = all_options(cls)
    merged: dict[str, Any] = {}
    for layer in layers:
        replaced: list[str] = []
        changed = changed_keys(merged)
        for key, value in layer.items():
            if value is None or key not in options:
                continue
            unused = [*unused_keys(cls, key, value)]
            replaced += [*options[key].replaces, *unused]
            lost = [name for name in unused if name in changed]
            if tell is not None and lost:
                tell(f"{key} {typed(value)} does not use {', '.join(lost)}: left out")
        for name in replaced:
            for key in [key for key in merged if key == name or key.startswith(f"{name}.")]:
                del merged[key]
        merged |= layer
    return merged


def unused_keys(cls: type, key: str, value: Any) -> Iterator[str]:
    """Yield the keys in the section of `key` that this value of it does not use."""
    section, _, name = key.rpartition(".")
    for other, one in all_options(cls).items():
        if one.used_with is None or other.rpartition(".")[0] != section:
            continue
        used, values = one.used_with
        if used == name and value not in values:
            yield other


def with_extra(values: Layer) -> dict[str, Any]:
    """Return `values` with the keys `model.extra.NAME` as items of `model.extra`."""
    found = {key: value for key, value in values.items() if not key.startswith(EXTRA)}
    inner = {key.removeprefix(EXTRA): values[key] for key in values.keys() - found.keys()}
    if inner:
        found["model.extra"] = {**found.get("model.extra", {}), **dict(sorted(inner.items()))}
    return found


def with_text_of_user(values: Layer) -> dict[str, Any]:
    """Return `values` with a data folder and its preparation in place of `data.text`.

    Raises `UserError` if another key names the data, too, or if data.train is a file.
    """
    text = values.get("data.text")
    train = values.get("data.train")
    if text is None:
        require(
            not (isinstance(train, str) and Path(train).is_file()),
            f"data.train is {train}, a file, but must be a folder of token shards; data.text takes "
            "a text",
        )
        return dict(values)
    for key in ("data.train", "data.prepare.source"):
        require(
            not values.get(key),
            f"data.text is {text} and {key} is {values.get(key)}; set one of them",
        )
    return {
        **values,
        "data.text": None,
        "data.train": own_text_folder(values.get("out_dir", Config.out_dir)),
        "data.prepare.source": text,
    }


def own_text_folder(out_dir: str) -> str:
    """Return the folder for the prepared text of `data.text`."""
    return str(Path(out_dir, "data"))


# --------------------------------------------------------------------------- a file


def read_layer(cls: type, path: str) -> dict[str, Any]:
    """Read the keys that the YAML file at `path` sets.

    If it is the config.yaml of a run that was moved, its paths are updated.
    """
    content = read_yaml(path)
    require(
        isinstance(content, dict),
        f"{path} holds no keys; expected lines such as `out_dir: runs/mine`",
    )
    if cls is Config and is_config_of_run(path):
        content = relocate(content, str(Path(path).parent))
    return dict(flatten(cls, content, f"in {path}"))


def read_yaml(path: str) -> Any:
    """Read a YAML file; returns an empty mapping for an empty file."""
    try:
        content = read_url(path) if is_url(path) else Path(path).read_bytes()
        text = content.decode()
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except Exception as error:  # of the disk, botocore, huggingface_hub, ...
        raise UserError(f"config file {path} cannot be read: {one_line(error)}") from None
    try:
        return load_yaml(text) or {}
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None


# --------------------------------------------------------------------------- a command line


def read_options(cls: type, argv: Sequence[str], others: list[str] | None = None) -> dict[str, Any]:
    """Read the keys of `VALUE --key value --key=value --flag` with their converted values.

    Unknown keys raise `UserError`. If `others` is given, they and their values are appended to it.
    An option that takes several values may be repeated.
    """
    words = list(argv)
    known = leaves(cls)
    positional = [name for name, one in own_options(cls).items() if one.positional]
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            key = key.replace("-", "_")
            hint = check_option(cls, key, takes_keys=others is not None)
            if others is not None and key not in known:
                others.append(word)
                if not equals and words and not words[0].startswith("--"):
                    others.append(words.pop(0))
                continue
            if not equals:
                text = take_value(key, words, hint)
            value = parse_text(shown(cls, key), text, hint)
        else:
            require(
                bool(positional) and not re.fullmatch("-[A-Za-z].*", word),
                f"unexpected argument {word!r}; options are written --key value",
            )
            key = positional[0]
            hint = known[key]
            is_list = get_origin(hint) is tuple
            value = [word] if is_list else word
            if not is_list:
                positional.pop(0)
        value = with_home(cls, key, convert(shown(cls, key), value, hint))
        values[key] = values.get(key, ()) + value if get_origin(hint) is tuple else value
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    missing = [key for key in positional if key in required - values.keys()]
    require(not missing, f"{' and '.join(missing).upper()} missing; --help shows all options")
    return values


def take_value(key: str, words: list[str], hint: Any) -> str:
    """Take the value of `--key` from the `words` that follow it; a flag without a value is true."""
    if bool in (hint, *get_args(hint)) and (not words or words[0].startswith("--")):
        return "true"
    require(
        bool(words) and OPTION.fullmatch(words[0]) is None,
        f"--{key} needs a value: {describe_type(hint)}",
    )
    return words.pop(0)


def show_help_if_asked(cls: type, argv: Sequence[str], prog: str, essential: bool = False) -> None:
    """If `argv` asks for help, print the options of `cls` and exit.

    `essential`: print only the essential options.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        write_out(format_help(cls, prog, essential))
        sys.exit(0)


def check_option(cls: type, key: str, takes_keys: bool) -> Any:
    """Return the type of an option of a command, or of a key of a config if it `takes_keys`.

    Raises `UserError` for an unknown option; the command's own options are named first.
    """
    if cls is Config:
        return check_key(cls, key, "on the command line")
    known = leaves(cls)
    keys = leaves(Config) if takes_keys else {}
    is_argument = key in own_options(cls) and own_options(cls)[key].positional
    if takes_keys and key.startswith(EXTRA):
        return check_key(Config, key, "on the command line")
    if (key in known or key in keys) and not is_argument:
        return known.get(key, keys.get(key))
    raise UserError(f"unknown option --{key}; {nearest_options(cls, key, takes_keys)}")


def nearest_options(cls: type, key: str, takes_keys: bool) -> str:
    """Return the options of a command that an unknown option may mean."""
    names = {name.removesuffix("_"): shown(cls, name) for name in own_options(cls)}
    last = key.rpartition(".")[2]
    word = last if last in names else key
    help_text = f"accel-gpt {getattr(cls, 'name', '')} --help shows all options"
    otherwise = nearest_keys(Config, key) if takes_keys else help_text
    return did_you_mean(word, names, otherwise, shown=names, cutoff=NEAR)


def shown(cls: type, key: str) -> str:
    """Return how an error names an option: key of a config, --option or POSITIONAL."""
    one = own_options(cls).get(key)
    if one and one.positional:
        return key.upper()
    return f"{getattr(cls, 'prefix', '')}{key}"


# --------------------------------------------------------------------------- shipped configs


def shipped_folder() -> Path:
    """Return the folder of the shipped configs."""
    return (Path(__file__).parents[1] / "configs").resolve()


def shipped_configs() -> Mapping[str, Path]:
    """Map the name of each shipped config to its file."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def resolve_config(word: str) -> Path:
    """Return the config file at the path `word`, or else the shipped config with that name.

    Raises `UserError` with similar names if there is no such config. A leading ~ is the home
    folder.
    """
    path = Path(word).expanduser()
    shipped = shipped_configs()
    name = word.removesuffix(".yaml")
    if path.exists() and not (path.is_dir() and name in shipped):
        return path
    if name in shipped:
        return shipped[name]
    nearby = {str(other): other.stem for other in path.parent.glob("*.yaml")}
    expected = f"expected a file or {', '.join(shipped)}"
    near = did_you_mean(word, [*shipped, *nearby], expected)
    raise UserError(f"there is no file {word}; {near}")


# --------------------------------------------------------------------------- help


def format_help(cls: type, prog: str, essential: bool = False) -> str:
    """Format the help of `prog`, whose options are the fields of `cls`.

    A field that is a dataclass is a section, with options `--section.key`.
    `essential`: show only the essential options.
    """
    words = [prog]
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name in own_options(cls) and own_options(cls)[field.name].positional:
            name = field.name.upper()
            if get_origin(hints[field.name]) is tuple:
                name += " ..."
            words.append(name if field.default is dataclasses.MISSING else f"[{name}]")
    parser = argparse.ArgumentParser(
        usage=" ".join([*words, "[--option value ...]"]),
        description=inspect.getdoc(cls),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28
        ),
        add_help=False,
    )
    sections: list[tuple[str, Any]] = [("", cls)]  # outer sections come before inner ones
    for prefix, section in sections:
        title = "options"
        if prefix:
            title = f"{prefix[:-1]}: {(section.__doc__ or '').partition('.')[0]}"
        add_options(parser, title, section, prefix, essential)
        for name, hint in field_types(section).items():
            if dataclasses.is_dataclass(hint):
                sections.append((f"{prefix}{name}.", hint))
    return parser.format_help()


def add_options(
    parser: argparse.ArgumentParser, title: str, cls: type, prefix: str, essential: bool
) -> None:
    """Add the options of one section to a group of `parser`, and positional options to `parser`.

    `essential`: add only the essential options.
    """
    group = parser.add_argument_group(title)
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints or dataclasses.is_dataclass(hints[field.name]):
            continue
        key = f"{prefix}{field.name}".removesuffix("_")
        described = own_options(cls)[field.name]
        text = described.description
        if described.positional:
            parser.add_argument(key, metavar=key.upper(), help=text.replace("%", "%%"))
        elif described.essential or not essential:
            if field.default != "":
                text += f" (default: {typed(default_of(field))})"
            group.add_argument(
                f"--{key}", metavar=value_name(hints[field.name]), help=text.replace("%", "%%")
            )


def value_name(hint: Any) -> str:
    """Return the placeholder for the value of an option."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if hint == tuple[str, ...]:
        return "TEXT"  # repeated for several
    if get_origin(hint) is tuple:
        return f"{value_name(get_args(hint)[0])},..."
    if get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join(value_name(one) for one in get_args(hint) if one is not type(None))
    return KIND_NAMES.get(hint, "VALUE")
