"""The command of a run as its record may keep it: without passwords and access tokens."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

SECRET = re.compile(
    r"\b(?:hf|ghp|gho|github_pat|glpat|sk|xox[a-z])[_-][\w-]{8,}"  # tokens by their makers' prefix
    r"|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w.-]+"  # AWS key ids, JSON web tokens
)
PERSON = re.compile(r"([A-Za-z][\w+.-]*://)[^\s/?#\"']*@")  # name and password in a URL
QUERY = re.compile(r"([A-Za-z][\w+.-]*://[^\s?\"']*\?)[^\s\"']+")  # signed URLs carry keys there


def without_secrets(text: str) -> str:
    """`text` with access tokens, and names, passwords and queries in its URLs, starred."""
    return QUERY.sub(r"\1***", PERSON.sub(r"\1***@", SECRET.sub("***", text)))


def command_line(words: Sequence[str]) -> str:
    """`words` as they would be typed: the program by its name alone, secrets starred."""
    program = PurePath(words[0]).name if words else ""
    return " ".join(shlex.quote(without_secrets(word)) for word in (program, *words[1:]))
