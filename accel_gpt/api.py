"""The Python interface: `accel_gpt.run`, the `Run` that it returns, and `accel_gpt.load`.

Each takes the options of its command, and raises the error that the command would print.
"""

import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import clear_device_cache

from accel_gpt.children import launch_child
from accel_gpt.commands.evaluate import evaluate_named
from accel_gpt.commands.export import export_model
from accel_gpt.commands.options import (
    EvaluateCommand,
    ExportCommand,
    PushCommand,
    SampleCommand,
)
from accel_gpt.commands.push import push_model
from accel_gpt.commands.resolve import load_code, load_config
from accel_gpt.commands.sample import continue_prompt
from accel_gpt.commands.train import train_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import sections
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import PeerError, UserError, require
from accel_gpt.launcher import PREEMPTED, SIGNALS, is_main, use_slurm_variables
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.report.plots import loss_curves
from accel_gpt.report.runs import open_runs
from accel_gpt.training.accelerator import NOISY_LOGGER
from accel_gpt.training.run_folder import RunFolder
from accel_gpt.transformers_io.load import load_pretrained

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Run:
    """The folder of a run. As the last line of a notebook cell, it shows the loss curves."""

    path: Path

    @property
    def metrics(self) -> "DataFrame":
        """The records of metrics.jsonl, a row per step; NaN if a record lacks a metric."""
        from pandas import DataFrame

        (run,) = open_runs([str(self.path)])
        return DataFrame(list(run.records()) or {"step": []}).set_index("step")

    def sample(self, prompt: str = "", **options: object) -> list[str]:
        """Continue a prompt. `options` as for `accel-gpt sample`: num, temperature, seed, ..."""
        arguments = to_arguments({"prompt": prompt, **options})
        return continue_prompt(SampleCommand.parse([str(self.path), *arguments]))

    def evaluate(self, **options: object) -> dict[str, float]:
        """Evaluate the model. `options` as for `accel-gpt evaluate`: data, tokens, ..."""
        arguments = [str(self.path), *to_arguments(options)]
        with as_command(["evaluate", *arguments]):
            report = evaluate_named(EvaluateCommand.parse(arguments))
        return dict(report.metrics)

    def export(self, to: str | Path, **options: object) -> Path:
        """Write a folder for transformers, and verify it. `options` as for `accel-gpt export`."""
        arguments = to_arguments({"to": to, **options})
        command = ExportCommand.parse([str(self.path), *arguments])
        export_model(command)
        return Path(command.to)

    def push_to_hub(self, repo: str, **options: object) -> str:
        """Upload the model to the repository user/name on the Hub, and return its address.

        `options` as for `accel-gpt push`: private, license, ...
        """
        arguments = to_arguments({"repo": repo, **options})
        _, url = push_model(PushCommand.parse([str(self.path), *arguments]))
        return url

    def _repr_png_(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "loss.png")
            loss_curves(RunFolder(self.path).records(), image)
            return image.read_bytes()


def load(
    name: str | Path,
    checkpoint: str | int = "last",
    device: torch.device | str = "cpu",
    code: str | Path | None = None,
) -> tuple[LanguageModel, Tokenizer]:
    """Load the model and the tokenizer of a run, a folder or a Hub id.

    The model is in evaluation mode. `checkpoint`: which checkpoint of a run, as last, best or a
    step. `code`: if the run used a `model()` of your file, the path of this file; it is executed.
    """
    own = load_code(None if code is None else os.path.expanduser(code))
    return load_pretrained(os.path.expanduser(name), str(checkpoint), device, own)


def run(config: str | Path, options: Mapping[str, object] | None = None, processes: int = 1) -> Run:
    """Train as `accel-gpt train CONFIG --section.key value ...` does, or resume the run.

    `config`: a YAML file, or the name of a shipped config. `options`: {"section.key": value}, or
    {"section": {"key": value}}. `processes`: number of processes; torchrun starts more than one.
    An interrupt saves the run and returns it. Raises `UserError` for a mistake, and another class
    of accel_gpt/errors.py for any other failure.
    """
    require(
        isinstance(processes, int) and processes > 0,
        f"processes is {processes!r}; expected a whole number above 0",
    )
    use_slurm_variables()
    arguments = [str(config), *to_arguments(flatten_sections(options or {}))]
    parsed = load_config(arguments, "accel_gpt.run")
    trained = Run(Path(parsed.out_dir))
    if processes > 1:
        train_processes(arguments, processes)
    else:
        with as_command(["train", *arguments]):
            train_config(parsed, str(config))
    if "ipykernel.zmqshell" in sys.modules and is_main():
        from IPython.display import display

        display(trained)
    return trained


