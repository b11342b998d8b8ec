"""What can go wrong, with the exit code that scripts see, and the checks shared by the config."""

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

# all but line ends and tabs; bytes that are no UTF-8; what turns the direction of text around
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff\u202a-\u202e\u2066-\u2069]"
)
SECRET = re.compile(
    # tokens by their makers' prefix
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:ghp|gho|github_pat|glpat|sk|xox[a-z])[_-][\w-]{16,}"
    r"|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w.-]+"  # AWS key ids, JSON web tokens
)
PERSON = re.compile(r"([A-Za-z][\w+.-]*://)[^\s/?#\"']*@")  # name and password in a URL
QUERY = re.compile(r"([A-Za-z][\w+.-]*://[^\s?\"']*\?)[^\s\"']+")  # signed URLs carry keys there
LONGEST_SENTENCE = 1500  # characters of an error that are printed
LONGEST = 1000 * 86_400.0  # seconds that a limit of time may have


class UserError(ValueError):
    """A user's mistake, told in one sentence: what is wrong, the value, what would be right."""

    exit_code = 2


class DataError(UserError):
    """Prepared data that cannot be trained on (truncated, foreign tokenizer, unknown token)."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is damaged or belongs to another model."""

    exit_code = 4


class NewerFormatError(UserError):
    """A checkpoint that a later version wrote: not damaged, and not to be set aside."""

    exit_code = 4


class DivergedError(UserError):
    """The loss is no longer a finite number."""

    exit_code = 5


class PeerError(UserError):
    """Another process of this run failed, or could not be reached."""

    exit_code = 70


class BusyError(UserError):
    """Another process is already working in the output folder."""

    exit_code = 6


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


def printable(text: str) -> str:
    """`text` without what steers a terminal, as a name in a file of others or a sample could."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def open_closed_streams() -> None:
    """Let streams that the caller closed, as `2>&-`, lead nowhere: the next file that is opened
    would get the number of one, and with it what libraries write there.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def without_secrets(text: str) -> str:
    """`text` with access tokens, and names, passwords and queries in its URLs, starred."""
    return QUERY.sub(r"\1***", PERSON.sub(r"\1***@", SECRET.sub("***", text)))


def visible(text: str, out: TextIO) -> str:
    """`text` as it may be written to `out`: a terminal would obey control characters."""
    shown = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if out.isatty() else text


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`; a user's mistake, or a full disk, becomes one
    sentence on stderr.
    """
    rank = os.environ.get("RANK", "0")
    open_closed_streams()
    try:
        return main(argv)
    except UserError as error:
        told = without_secrets(printable(str(error)))
        if len(told) > LONGEST_SENTENCE:  # a value out of a file
            told = f"{told[: LONGEST_SENTENCE // 2]} [...] {told[-LONGEST_SENTENCE // 2 :]}"
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {told}\n")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:  # torch raises the second where malloc fails
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        told = (str(error).splitlines() or ["MemoryError"])[0]
        sys.stderr.write(
            f"error: there is not enough memory ({printable(told)[-120:]}); lower the model's "
            "size, train.micro_batch_size or sample.num: accel-gpt plan shows what they take\n"
        )
        return UserError.exit_code
    except BrokenPipeError:  # whoever read our output has enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(f"error: {error}; make room and launch again\n")
        return UserError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
