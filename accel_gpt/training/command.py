"""The command of a run as its record may keep it: without passwords and access tokens."""

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from accel_gpt.redact import without_secrets


def command_line(words: Sequence[str]) -> str:
    """`words` as they would be typed: the program by its name alone, secrets starred."""
    program = PurePath(words[0]).name if words else ""
    return " ".join(shlex.quote(without_secrets(word)) for word in (program, *words[1:]))
