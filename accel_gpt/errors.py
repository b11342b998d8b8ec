"""What can go wrong, with the exit code that scripts see, and the checks shared by the config."""

import math
import os
import sys
from collections.abc import Callable, Sequence


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
    """Require each named field of `config` to be at least zero."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"{section}.{name} is {value}; it must be 0 or more")


def below_one(section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be at least zero and below one."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"{section}.{name} is {value}; it must lie in [0, 1)")


def divides(whole_name: str, whole: int, part_name: str, part: int) -> None:
    """Require `part` to divide `whole`; the error names the nearest wholes that would do."""
    below = whole // part * part
    nearest = f"{below} or {below + part}" if below else f"{part}"
    require(
        whole % part == 0,
        f"{whole_name} is {whole}, which {part_name} = {part} does not divide; "
        f"the nearest that it divides: {nearest}",
    )


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`; a user's mistake becomes one sentence on stderr."""
    rank = os.environ.get("RANK", "0")
    try:
        return main(argv)
    except UserError as error:
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {error}\n")
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
