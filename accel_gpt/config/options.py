"""Describe an option once: default, text, bounds, and how a resume, a rank or a ladder treats it.

    class TrainConfig(Section, prefix="train."):
        max_steps: int | None = option(None, "Number of optimizer steps in the run.", above=0)

Help, docs/reference/keys.md, `--dump_config`, the checks of bounds and every comparison of two
configs read these descriptions; no other list says what options mean.
"""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from accel_gpt.errors import require

Resume = Literal["free", "start", "ask", "refuse"]
Inherited = Literal["always", "default", "never"]
Published = bool | Literal["name"]
Groups = tuple[tuple[str, ...], ...]
REQUIRED: Any = dataclasses.MISSING  # the default of an option that must be given
LONGEST_SECONDS = 1000 * 86_400.0  # of a time limit: 1,000 days


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name, type and default."""

    description: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    positional: bool = False
    """A command takes it as a word without a name."""
    essential: bool = False
    """`--help` shows it; `--help-all` shows every option."""
    resume: Resume | None = None
    """What a resume does with another value than the checkpoint's. free: take it, as it does not
    change what is computed. start: take it, as it acts before the first step only. ask: require
    checkpoint.allow_change. refuse: it is another run. None: as the section says."""
    exact: bool = False
    """It decides the bits that train.reproducible promises, so a resume changes it only with
    checkpoint.allow_change then."""
    null_is_another_run: bool = False
    """Whether it is null decides the groups of the optimizer."""
    validation: bool = False
    """It decides what the val loss measures: after a change the best checkpoint starts anew."""
    size: bool = False
    """It is a size of the model, which differs from rung to rung of a ladder."""
    per_machine: bool = False
    """Ranks on different machines may have different values."""
    inherited: Inherited = "always"
    """What an option of the model takes from the weights of model.init_from. always: another value
    is an error. default: the config may set another value. never: weights do not tell it."""
    matched: bool = True
    """A reference curve is shown beside runs that have the same value."""
    optimizer: str | None = None
    """It takes effect with this optim.name only, and may be set with no other."""
    published: Published | None = None
    """What of the value a model card shows. True: a number, a switch or one of the choices that its
    type lists. name: also the last part of a path, URL or id. False: nothing. None: as the section
    says."""

    def problem(self, value: object) -> str | None:
        """Return the bound that a number breaks, as `it must be above 0`, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        bounds = [
            ("above", self.above, self.above is None or value > self.above),
            ("at least", self.at_least, self.at_least is None or value >= self.at_least),
            ("below", self.below, self.below is None or value < self.below),
            ("at most", self.at_most, self.at_most is None or value <= self.at_most),
        ]
        words = [f"{word} {limit:,}" for word, limit, _ in bounds if limit is not None]
        if not words or (math.isfinite(value) and all(holds for *_, holds in bounds)):
            return None
        return f"it must be {' and '.join(words)}"


def option(
    default: Any,
    description: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    positional: bool = False,
    essential: bool = False,
    resume: Resume | None = None,
    exact: bool = False,
    null_is_another_run: bool = False,
    validation: bool = False,
    size: bool = False,
    per_machine: bool = False,
    inherited: Inherited = "always",
    matched: bool = True,
    optimizer: str | None = None,
    published: Published | None = None,
) -> Any:
    """Return a dataclass field with its description; see `Option`."""
    described = Option(
        description=description,
        above=above,
        at_least=at_least,
        below=below,
        at_most=at_most,
        positional=positional,
        essential=essential,
        resume=resume,
        exact=exact,
        null_is_another_run=null_is_another_run,
        validation=validation,
        size=size,
        per_machine=per_machine,
        inherited=inherited,
        matched=matched,
        optimizer=optimizer,
        published=published,
    )
    return dataclasses.field(default=default, metadata={"option": described})


