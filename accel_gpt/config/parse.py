"""Parse YAML files and command lines into keys with values, or into the options of a command.

Files and command lines use the same conversions and checks.
"""

import contextlib
import dataclasses
import math
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from accel_gpt.config.experiment import Config
from accel_gpt.config.help import format_help
from accel_gpt.config.model import Scalar
from accel_gpt.config.options import all_options, field_types, own_options
from accel_gpt.config.plan import LENGTH_KEYS
from accel_gpt.config.shipped import is_shipped, resolve_config
from accel_gpt.config.values import (
    build,
    is_config_of_run,
    is_section,
    leaves,
    relocate,
    sections,
)
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.files import LARGEST_NUMBER, load_yaml

T = TypeVar("T")

PREPARE = "data.prepare."
EXTRA = "model.extra."
SUBSET = ("data.prepare.dataset_config", "data.prepare.dataset_split")
# options that name another text -> keys of the file that describe its text
KEYS_OF_TEXT: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "data.text": (
            "data.train",
            "data.prepare.path",
            "data.prepare.dataset",
            *SUBSET,
            "data.prepare.text_field",
            "data.prepare.separator",
            "sample.prompts",
        ),
        "data.train": ("data.text",),
        "data.prepare.path": ("data.prepare.dataset", *SUBSET),
        "data.prepare.dataset": ("data.prepare.path", *SUBSET),
    }
)
COMMAND_WORDS = ("help-all", "dump_config")  # of accel-gpt train, beside the keys
NULLS = ("null", "Null", "NULL", "None", "none")  # of YAML and Python
# of YAML 1.1, in small letters
BOOLEANS = types.MappingProxyType(
    {"yes": True, "y": True, "on": True, "no": False, "n": False, "off": False}
)
OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?")
NEAR = 0.76  # least similarity of an option that is named; push is nearly so like gpus
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")  # options of other trainers -> ours
SCHEME = r"[A-Za-z][\w+.-]*://"
# user:password@ in any URL, and user@ in a web address, where the user is an access token
PASSWORD = re.compile(rf"{SCHEME}[^\s/?#]*:[^\s/?#]*@\S*|(?i:https?)://[^\s/?#]+@\S*")
# query parameters of signed URLs
SIGNATURE = re.compile(
    rf"{SCHEME}\S*[?&](sig|[\w-]*(?:signature|token|secret|password|credential|key|keyid))=\S*",
    re.IGNORECASE,
)


