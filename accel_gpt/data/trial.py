"""A tokenizer.json of others, tried in a process of its own before it is used in this one.

    python -P accel_gpt/data/trial.py < tokenizer.json

Its regular expressions and replacements run in a library that nothing here can interrupt: they
could take for ever or all memory, or end the process. Also finds what drops text.
"""

import contextlib
import functools
import json
import os
import re
import resource
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 20  # of a processor; a vocabulary of 262,144 tokens takes 2
MEMORY = 8 << 30  # bytes of addresses
RUN = 2000  # characters of a probe of one character, at which a costly expression shows
GROWTH = 32  # times the characters of a text; Unicode's NFKC makes up to 18 of one
OTHERS = "\u00e9\u4e2d\u0430\U0001f600"  # Latin, Chinese, Cyrillic, emoji
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# what in a regular expression spells no word: classes, escapes, repeats
CLASSES = re.compile(r"\\[pP]\{.*?\}|\\[xu]\{?[0-9A-Fa-f]+|\\.|\{[0-9,]+\}")


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
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace").strip() or None
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
        tokenizer, content = Tokenizer.from_str(text), json.loads(text)
        parts = {name: objects(content.get(name)) for name in PARTS}
        found = {
            kind: [part[kind] for name in PARTS for part in parts[name] if kind in part]
            for kind in ("String", "Regex")
        }
        wrong = multiplied(tokenizer.normalizer, found["String"]) or dropped(tokenizer, parts)
        if wrong is None:
            encode_runs(tokenizer, "".join(found["Regex"] + found["String"])[:200])
        return wrong
    except BaseException as error:  # a panic of Rust is no Exception
        return " ".join(str(error).split())[:200] or type(error).__name__


def objects(value: Any) -> list[dict[str, Any]]:
    """Every object in a value of JSON."""
    found = []

    def keep(one: dict[str, Any]) -> dict[str, Any]:
        found.append(one)
        return one

    json.loads(json.dumps(value), object_hook=keep)
    return found


def multiplied(normalizer: Any, patterns: list[str]) -> str | None:
    """Whether a normalizer, step by step, makes far too many characters of a few."""
    from tokenizers.normalizers import Sequence

    steps = [normalizer] if normalizer else []
    if isinstance(normalizer, Sequence):
        steps = [normalizer[i] for i in range(len(normalizer))]
    for probe in filter(None, [*string.printable, *OTHERS, *patterns]):
        text = probe
        for step in steps:
            text = step.normalize_str(text)
            if len(text) > GROWTH * len(probe):
                return f"its normalizer makes {len(text) // len(probe)} characters of one"
    return None


def dropped(tokenizer: Any, parts: dict[str, list[dict[str, Any]]]) -> str | None:
    """Whether normalizer or pre-tokenizer leave nothing of a visible character, or of words."""
    first, second = tokenizer.normalizer, tokenizer.pre_tokenizer
    steps = (first and first.normalize_str, second and second.pre_tokenize_str)
    for name, step in zip(PARTS, steps, strict=False):
        visible = [c for c in string.printable + OTHERS if not c.isspace()]
        lost = [c for c in visible if step and not step(c)]
        for part in parts[name]:
            removes = part.get("content") == "" or part.get("behavior") == "Removed"
            if removes and not part.get("invert") and part.get("pattern"):
                ((kind, pattern),) = part["pattern"].items()
                regex = kind == "Regex"
                words = re.search(r"\w", CLASSES.sub("", pattern)) if regex else pattern.strip()
                lost += [pattern] if words else []
        if lost:
            text = f"its {name} drops {lost[0][:20]!r}"
            return f"{text}, so that tokens would not hold the whole text"
    return None


def encode_runs(tokenizer: Any, characters: str) -> None:
    """Encode long runs of the characters of its patterns, at which a costly one shows."""
    runs = [c * RUN for c in dict.fromkeys(characters + "a0 \n_.\u00e9")]
    for probe in [(characters * RUN)[:RUN], *runs]:
        for end in ("", "\x00", "!b\n"):
            with contextlib.suppress(Exception):  # of a character that it does not know
                ids = tokenizer.encode(probe + end, add_special_tokens=False).ids
                tokenizer.decode(ids[:RUN])


if __name__ == "__main__":
    limit()
    sys.stdout.buffer.write((problem(sys.stdin.buffer.read().decode()) or "").encode())