def train_processes(arguments: list[str], processes: int) -> None:
    """Train in new processes, since this process may already use its device.

    An interrupt reaches all of them; they save and stop. Raises `PeerError` if one fails.
    """
    with launch_child(["train", *arguments], processes=processes) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            return
    if code not in (0, PREEMPTED):
        raise PeerError(f"training on {processes} processes failed; see their error above")


def flatten_sections(options: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested sections, as in a YAML file, to dotted keys.

    A mapping stays a mapping if it is the value of an option. Raises `UserError` for an option that
    is given twice, and for a section that is not a mapping.
    """
    flat: dict[str, object] = {}
    for name, value in options.items():
        key = f"{prefix}{name}"
        inner = {key: value}
        if key in sections(Config):
            if not isinstance(value, Mapping):
                raise UserError(
                    f"{key} is {value!r}, but it is a section of options; give a mapping, or "
                    f"{key}.NAME for one option"
                )
            inner = flatten_sections(value, f"{key}.")
        for one in inner:
            require(one not in flat, f"{one} is given twice; give it once")
        flat |= inner
    return flat


def to_arguments(options: Mapping[str, object]) -> list[str]:
    """Convert `options` to command-line arguments."""
    arguments = []
    for key, value in options.items():
        if value is None or isinstance(value, bool | list | tuple | dict):
            arguments.append(f"--{key}={json.dumps(value, default=str)}")
        else:
            arguments.append(f"--{key}={value}")
    return arguments


@contextmanager
def as_command(arguments: list[str]) -> Iterator[None]:
    """Run the body as the command `accel-gpt ARGUMENTS` in this process; restore its settings."""
    with kept_process(), kept_torch(), kept_random_states():
        sys.argv = ["accel-gpt", *arguments]  # what run.json records
        try:
            yield
        except SystemExit as error:
            raise UserError(
                f"accel-gpt {arguments[0]} ended with code {error.code}; see above"
            ) from None


@contextmanager
def kept_process() -> Iterator[None]:
    """Restore what a command changes for its process.

    These are signal handlers, arguments, environment variables, filters of warnings, a log level,
    modules that are blocked, objects that the garbage collector leaves out, and the state of
    Accelerate.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    argv = sys.argv
    environment = dict(os.environ)
    logger = logging.getLogger(NOISY_LOGGER)
    level = logger.level
    blocked = {name for name, module in sys.modules.items() if module is None}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.argv = argv
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        logger.setLevel(level)
        for name in [name for name, module in sys.modules.items() if module is None]:
            if name not in blocked:
                del sys.modules[name]
        gc.unfreeze()  # also what was frozen before: Python 3.12 always freezes some objects itself
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clear_device_cache(garbage_collection=True)


@contextmanager
def kept_torch() -> Iterator[None]:
    """Restore torch's threads, deterministic mode, precision of products, and denormal numbers."""
    deterministic = torch.get_deterministic_debug_mode()
    threads = torch.get_num_threads()
    backends: Any = torch.backends  # not all of its attributes have types
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    precisions = [backend.fp32_precision for backend in products]
    try:
        of_products = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the backends apart
        of_products = None
    flushes_denormals = sys.float_info.min / 2 == 0.0  # torch has no function that reads it
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_num_threads(threads)
        if of_products:
            torch.set_float32_matmul_precision(of_products)
        for backend, precision in zip(products, precisions, strict=True):
            backend.fp32_precision = precision
        torch.set_flush_denormal(flushes_denormals)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch; training seeds and loads them."""
    python = random.getstate()
    legacy = np.random.get_state()
    cpu = torch.get_rng_state()
    cuda: Any = torch.cuda  # not all of its functions have types
    gpus = cuda.get_rng_state_all() if cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            cuda.set_rng_state_all(gpus)
