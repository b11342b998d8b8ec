"""A tokenizer.json of others, tried in a process of its own before it is used in this one.

    python -P accel_gpt/data/trial.py < tokenizer.json

Its regular expressions and replacements run in a library that nothing here can interrupt: they
could take for ever or all memory, or end the process. Also finds what drops text.
"""

import collections
import contextlib
import functools
import json
import os
import re
import resource
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 20  # of a processor; a vocabulary of 262,144 tokens takes 2
MEMORY = 8 << 30  # bytes of addresses
RUN = 2000  # characters of a probe of one character, at which a costly expression shows
GROWTH = 32  # times the characters of a text; Unicode's NFKC makes up to 18 of one
LOST = "so that tokens would not hold the whole text"
OTHERS = "\u00e9\u4e2d\u0430\U0001f600"  # Latin, Chinese, Cyrillic, emoji


@functools.lru_cache(maxsize=4)
def find_problem(text: str) -> str | None:
    """Why the tokenizer.json with this `text` cannot be used, None where it can."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).resolve())],
            input=text.encode(),
            capture_output=True,
            env={**os.environ, **quiet},
            check=False,
            timeout=6 * SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"encoding a short text with it took more than {6 * SECONDS} s"
    answer = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 0:
        return answer or None
    return (
        "encoding a short text with it took too long or too much memory, or ended the process "
        f"(code {done.returncode})"
    )


def limit() -> None:
    """End this process where it takes more than a tokenizer may."""
    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS maps more than it may then have
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (soft, hard))


def problem(text: str) -> str | None:
    """What is wrong with a tokenizer.json; an error of the library as its text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
        content = json.loads(text)
        parts = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}
        found = multiplied(parts) or dropped(tokenizer, parts)
        if found is None:
            try_runs(tokenizer, parts)
        return found
    except BaseException as error:  # a panic of Rust is no Exception
        return " ".join(str(error).split())[:200] or type(error).__name__


def multiplied(parts: dict[str, Any]) -> str | None:
    """Whether replacements, each of which may find what the ones before it left, make too many
    characters of one.
    """
    for key in ("normalizer", "decoder"):
        growth, left = 1.0, ""
        for step in objects(parts[key]):
            if step.get("type") == "Replace":
                pattern = step["pattern"].get("String")
                more = max(1.0, len(step["content"]) / max(1, len(pattern or "x")))
                growth = growth * more if pattern is None or pattern in left else max(growth, more)
                left += step["content"]
        if growth > GROWTH:
            return f"its {key} makes up to {growth:.0f} characters of one"
    return None


def dropped(tokenizer: Any, parts: dict[str, Any]) -> str | None:
    """Names what prepares a text and leaves nothing of a visible one.

    Tried with single characters; of what drops longer patterns, those patterns are looked at.
    """
    steps = (
        ("normalizer", tokenizer.normalizer and tokenizer.normalizer.normalize_str),
        ("pre_tokenizer", tokenizer.pre_tokenizer and tokenizer.pre_tokenizer.pre_tokenize_str),
    )
    visible = [c for c in string.printable + OTHERS if not c.isspace()]
    visible += [one for one in patterns(parts, "String") if one.strip()]
    for name, step in steps:
        for one in visible if step else ():
            if not step(one):
                return f"its {name} drops {one[:20]!r}, {LOST}"
    for name, _ in steps:
        for part in objects(parts[name]):
            removes = part.get("content") == "" or part.get("behavior") == "Removed"
            if removes and not part.get("invert") and (found := words_of(part.get("pattern"))):
                return f"its {name} drops {found[:20]!r}, {LOST}"
    return None


def try_runs(tokenizer: Any, parts: dict[str, Any]) -> None:
    """Encode long runs of the characters of its expressions, which a costly one shows at."""
    characters = "".join((*patterns(parts, "Regex"), *patterns(parts, "String")))[:200]
    runs = [c * RUN for c in dict.fromkeys(characters + "a0 \n_.\u00e9")]
    for probe in [(characters * RUN)[:RUN], *runs]:
        for end in ("", "\x00", "!b\n"):
            with contextlib.suppress(Exception):  # of a character that it does not know
                ids = tokenizer.encode(probe + end, add_special_tokens=False).ids
                tokenizer.decode(ids[:RUN])


def words_of(pattern: Any) -> str:
    """A pattern with letters or digits beside its classes and escapes, as `cat`; else nothing."""
    if not isinstance(pattern, dict):
        return ""
    string, regex = str(pattern.get("String", "")), str(pattern.get("Regex", ""))
    bare = re.sub(r"\\[pP]\{.*?\}|\\[xu]\{?[0-9A-Fa-f]+|\\.|\{[0-9,]+\}", "", regex)
    return string + regex if re.search(r"\w", string + bare) else ""


def patterns(parts: dict[str, Any], kind: str) -> Iterator[str]:
    """The patterns of a kind, Regex or String, anywhere but in the vocabulary."""
    for found in objects(list(parts.values())):
        if isinstance(found.get(kind), str):
            yield found[kind]


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a value of JSON, those of a list in its order."""
    waiting = collections.deque([value])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


if __name__ == "__main__":
    limit()
    sys.stdout.buffer.write((problem(sys.stdin.buffer.read().decode()) or "").encode())
