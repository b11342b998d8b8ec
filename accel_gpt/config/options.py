"""Declare an option once: default, help text, bounds, and its rules for resumes and ranks.

    class TrainConfig(Section, prefix="train."):
        max_steps: int | None = option(None, "Number of optimizer steps in the run.", above=0)

Help, docs/reference/keys.md, the checks of bounds and every comparison of two
configs read these declarations. There is no second list of options.
"""

import dataclasses
import functools
import math
import re
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from accel_gpt.errors import require

Resume = Literal["free", "start", "ask", "refuse"]
Inherited = Literal["always", "default", "never"]
REQUIRED: Any = dataclasses.MISSING  # the default of a required option
LONGEST_SECONDS = 1000 * 86_400.0  # largest time limit: 1,000 days


@dataclass(frozen=True)
class Option:
    """The description and rules of an option. Its field holds the name, type and default."""

    description: str
    _: dataclasses.KW_ONLY
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    positional: bool = False
    """The command line gives the value without `--name`."""
    essential: bool = False
    """`--help` shows it; `--help-all` shows every option."""
    resume: Resume | None = None
    """What a resume does if the value differs from the checkpoint's. free: accept the new value,
    since it does not change the result. start: accept it, since it acts only before the first step.
    ask: accept it only if checkpoint.allow_change lists the key. refuse: raise an error. None: the
    default of the section."""
    exact: bool = False
    """The value changes the bits of the result. With train.reproducible, a resume therefore accepts
    a new value only if checkpoint.allow_change lists the key."""
    null_is_another_run: bool = False
    """The value gives the optimizer other parameter groups unless it is null. A resume cannot
    change the groups."""
    validation: bool = False
    """The value changes what the val loss measures. After a change, a resume forgets the best val
    loss."""
    replaces: tuple[str, ...] = ()
    """Dotted keys and sections. If a layer sets this option and not to null, it removes them from
    the layers before it: the command line from the file."""
    per_machine: bool = False
    """Ranks on different machines may have different values."""
    inherited: Inherited = "always"
    """Whether the weights of model.init_from set an option of the model. always: another value in
    the config is an error. default: the config may override it. never: the weights do not set
    it."""
    used_with: tuple[str, tuple[object, ...]] | None = None
    """Another option of the section, and its values that use this option. With any other value,
    setting this option is an error."""
    path: bool = False
    """The value is a path, or a URL or an id in place of one. A leading ~ is the home folder."""
    command_line_only: bool = False
    """Only the command line and a Python call may set it. A file that sets it is refused, and
    config.yaml does not record it."""

    def problem(self, value: object) -> str | None:
        """Return what a number violates, such as `it must be above 0`; None if it is valid."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        bounds = [
            ("above", self.above, self.above is None or value > self.above),
            ("at least", self.at_least, self.at_least is None or value >= self.at_least),
            ("below", self.below, self.below is None or value < self.below),
            ("at most", self.at_most, self.at_most is None or value <= self.at_most),
        ]
        limits = [f"{word} {limit:,}" for word, limit, _ in bounds if limit is not None]
        if not limits or (math.isfinite(value) and all(holds for *_, holds in bounds)):
            return None
        return f"it must be {' and '.join(limits)}"


def option(default: Any, description: str, **rules: Any) -> Any:
    """Return a dataclass field of an option, with the rules of `Option`.

    If the default is a dictionary, each object gets its own.
    """
    metadata = {"option": Option(description, **rules)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of an option's field; `REQUIRED` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def same_option(section: Any, name: str) -> Any:
    """Return a dataclass field that copies an option of `section`."""
    (field,) = [field for field in dataclasses.fields(section) if field.name == name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def internal(default: Any) -> Any:
    """Return a dataclass field that is not an option; the command sets it itself."""
    return dataclasses.field(default=default, kw_only=True, metadata={"internal": True})


class Section:
    """Base class for a section of options; checks their values.

    Messages show `prefix` before the name of an option. The class arguments `resume` and
    `per_machine` are the defaults of the section. Raises `UserError` with the option and its value.
    """

    prefix: ClassVar[str] = ""
    default_resume: ClassVar[Resume] = "ask"
    default_per_machine: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        prefix: str | None = None,
        resume: Resume | None = None,
        per_machine: bool | None = None,
    ) -> None:
        cls.prefix = cls.prefix if prefix is None else prefix
        cls.default_resume = cls.default_resume if resume is None else resume
        cls.default_per_machine = cls.default_per_machine if per_machine is None else per_machine

    def __post_init__(self) -> None:
        kind: Any = type(self)
        described = own_options(kind)
        for name, one in described.items():
            problem = one.problem(getattr(self, name))
            self.require(problem is None, name, problem or "")
        for name, one in described.items():
            if one.used_with is not None and getattr(self, name) != self.unset(name):
                self.require_use(name, *one.used_with)
        self._check()

    def _check(self) -> None:
        """Raise `UserError` if options contradict each other; subclasses override this.

        Called after the bounds of each option are checked.
        """

    def unset(self, name: str) -> Any:
        """Return the value of an option that is not set."""
        return getattr(type(self), name)

    def require_use(self, name: str, other: str, values: Sequence[object]) -> None:
        """Raise `UserError` for the option `name` unless `other` has one of `values`."""
        *others, last = map(typed, filter(None, values))
        uses = f"{', '.join(others)} or {last}" if others else last
        require(
            getattr(self, other) in values,
            f"{self.prefix}{name} is {typed(getattr(self, name))}, but {self.prefix}{other} "
            f"{typed(getattr(self, other))} does not use it; set {self.prefix}{name} to "
            f"{typed(self.unset(name))}, or {self.prefix}{other} to {uses}",
        )

    def require(self, ok: bool, name: str, problem: str) -> None:
        """Unless `ok`, raise `UserError` with the option `name`, its value and the `problem`."""
        require(ok, f"{self.prefix}{name} is {getattr(self, name)}; {problem}")


@functools.cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """Map the name of each field of a dataclass to its type, without `internal` fields."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if "internal" not in field.metadata:
            found[field.name] = hints[field.name]
    return types.MappingProxyType(found)


