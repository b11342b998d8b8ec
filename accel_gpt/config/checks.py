"""Checks of options: bounds, written in their annotations, and others that several options share.

class Options(Section, prefix="train."):
    n_layer: Annotated[Positive[int], at_most(2**14)] = 12
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar, get_args, get_type_hints

from accel_gpt.errors import require

T = TypeVar("T")
Groups = tuple[tuple[str, ...], ...]
NO_GROUPS: Groups = ()
LONGEST = 1000 * 86_400.0  # seconds that a limit of time may have


class Bound(NamedTuple):
    """What must hold of the number in an option; `words` go on after "it must"."""

    words: str
    holds: Callable[[float], bool]


def at_most(limit: int) -> Bound:
    """The bound of an option that is `limit` or less."""
    return Bound(f"be at most {limit:,}", lambda value: value <= limit)


# null, and words such as auto, are within any bound
Positive = Annotated[T, Bound("be above 0 and finite", lambda value: 0 < value < math.inf)]
NotNegative = Annotated[T, Bound("be 0 or more", lambda value: value >= 0)]
BelowOne = Annotated[T, Bound("lie in [0, 1)", lambda value: 0 <= value < 1)]
Fraction = Annotated[T, Bound("lie between 0 and 1", lambda value: 0 < value < 1)]
Share = Annotated[T, Bound("lie in (0, 1]", lambda value: 0 < value <= 1)]

POSITIONAL = object()
Positional = Annotated[T, POSITIONAL]  # an option that is a word without a name, before the others


class Section:
    """Base of a class of options: their values are checked against their bounds.

    Raises `UserError`, which names the option with `prefix` before it. Of each group of options in
    `exclusive` at most one may be set.
    """

    prefix = ""
    exclusive = NO_GROUPS

    def __init_subclass__(cls, prefix: str = "", exclusive: Groups = NO_GROUPS) -> None:
        cls.prefix, cls.exclusive = prefix or cls.prefix, exclusive or cls.exclusive

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for name, hint in hints.items():
            value = getattr(self, name)
            for bound in get_args(hint):
                if isinstance(bound, Bound) and isinstance(value, int | float):
                    self.require(bound.holds(value), name, f"it must {bound.words}")
        for group in self.exclusive:
            words = {name.upper() if is_positional(hints[name]) else f"{self.prefix}{name}": name
                     for name in group}  # fmt: skip
            found = [f"{word} is {value}" for word, name in words.items()
                     if (value := getattr(self, name))]  # fmt: skip
            require(len(found) < 2, f"{' and '.join(found)}; set one of them")

    def require(self, ok: bool, name: str, problem: str) -> None:
        """Raise `UserError`, with the option `name`, its value and the `problem`, unless `ok`."""
        require(ok, f"{self.prefix}{name} is {getattr(self, name)}; {problem}")


def is_positional(hint: object) -> bool:
    """Whether an annotation, extras included, is `Positional`."""
    return any(extra is POSITIONAL for extra in get_args(hint))


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
