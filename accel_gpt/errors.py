"""What can go wrong, with the exit code that scripts see, and the checks shared by the config."""

import math
import re

LONGEST = 1000 * 86_400.0  # seconds that a limit of time may have


class AccelGPTError(Exception):
    """An expected failure: it ends the command with one sentence and an exit code, no traceback."""

    exit_code = 2


class UserError(AccelGPTError, ValueError):
    """A user's mistake; the message shows what is wrong, the value, and what would be right."""


class DataError(UserError):
    """Prepared data that cannot be trained on (truncated, foreign tokenizer, unknown token)."""

    exit_code = 3


class CheckpointError(AccelGPTError, ValueError):
    """A checkpoint that is damaged or belongs to another model."""

    exit_code = 4


class NewerFormatError(AccelGPTError):
    """A checkpoint that a later version wrote: not damaged, and not to be set aside."""

    exit_code = 4


class DivergedError(AccelGPTError):
    """The loss is no longer a finite number."""

    exit_code = 5


class BusyError(AccelGPTError):
    """Another process is already working in the output folder."""

    exit_code = 6


class PeerError(AccelGPTError):
    """Another process of this run failed, or could not be reached."""

    exit_code = 70


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def require(ok: bool, message: str) -> None:
    """Raise `UserError(message)` unless `ok`."""
    if not ok:
        raise UserError(message)


def positive(section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be unset or above zero."""
    for name in names:
        value = getattr(config, name)
        ok = value is None or 0 < value < math.inf
        require(ok, f"{section}.{name} is {value}; it must be above 0 and finite")


def not_negative(section: str, config: object, *names: str) -> None:
    """Require each named field of `config`, where it is set, to be at least zero."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= 0, f"{section}.{name} is {value}; it must be 0 or more")


def at_most(section: str, config: object, limit: int, *names: str) -> None:
    """Require each named field of `config`, where it is a number, to be at most `limit`."""
    for name in names:
        value = getattr(config, name)
        ok = not isinstance(value, int) or value <= limit
        require(ok, f"{section}.{name} is {value}; it must be at most {limit:,}")


def below_one(section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be at least zero and below one."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"{section}.{name} is {value}; it must lie in [0, 1)")


def duration(name: str, text: str | None) -> float | None:
    """Seconds of a time such as `3h50m`, `90s` or plain `90`; None for none."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    parts = [float(part or 0) for part in match.groups()] if match else []
    seconds = sum(n * unit for n, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    require(
        0 < seconds <= LONGEST,
        f"{name} is {text!r:.60}; write a time above 0 as 3h50m, 30m or 90s, at most 1000d",
    )
    return seconds


def divides(whole_name: str, whole: int, part_name: str, part: int) -> None:
    """Require `part` to divide `whole`; the error names the nearest wholes that would do."""
    below = whole // part * part
    nearest = f"{below} or {below + part}" if below else f"{part}"
    require(
        whole % part == 0,
        f"{whole_name} is {whole}, which {part_name} = {part} does not divide; "
        f"the nearest that it divides: {nearest}",
    )
