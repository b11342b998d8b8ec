"""Load `--code FILE`, a Python file of yours whose functions replace parts of a run.

    accel-gpt train quickstart --code my.py

There is no registry and no base class: a function in the file that has one of these names is called
in the place of ours. Each is optional, and may leave out any argument that it does not need.

    model(config, vocab_size)        # nn.Module: tokens (B, T) to logits (B, T, V)
    optimizer(model, config, plan)   # torch.optim.Optimizer
    lr(step, config, plan)           # share of the peak, after `step` updates
    loss(model, tokens, targets, documents, step, config, plan)
                                     # scalar, or (scalar, {name: scalar})
    targets(tokens, targets, documents, config)
                                     # the targets, with -100 where nothing is learned
    shards(folder, split)            # list of arrays of token ids
    metrics(run, record, batch, step, config, plan)
                                     # {name: number}, at each logged step
    evaluated(model, optimizer, step, config, plan)
                                     # {name: tensor}, the weights that are evaluated
    evaluate(run, config)            # {name: number}, at each evaluation
    after_evaluation(run, record, step, config, plan)
                                     # nothing

The command line and a Python call name the file. No file that is read can name it, so a folder from
someone else executes nothing.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from accel_gpt.errors import UserError, nearest, require

Weights = Literal["evaluated", "trained"]  # of a checkpoint
# name -> the arguments that its parameters may name
ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("config", "vocab_size"),
        "optimizer": ("model", "config", "plan"),
        "lr": ("step", "config", "plan"),
        "loss": ("model", "tokens", "targets", "documents", "step", "config", "plan"),
        "targets": ("tokens", "targets", "documents", "config"),
        "shards": ("folder", "split"),
        "metrics": ("run", "record", "batch", "step", "config", "plan"),
        "evaluated": ("model", "optimizer", "step", "config", "plan"),
        "evaluate": ("run", "config"),
        "after_evaluation": ("run", "record", "step", "config", "plan"),
    }
)
NEAR = 0.75  # least similarity of a name that is probably misspelled; assumption


class OwnFunction:
    """A function of the file, which gets the arguments that its parameters name."""

    def __init__(self, name: str, function: Callable[..., Any], typed: str) -> None:
        """Find the arguments that `function` takes; raise `UserError` if it needs another.

        `typed`: the path of the file as the user typed it.
        """
        self.function = function
        require(callable(function), f"{typed}: {name} is {function!r:.60}, not a function")
        inner: Any = inspect.unwrap(function)
        in_file = isinstance(getattr(inner, "__globals__", {}).get("__loader__"), HeldSource)
        line = f", line {inner.__code__.co_firstlineno}" if in_file else ""
        self.place = f"{typed}{line}: {name}()"
        plain = not (inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner))
        require(plain, f"{self.place} is a coroutine or a generator; write a plain function")
        known = ARGUMENTS[name]
        bound = getattr(function, "keywords", {})  # of functools.partial
        parameters = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self.names = [
            argument
            for argument in known
            if argument not in bound and (takes_all or argument in parameters)
        ]
        try:
            inspect.signature(function).bind(**dict.fromkeys(self.names))
        except TypeError as error:
            raise UserError(f"{self.place}: {error}; it may take {', '.join(known)}") from None

    def __call__(self, **arguments: Any) -> Any:
        """Call the function; leave out the `arguments` that it does not take."""
        try:
            return self.function(**{name: arguments[name] for name in self.names})
        except TypeError as error:
            if place_in_own_code(error) is not None:
                raise
            raise UserError(f"{self.place}: {error}") from error


@dataclass(frozen=True)
class OwnCode:
    """The functions of a file; None for each function that it does not define."""

    file: str = ""  # the path as given; "": no file
    source: bytes = b""
    model: OwnFunction | None = None
    optimizer: OwnFunction | None = None
    lr: OwnFunction | None = None
    loss: OwnFunction | None = None
    targets: OwnFunction | None = None
    shards: OwnFunction | None = None
    metrics: OwnFunction | None = None
    evaluated: OwnFunction | None = None
    evaluate: OwnFunction | None = None
    after_evaluation: OwnFunction | None = None
    misspelled: tuple[str, ...] = ()  # a line for each function whose name probably is

    @property
    def name(self) -> str:
        """Return the name of the file without its folder."""
        return Path(self.file).name

    @property
    def sha256(self) -> str:
        """Return the SHA-256 (hex) of the file; "" without a file."""
        return hashlib.sha256(self.source).hexdigest() if self.file else ""

    @property
    def functions(self) -> list[str]:
        """Return the names of the functions that the file defines."""
        return [name for name in ARGUMENTS if getattr(self, name) is not None]

    @property
    def draws(self) -> bool:
        """Return whether the file may draw random numbers in the forward pass."""
        return self.model is not None or self.loss is not None

    def place(self, name: str) -> str:
        """Return the file, line and name of a function, for an error."""
        place: str = getattr(self, name).place
        return place


class HeldSource(SourceLoader):
    """Execute a source that was read before; never read or write compiled code.

    So what runs has the hash that a checkpoint records, also if the file changes meanwhile.
    `typed`: the path as the user typed it, for errors.
    """

    def __init__(self, typed: str, source: bytes) -> None:
        self.typed = typed
        self.source = source

    def get_filename(self, fullname: str) -> str:
        """Return the absolute path of the file."""
        return os.path.abspath(self.typed)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the source."""
        return self.source


