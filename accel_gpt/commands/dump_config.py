"""`accel-gpt train CONFIG --dump_config`: write the config, every key with its meaning."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from accel_gpt.commands.options import DumpConfigCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import field_types, own_options
from accel_gpt.config.values import is_section, to_plain
from accel_gpt.console import write_out

WIDTH = 96  # characters of a line of comments


def run(options: DumpConfigCommand) -> int:
    """Write the config as YAML to standard output."""
    write_out(commented_yaml(options.loaded))
    return 0


def commented_yaml(config: Config) -> str:
    """Format `config` as YAML. A comment describes each key, with its default if it is changed."""
    lines = section_lines(config, Config(), to_plain(config))
    return "".join(f"{line}\n" for line in lines)


def section_lines(section: Any, default: Any, plain: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one section; `plain` holds the values as YAML types."""
    kind: Any = type(section)
    for name, hint in field_types(kind).items():
        value = getattr(section, name)
        usual = getattr(default, name)
        if is_section(hint):
            yield ""
            yield from comment(title(hint))
            yield f"{name}:"
            for line in section_lines(value, usual, plain[name]):
                yield f"  {line}" if line else ""
            continue
        if own_options(kind)[name].command_line_only:
            continue
        text = own_options(kind)[name].description
        if value != usual:
            text += f" Default: {dump(usual if usual != '' else None)}."
        yield from comment(text)
        yield from f"{name}: {dump(plain[name])}".splitlines()


def dump(value: Any) -> str:
    """Format `value` as YAML, in one line unless it is a text with line ends."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def comment(text: str) -> list[str]:
    """Format `text` as comment lines."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def title(kind: type) -> str:
    """Return the first line of the docstring of a class."""
    return (kind.__doc__ or "").partition("\n")[0]