def read_given(argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Read the dotted keys that `CONFIG --section.key value ...` sets.

    CONFIG is a YAML file or the name of a shipped one. The command line overrides the file. One
    exception: a depth on the command line overrides the sizes in the file, too.

    Raises `UserError` for a missing file, an unknown key, a wrong type or an invalid value.
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
    given = read_values(Config, str(resolve_config(path)), words)
    options = dict(read_options(Config, words))
    if options.get("model.depth") is not None:
        for key, one in all_options(Config).items():
            if one.size and key not in options:
                given.pop(key, None)
    return given


def parse_command(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse the options of a command into its dataclass `cls`."""
    show_help_if_asked(cls, argv, prog)
    return build(cls, dict(read_options(cls, argv)))


def parse_with_keys(cls: type[T], argv: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """Parse the options of a command that also accepts keys of a config.

    Returns the options in the dataclass `cls`, and the words of all other options.
    """
    show_help_if_asked(cls, argv, prog)
    keys: list[str] = []
    return build(cls, dict(read_options(cls, argv, keys))), keys


def read_values(cls: type, path: str, argv: Sequence[str]) -> dict[str, Any]:
    """Read the keys that the YAML file at `path` sets, overridden by the options in `argv`.

    If a group of keys is exclusive, such as train.max_steps and train.max_tokens, an option
    replaces all keys of the group in the file. A length replaces the file's train.budget. If an
    option names another text, the file's `KEYS_OF_TEXT` are dropped, and if it is data.train, the
    prompts of a shipped file. The file's data.prepare is dropped if an option sets data.train, or
    sets data.prepare.source to null, and no option sets a key of data.prepare. If the file is the
    config.yaml of a run that was moved, its paths are updated.
    """
    content = read_yaml(path)
    require(
        isinstance(content, dict),
        f"{path} holds no keys; expected lines such as `out_dir: runs/mine`",
    )
    if cls is Config and is_config_of_run(path):
        content = relocate(content, str(Path(path).parent))
    values = dict(flatten(cls, content, f"in {path}"))
    options = dict(read_options(cls, argv))
    for group in exclusive_keys(cls):
        if any(options.get(key) is not None for key in group):
            for key in group:
                values.pop(key, None)
    if any(options.get(key) is not None for key in LENGTH_KEYS):
        values.pop("train.budget", None)
    prepares = any(options[key] is not None for key in options if key.startswith(PREPARE))
    if ("data.train" in options or f"{PREPARE}source" in options) and not prepares:
        for key in [key for key in values if key.startswith(PREPARE)]:
            del values[key]
    for option, keys in KEYS_OF_TEXT.items():
        if options.get(option) is not None:
            for key in keys:
                values.pop(key, None)
    if options.get("data.train") is not None and is_shipped(path):
        values.pop("sample.prompts", None)
    values |= options
    return with_extra(values | own_text(values, options))


def with_extra(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the keys `model.extra.NAME` as items of `model.extra`."""
    found = {key: value for key, value in values.items() if not key.startswith(EXTRA)}
    inner = {key.removeprefix(EXTRA): values[key] for key in values.keys() - found.keys()}
    if inner:
        found["model.extra"] = {**found.get("model.extra", {}), **dict(sorted(inner.items()))}
    return found


def own_text(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that replace `data.text`.

    In `options`, `data.text` overrides the data keys of the file. Raises `UserError` if it is set
    together with another data key, or if data.train is a file instead of a folder.
    """
    text = values.get("data.text")
    train = values.get("data.train")
    if text is None:
        require(
            not (isinstance(train, str) and Path(train).is_file()),
            f"data.train is {train}, a file, but must be a folder of token shards; data.text takes "
            "a text",
        )
        return {}
    given = options if "data.text" in options else values
    for key in ("data.train", "data.prepare.path", "data.prepare.dataset"):
        require(
            not given.get(key),
            f"data.text is {text} and {key} is {given.get(key)}; set one of them",
        )
    found = {
        "data.text": None,
        "data.train": own_text_folder(values.get("out_dir", Config.out_dir)),
        "data.prepare.path": text,
        "data.prepare.dataset": None,
        "data.prepare.source": given.get("data.prepare.source") or "auto",
    }
    tokenizer = values.get("data.tokenizer")
    if tokenizer:
        found["data.prepare.tokenizer"] = given.get("data.prepare.tokenizer", tokenizer)
    return found


def own_text_folder(out_dir: str) -> str:
    """Return the folder for the prepared text of `data.text`."""
    return str(Path(out_dir, "data"))


def read_yaml(path: str) -> Any:
    """Read a YAML file; returns an empty mapping for an empty file."""
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {error}"
        if isinstance(error, FileNotFoundError):
            reason = "does not exist"
        elif isinstance(error, IsADirectoryError):
            reason = "is a folder; expected a YAML file"
        raise UserError(f"config file {path} {reason}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None


# --------------------------------------------------------------------------- keys


def exclusive_keys(cls: type, prefix: str = "") -> Iterator[list[str]]:
    """Yield each group of dotted keys that exclude one another."""
    for group in getattr(cls, "exclusive", ()):
        yield [prefix + name for name in group]
    for name, hint in field_types(cls).items():
        if is_section(hint):
            yield from exclusive_keys(hint, f"{prefix}{name}.")


def check_key(cls: type, key: str, where: str) -> Any:
    """Return the type of a key; raises `UserError` for an unknown key."""
    known = leaves(cls)
    if cls is Config and key.startswith(EXTRA) and key.count(".") == EXTRA.count("."):
        return Scalar
    if key not in known:
        raise UserError(f"unknown key {key} {where}; {nearest_keys(cls, key)}")
    return known[key]


def nearest_keys(cls: type, key: str) -> str:
    """Return the keys that an unknown key may mean: of another section or another trainer too."""
    known = (*leaves(cls), *sections(cls))
    last = key.rpartition(".")[2]
    if cls is Config:
        others = load_yaml(OTHER_NAMES.read_text(encoding="utf-8"))
        ours = others.get(key) or others.get(last)
        if ours:
            return f"did you mean {ours}?"
    by_name: dict[str, list[str]] = {}
    for name in known:
        by_name.setdefault(name.rpartition(".")[2], []).append(name)
    names = {name: " or ".join(same[:3]) for name, same in by_name.items()}
    names |= {name: name for name in known}
    if cls is Config:
        names |= {word.replace("-", "_"): f"--{word}" for word in COMMAND_WORDS}
    word = last if last in names else key
    otherwise = f"--{'help-all' if cls is Config else 'help'} shows all keys"
    return did_you_mean(word, names, otherwise, shown=names, cutoff=NEAR)


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


def flatten(
    cls: type, values: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested mapping with their values, checked and converted."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in sections(cls):
            hint = check_key(cls, key, where)
            require(
                value is None
                or key not in all_options(cls)
                or not all_options(cls)[key].command_line_only,
                f"{key} {where} would execute a file, so only the command line may set it; remove "
                f"it, and use --{key}",
            )
            yield key, with_home(cls, key, convert(key, value, hint))
        elif value is not None:
            require(
                isinstance(value, Mapping),
                f"{key} {where} is {value!r}, but {key} is a section; set its keys",
            )
            yield from flatten(cls, value, where, f"{key}.")


def read_options(
    cls: type, argv: Sequence[str], others: list[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the keys of `VALUE --key value --key=value --flag` with their converted values.

    Unknown keys raise `UserError`. If `others` is given, they and their values are appended to it.
    An option that takes several values may be repeated; its last pair holds all of them.
    """
    words = list(argv)
    known = leaves(cls)
    takes_keys = others is not None
    positional = [name for name, one in own_options(cls).items() if one.positional]
    several: list[str] = []  # words of a positional option that takes several
    repeated: dict[str, tuple[Any, ...]] = {}  # key of an option that takes several -> its values
    key = ""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            is_path = bool(positional) and not re.fullmatch("-[A-Za-z].*", word)
            advice = "options are written --key value"
            if key in repeated:
                advice = f"for several values, repeat --{key}"
            require(is_path, f"unexpected argument {word!r}; {advice}")
            key = positional[0]
            if get_origin(known[key]) is tuple:
                several.append(word)
            else:
                positional.pop(0)
                yield key, with_home(cls, key, convert(shown(cls, key), word, known[key]))
            continue
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        has_value = bool(words) and not words[0].startswith("--")
        hint = check_option(cls, key, takes_keys)
        if others is not None and key not in known:
            others.append(word)
            if has_value and not equals:
                others.append(words.pop(0))
            continue
        is_flag = bool in (hint, *get_args(hint)) and not has_value
        if not equals and is_flag:
            text = "true"
        elif not equals:
            is_option = bool(words) and bool(OPTION.fullmatch(words[0]))
            advice = ""
            if is_option and str in alternatives(hint):
                advice = f"; if the value is {words[0]}, write --{key}={words[0]}"
            require(
                bool(words) and not is_option,
                f"--{key} needs a value: {describe_type(hint)}{advice}",
            )
            text = words.pop(0)
        name = shown(cls, key)
        value = with_home(cls, key, convert(name, parse_text(name, text, hint), hint))
        if get_origin(hint) is tuple:
            value = repeated[key] = repeated.get(key, ()) + value
        yield key, value
    if several:
        key = positional.pop(0)
        yield key, with_home(cls, key, convert(shown(cls, key), several, known[key]))
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    missing = [key for key in positional if key in required]
    example = "quickstart" if "config" in missing else "runs/quickstart"
    advice = f"try accel-gpt {getattr(cls, 'name', '')} {example}"
    require(not missing, f"{' and '.join(missing).upper()} missing; {advice}")


def show_help_if_asked(cls: type, argv: Sequence[str], prog: str, essential: bool = False) -> None:
    """If `argv` asks for help, print the options of `cls` and exit.

    `essential`: print only the essential options.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        write_out(format_help(cls, prog, essential))
        sys.exit(0)


# --------------------------------------------------------------------------- values


def alternatives(hint: Any) -> list[Any]:
    """Return the types in a union, without None; a list of `hint` if it is no union."""
    if get_origin(hint) not in (types.UnionType, Union):
        return [hint]
    return [option for option in get_args(hint) if option is not type(None)]


def parse_text(key: str, text: str, hint: Any) -> Any:
    """Parse a word of the command line into the YAML value for the type `hint`.

    The word may hold a list or mapping in YAML. A list of numbers may also be written as `1,2`;
    commas belong to a text.
    """
    origins = {get_origin(option) for option in alternatives(hint)}
    if hint == tuple[str, ...] and not text.startswith("["):
        return [text]
    if text.startswith(("[", "{")) and origins & {tuple, Mapping}:
        try:
            return load_yaml(text)
        except ValueError:
            advice = "check its brackets and quotes"
            if hint == tuple[str, ...]:
                advice += "; a text that begins with [ needs quotes in a list: ['[a] b']"
            raise UserError(f"{key} is {text!r}, but must be valid YAML; {advice}") from None
    if origins == {tuple}:
        return [word.strip() for word in text.split(",")]
    return text


def with_home(cls: type, key: str, value: Any) -> Any:
    """Return the value of an option; in a path, a leading ~ becomes the home folder.

    No shell replaces it in a YAML file, in --key=~/x or in a Python call.
    """
    described = all_options(cls).get(key)
    if described is None or not described.path:
        return value
    if isinstance(value, Mapping):
        return {name: os.path.expanduser(path) for name, path in value.items()}
    if isinstance(value, tuple):  # a source of a mixture is a section, which has a path itself
        return tuple(os.path.expanduser(one) if isinstance(one, str) else one for one in value)
    return os.path.expanduser(value) if isinstance(value, str) else value


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value from YAML or the command line to the type `hint`; raises `UserError`."""
    for text in texts_in(value):
        check_string(key, text)
    if hint == Scalar:
        return scalar(key, value)
    if hint == Mapping[str, Scalar]:
        require(
            isinstance(value, Mapping),
            f"{key} is {value!r:.200}; expected {{name: number or text, ...}}",
        )
        return {str(name): scalar(f"{key}.{name}", one) for name, one in value.items()}
    or_null = type(None) in get_args(hint)
    is_null = isinstance(value, str) and value in NULLS
    if or_null and (value is None or is_null):
        return None
    # a prompt may be this word, but no path or name of a config
    may_be_word = str in (hint, *get_args(hint)) and (
        key.startswith("--") or get_origin(hint) is tuple
    )
    require(
        not is_null or value == "none" or may_be_word,
        f"{key} is {value}, but it cannot be null; expected {describe_type(hint)}",
    )
    if isinstance(value, list) and value and section_in(hint):
        return tuple(one_section(key, one, hint) for one in value)
    try:
        found = msgspec.convert(prepared(value, hint), hint, strict=False)
    except msgspec.ValidationError:
        raise mismatch(key, value, hint) from None
    for number in found if isinstance(found, tuple) else (found,):
        finite = not isinstance(number, float) or math.isfinite(number)
        small = not isinstance(number, int) or abs(number) <= LARGEST_NUMBER
        require(
            finite and small,
            f"{key} is {value!r:.60}; expected a finite number up to {LARGEST_NUMBER:,}",
        )
    return found


def scalar(key: str, value: Any) -> Any:
    """Return a value of `model.extra`; a text that spells a number or a truth value becomes one."""
    found = value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        found = value.lower() == "true"
    elif isinstance(value, str):
        for kind in (float, int):
            with contextlib.suppress(ValueError):
                found = kind(value)
    finite = not isinstance(found, float) or math.isfinite(found)
    require(
        isinstance(found, Scalar) and found not in NULLS and finite,
        f"{key} is {value!r:.200}; expected a number, a text, true or false",
    )
    return found


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def section_in(hint: Any) -> Any:
    """Return the dataclass of the items, if the type `hint` may be a tuple of them; else None."""
    for option in alternatives(hint):
        if get_origin(option) is tuple and is_section(get_args(option)[0]):
            return get_args(option)[0]
    return None


def one_section(key: str, value: Any, hint: Any) -> Any:
    """Convert an item of a list of mappings to its dataclass; raises `UserError`."""
    if not isinstance(value, Mapping):
        raise mismatch(key, value, hint)
    return from_mapping(section_in(hint), value, f"in {key}")


def prepared(value: Any, hint: Any) -> Any:
    """Return what msgspec shall convert: the spellings that it does not know are replaced."""
    options = alternatives(hint)
    choices = [choice for one in options if get_origin(one) is Literal for choice in get_args(one)]
    if isinstance(value, Mapping) and not all((value, *value.values())):
        return None  # an empty mapping or an empty text in it: no option takes it
    if value == [] and section_in(hint):
        return None
    if bool in options and isinstance(value, str):
        return BOOLEANS.get(value.lower(), value)
    # YAML 1.1 reads an unquoted no as false; fp32 is Accelerate's no
    if "no" in choices and (value is False or value == "fp32"):
        return "no"
    if type(value) in (int, float) and str in options:  # a folder named 2024
        return str(value)
    if isinstance(value, str) and re.fullmatch("[+-]?[0-9]+(_[0-9]+)+", value) and int in options:
        return value.replace("_", "")
    if isinstance(value, str) and get_origin(hint) is tuple:
        return [value]
    return value


def mismatch(key: str, value: Any, hint: Any) -> UserError:
    """Return the error for a value that does not have the type `hint`."""
    or_null = " or null" if type(None) in get_args(hint) else ""
    return UserError(f"{key} is {value!r:.200}; expected {describe_type(hint)}{or_null}")


def check_string(key: str, text: str) -> None:
    """Raise `UserError` if a text is not UTF-8, or is a URL with credentials.

    Configs and commands are recorded and sent to trackers, so they must not contain credentials.
    """
    check_utf8(key, text)
    found = ""
    signature = SIGNATURE.fullmatch(text)
    if PASSWORD.fullmatch(text):
        found = "a user and password"
    elif signature:
        found = f"the credential {signature[1]}"
    require(
        not found,
        f"{key} is a URL with {found}; remove the credentials from the URL and set them in the "
        "environment",
    )


def check_utf8(key: str, text: str) -> None:
    """Raise `UserError` if a text, such as a path, holds bytes that are not UTF-8.

    Configs, indexes and records are UTF-8, so they cannot store such a path.
    """
    # YAML may write an emoji as two surrogates. A single one is a byte that is not UTF-8.
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    try:
        joined.encode()
    except UnicodeEncodeError:
        shown = joined.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
        raise UserError(f"{key} is {shown}, but must be UTF-8; rename the file or folder") from None


def describe_type(hint: Any) -> str:
    """Describe a type in words, for errors."""
    options = alternatives(hint)
    if len(options) > 1:
        return " or ".join(map(describe_type, options))
    hint = options[0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if is_section(item):
            return f"a list of {describe_type(item)}"
        if item is str:
            return "text, or a list of texts"
        return "a list, or numbers separated by commas"
    if is_section(hint):
        return f"{{{', '.join(leaves(hint))}}}"
    if get_origin(hint) is Mapping:
        return "{name: text, ...}" if hint == Mapping[str, str] else "{name: number or text, ...}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[hint]


# --------------------------------------------------------------------------- objects


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a nested mapping; raises `UserError` for invalid keys and values."""
    return build(cls, dict(flatten(cls, values, where)))