def load_own_code(path: str | None) -> OwnCode:
    """Execute a file and return its functions; none if `path` is None.

    Raises `UserError` if there is no such file, if it defines none of the functions, or one with
    other arguments. Any other error is raised as it is; see `place_in_own_code`.
    """
    if path is None:
        return OwnCode()
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--code {path} cannot be read: {error.strerror}") from None
    # one module for each path, so that a notebook keeps the last version alone
    module_name = f"own_code_{hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]}"
    loader = HeldSource(path, source)
    spec = spec_from_loader(module_name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and torch.compile look it up
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        if error.filename not in (None, os.path.abspath(path)):
            raise
        line = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{line}: {error.msg}") from None
    functions = {
        name: OwnFunction(name, getattr(module, name), path)
        for name in ARGUMENTS
        if hasattr(module, name)
    }
    misspelled = tuple(misspelled_functions(module, ARGUMENTS.keys() - functions.keys()))
    if not functions:
        names = ", ".join(ARGUMENTS)
        advice = "; ".join(misspelled) or "define at least one of them"
        raise UserError(f"--code {path} defines none of the functions {names}; {advice}")
    return OwnCode(file=path, source=source, misspelled=misspelled, **functions)


def misspelled_functions(module: ModuleType, missing: Collection[str]) -> Iterator[str]:
    """Yield a line for each function of the file that nothing calls, with the name it may mean."""
    for name, value in vars(module).items():
        is_own = inspect.isfunction(value) and value.__module__ == module.__name__
        near = nearest(name, missing, NEAR) if is_own and name not in ARGUMENTS else []
        if near:
            yield f"nothing calls {name}(); did you mean {' or '.join(near)}?"


def unexpected(place: str, returned: object, expected: str) -> UserError:
    """Return the error for what a function of --code returned.

    `place`: its file, line and name.
    """
    shape = getattr(returned, "shape", None)
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    return UserError(f"{place} returned {type(returned).__name__}{of_shape}; return {expected}")


def place_in_own_code(error: BaseException) -> str | None:
    """Return the line of your file in which an error was raised; None if it was raised elsewhere.

    Of several such lines, it is the innermost one.
    """
    place = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        loader = frame.f_globals.get("__loader__")
        if isinstance(loader, HeldSource):
            code = frame.f_code
            where = "" if code.co_name == "<module>" else f", in {code.co_qualname}"
            place = f"{loader.typed}, line {trace.tb_lineno}{where}"
        trace = trace.tb_next
    return place
