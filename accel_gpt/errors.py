"""The expected errors and their exit codes."""

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType


class AccelGPTError(Exception):
    """An expected failure: it ends the command with one sentence and an exit code, no traceback."""

    exit_code = 2


class UserError(AccelGPTError, ValueError):
    """A user's mistake; the message names the problem, the value and the fix."""


class DataError(UserError):
    """Prepared data that cannot be trained on (truncated, foreign tokenizer, unknown token)."""

    exit_code = 3


class CheckpointError(AccelGPTError, ValueError):
    """A checkpoint that is damaged or belongs to another model."""

    exit_code = 4


class NewerFormatError(AccelGPTError):
    """A checkpoint that a later version wrote. It is intact, so it is not set aside."""

    exit_code = 4


class MachineError(AccelGPTError):
    """The machine lacks something: room, memory, open files, a home, a right to read a file.

    The message has the reason of the operating system. No file is damaged.
    """

    exit_code = 4


class DivergedError(AccelGPTError):
    """The loss is no longer a finite number."""

    exit_code = 5


class BusyError(AccelGPTError):
    """Another process uses the output folder, or the folder is gone."""

    exit_code = 6


class PeerError(AccelGPTError):
    """Another process of this run failed, or could not be reached."""

    exit_code = 70


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; its class if empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def one_line(error: BaseException | str) -> str:
    """Return an error in one line, without the queries of URLs, which may hold signatures."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def require(ok: bool, message: str) -> None:
    """Raise `UserError(message)` unless `ok`."""
    if not ok:
        raise UserError(message)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return those of `names` that are most like `name`, at most three.

    `cutoff`: least similarity, from 0 to 1.
    """
    known = list(names)
    return [name] if name in known else difflib.get_close_matches(name, known, cutoff=cutoff)


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str,
    shown: Mapping[str, str] = MappingProxyType({}),
    cutoff: float = 0.6,
) -> str:
    """Return `did you mean A or B?` with the names that `nearest` returns, or else `otherwise`.

    `shown`: what to print in place of some of the names.
    """
    found = dict.fromkeys(shown.get(one, one) for one in nearest(name, names, cutoff))
    return f"did you mean {' or '.join(found)}?" if found else otherwise


def install_extra(extra: str) -> str:
    """Return advice, for an error, on how to install an optional dependency of this package."""
    return f"run pip install -e '.[{extra}]' in the clone of accel_gpt"
