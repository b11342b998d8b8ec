"""The Python interface: `accel_gpt.run`, the `Run` that it returns, and `accel_gpt.load`.

Each takes the options of its command, and raises the error that the command would print.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import clear_device_cache

from accel_gpt.commands.evaluate import evaluate_named
from accel_gpt.commands.export import export_model
from accel_gpt.commands.options import (
    EvaluateCommand,
    ExportCommand,
    PushCommand,
    SampleCommand,
)
from accel_gpt.commands.push import push_model
from accel_gpt.commands.sample import continue_prompt
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config, sections
from accel_gpt.console import in_notebook
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import PeerError, UserError, require
from accel_gpt.hub.load import load_pretrained
from accel_gpt.hub.pretrained import inherit
from accel_gpt.launcher import PREEMPTED, SIGNALS, is_main, join_slurm_step, launch_child
from accel_gpt.model.gpt import GPT
from accel_gpt.report.plots import loss_curves
from accel_gpt.report.runs import open_runs
from accel_gpt.train import launch
from accel_gpt.training.run_folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Run:
    """The folder of a run, trained here or elsewhere; a notebook shows its loss curves."""

    path: Path

    @property
    def metrics(self) -> "DataFrame":
        """One row per record of metrics.jsonl, indexed by step; NaN if a record lacks a metric."""
        from pandas import DataFrame

        (run,) = open_runs([str(self.path)])
        return DataFrame(list(run.records()) or {"step": []}).set_index("step")

    def sample(self, prompt: str = "", **options: object) -> list[str]:
        """Continue a prompt. `options` as for `accel-gpt sample`: num, temperature, seed, ..."""
        require(isinstance(prompt, str), f"the prompt is {prompt!r}; expected text")
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
        export_model(ExportCommand.parse([str(self.path), *arguments]))
        return Path(to)

    def push_to_hub(self, repo: str, **options: object) -> str:
        """Upload the model to the repository user/name on the Hub, and return its address.

        `options` as for `accel-gpt push`: private, license, include_state, ...
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
    name: str | Path, checkpoint: str | int = "last", device: torch.device | str = "cpu"
) -> tuple[GPT, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a run, a folder or a Hub id.

    `checkpoint` selects a checkpoint of a run: last, best, or a step.
    """
    return load_pretrained(str(name), str(checkpoint), device=device)


def run(config: str | Path, options: Mapping[str, object] | None = None, processes: int = 1) -> Run:
    """Train as `accel-gpt train CONFIG --section.key value ...` does, or resume the run.

    `config`: a YAML file or the name of a shipped one. `options`: {"section.key": value}, or
    {"section": {"key": value}}. `processes`: if more than one, torchrun starts them. An interrupt
    saves the run and returns it. Raises `UserError` for a mistake, and another class of
    accel_gpt/errors.py for any other failure.
    """
    require(
        isinstance(processes, int) and processes > 0,
        f"processes is {processes!r}; expected a whole number above 0",
    )
    join_slurm_step()
    arguments = [str(config), *to_arguments(flatten_sections(options or {}))]
    parsed = load_config(arguments, "accel_gpt.run", inherit)
    trained = Run(Path(parsed.out_dir))
    if processes > 1:
        train_processes(arguments, processes)
    else:
        with as_command(["train", *arguments]):
            launch(parsed, str(config))
    if in_notebook() and is_main() and not parsed.eval.only:
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
    """Run the body as the command `accel-gpt ARGUMENTS` in this process.

    Afterwards, restore what a command changes for its process: signal handlers, environment
    variables, the state of torch and Accelerate.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    argv = sys.argv
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    sys.argv = ["accel-gpt", *arguments]  # what run.json records
    try:
        yield
    except SystemExit as error:
        raise UserError(
            f"accel-gpt {arguments[0]} ended with code {error.code}; see above"
        ) from None
    finally:
        sys.argv = argv
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clear_device_cache(garbage_collection=True)
