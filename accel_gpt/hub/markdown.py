"""Text of any origin as Markdown that shows it and nothing else."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from accel_gpt.redact import redact_tokens

# what turns text around, hides in it or ends a line for some readers but not for Markdown's
UNSEEN = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f]")


def one_line(text: str) -> str:
    """`text` without line breaks, control characters and tokens."""
    text = redact_tokens(text)  # before `mark` escapes their underscores
    return " ".join(UNSEEN.sub(" ", CONTROLS.sub(" ", text.replace("\x7f", " "))).split())


def mark(text: str) -> str:
    """One line of plain text, with what means something to Markdown or HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", one_line(text))


def shown(text: str, longest: int) -> str:
    """Many lines of text with control characters made visible, at most `longest` characters."""
    text = text.replace("\r\n", "\n")
    text = CONTROLS.sub(lambda found: chr(0x2400 + ord(found[0])), text).replace("\x7f", "\u2421")
    text = UNSEEN.sub("\ufffd", text)
    return text if len(text) <= longest else f"{text[:longest]} [...]"


def fenced(text: str, language: str) -> str:
    """A block of code whose fence is longer than any in `text`."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def table(left: str, right: str, rows: Iterable[tuple[str, str | None]]) -> str:
    """Two columns; a row without a value is left out."""
    lines = [f"| {name} | {value} |" for name, value in rows if value is not None]
    return "\n".join([f"| {left} | {right} |", "|---|---|", *lines])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested mappings."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = out
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return out


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as a person would say it."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    if seconds < 6000:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:,.1f} hours"


def slug(name: str) -> str:
    """A name in the form of a data set's id: word characters, at most one slash."""
    owner, _, rest = re.sub(r"[^\w./-]+", "-", name).strip("-").partition("/")
    return f"{owner}/{rest.replace('/', '-')}" if rest else owner


def given(value: object, unit: str = "") -> str | None:
    """A value with its unit, if there is one."""
    return None if value is None else f"{value}{unit}"