def same_option(section: Any, name: str) -> Any:
    """Return a dataclass field with the default and description of an option of `section`."""
    (field,) = [field for field in dataclasses.fields(section) if field.name == name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def internal(default: Any) -> Any:
    """Return a dataclass field that is no option: a command fills it."""
    return dataclasses.field(default=default, kw_only=True, metadata={"internal": True})


class Section:
    """Base of a class of options, which checks their bounds.

    `prefix` stands before the names in messages. At most one of each group in `exclusive` may be
    set. `resume`, `per_machine` and `published` of the class statement hold for options that do not
    say it themselves. Raises `UserError` that names the option and its value.
    """

    prefix: ClassVar[str] = ""
    exclusive: ClassVar[Groups] = ()
    default_resume: ClassVar[Resume] = "ask"
    default_per_machine: ClassVar[bool] = False
    default_published: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        prefix: str | None = None,
        exclusive: Groups | None = None,
        resume: Resume | None = None,
        per_machine: bool | None = None,
        published: bool | None = None,
    ) -> None:
        cls.prefix = cls.prefix if prefix is None else prefix
        cls.exclusive = cls.exclusive if exclusive is None else exclusive
        cls.default_resume = cls.default_resume if resume is None else resume
        cls.default_per_machine = cls.default_per_machine if per_machine is None else per_machine
        cls.default_published = cls.default_published if published is None else published

    def __post_init__(self) -> None:
        kind: Any = type(self)
        described = own_options(kind)
        for name, one in described.items():
            problem = one.problem(getattr(self, name))
            self.require(problem is None, name, problem or "")
        for group in self.exclusive:
            shown = {
                name: name.upper() if described[name].positional else f"{self.prefix}{name}"
                for name in group
            }
            found = [
                f"{word} is {getattr(self, name)}"
                for name, word in shown.items()
                if getattr(self, name)
            ]
            require(len(found) < 2, f"{' and '.join(found)}; set one of them")
        self._check()

    def _check(self) -> None:
        """Raise `UserError` if options do not fit together; a class with more checks overrides it.

        Called once the bounds of all options hold.
        """

    def require(self, ok: bool, name: str, problem: str) -> None:
        """Raise `UserError`, with the option `name`, its value and the `problem`, unless `ok`."""
        require(ok, f"{self.prefix}{name} is {getattr(self, name)}; {problem}")


@functools.cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """Map the name of each field of a dataclass, without the `internal` ones, to its type."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if "internal" not in field.metadata:
            found[field.name] = hints[field.name]
    return types.MappingProxyType(found)


@functools.cache
def own_options(cls: Any) -> Mapping[str, Option]:
    """Map the name of each option of a class, without those of its sections, to what is known."""
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if "option" in field.metadata:
            found[field.name] = field.metadata["option"]
    return types.MappingProxyType(found)


@functools.cache
def all_options(cls: type) -> Mapping[str, Option]:
    """Map the dotted key of each option, those of sections included, to what is known of it.

    `resume`, `per_machine` and `published` are filled in from the section.
    """
    found: dict[str, Option] = {}
    kinds = field_types(cls)
    for field in dataclasses.fields(cls):
        if "option" in field.metadata:
            one: Option = field.metadata["option"]
            published = one.published
            if published is None:
                published = getattr(cls, "default_published", False)
            found[field.name] = dataclasses.replace(
                one,
                resume=one.resume or getattr(cls, "default_resume", "ask"),
                per_machine=one.per_machine or getattr(cls, "default_per_machine", False),
                published=published,
            )
        elif dataclasses.is_dataclass(kinds.get(field.name)):
            inner = all_options(kinds[field.name])
            found |= {f"{field.name}.{name}": one for name, one in inner.items()}
    return types.MappingProxyType(found)


def duration(name: str, text: str | None) -> float | None:
    """Return the seconds of a time such as `3h50m`, `90s` or plain `90`; None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    seconds = 0.0
    if match:
        days, hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = days * 86_400 + hours * 3_600 + minutes * 60 + rest
    require(
        0 < seconds <= LONGEST_SECONDS,
        f"{name} is {text!r:.60}; write a time above 0 as 3h50m, 30m or 90s, at most 1000d",
    )
    return seconds