@functools.cache
def own_options(cls: Any) -> Mapping[str, Option]:
    """Map the name of each option of a class to its `Option`, without the options of sections."""
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if "option" in field.metadata:
            found[field.name] = field.metadata["option"]
    return types.MappingProxyType(found)


@functools.cache
def all_options(cls: type) -> Mapping[str, Option]:
    """Map the dotted key of each option to its `Option`, with the options of sections.

    The defaults of the section replace `resume` and `per_machine` if they are not set.
    """
    found: dict[str, Option] = {}
    kinds = field_types(cls)
    for field in dataclasses.fields(cls):
        if "option" in field.metadata:
            one: Option = field.metadata["option"]
            found[field.name] = dataclasses.replace(
                one,
                resume=one.resume or getattr(cls, "default_resume", "ask"),
                per_machine=one.per_machine or getattr(cls, "default_per_machine", False),
            )
        elif dataclasses.is_dataclass(kinds.get(field.name)):
            inner = all_options(kinds[field.name])
            found |= {f"{field.name}.{name}": one for name, one in inner.items()}
    return types.MappingProxyType(found)


def typed(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(typed, value)) or "[]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {typed(one)}" for key, one in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shlex.quote(str(value))


def duration(name: str, text: str | None) -> float | None:
    """Convert a time such as `3h50m`, `90s` or `90` to seconds; None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    seconds = 0.0
    if match:
        days, hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = days * 86_400 + hours * 3_600 + minutes * 60 + rest
    require(
        0 < seconds <= LONGEST_SECONDS,
        f"{name} is {text!r:.60}; write a time above 0 and at most 1000d, such as 3h50m or 90s",
    )
    return seconds
