"""The Python interface: `accel_gpt.run`, the `Run` that it returns, and `accel_gpt.load`.

Each does what its command does, through the same options, and raises what the command would print.
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
from accel_gpt.commands.options import EvaluateCommand, ExportCommand, SampleCommand
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
        """Records of metrics.jsonl, a row each, by step; NaN if a record lacks a metric."""
        from pandas import DataFrame

        (run,) = open_runs([str(self.path)])
        return DataFrame(list(run.records()) or {"step": []}).set_index("step")

    def sample(self, prompt: str = "", **options: object) -> list[str]:
        """Continue a prompt; `options` of `accel-gpt sample`: num, temperature, seed, ..."""
        require(isinstance(prompt, str), f"the prompt is {prompt!r}; expected text")
        words = to_words({"prompt": prompt, **options})
        return continue_prompt(SampleCommand.parse([str(self.path), *words]))

    def evaluate(self, **options: object) -> dict[str, float]:
        """Measure the model; `options` of `accel-gpt evaluate`: data, tokens, hellaswag, ..."""
        words = [str(self.path), *to_words(options)]
        with as_command(["evaluate", *words]):
            report = evaluate_named(EvaluateCommand.parse(words))
        return dict(report.metrics)

    def export(self, to: str | Path, **options: object) -> Path:
        """Write a folder that transformers opens, proven equal; `options` of `accel-gpt export`."""
        words = to_words({"to": to, **options})
        export_model(ExportCommand.parse([str(self.path), *words]))
        return Path(to)

    def _repr_png_(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "loss.png")
            loss_curves(RunFolder(self.path).records(), image)
            return image.read_bytes()


def load(
    name: str | Path, checkpoint: str | int = "last", device: torch.device | str = "cpu"
) -> tuple[GPT, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a run, a folder or a Hub id.

    `checkpoint`, of a run: last, best, or a step.
    """
    return load_pretrained(str(name), str(checkpoint), device=device)


def run(config: str | Path, options: Mapping[str, object] | None = None, processes: int = 1) -> Run:
    """Train as `accel-gpt train CONFIG --section.key value ...` does, or resume the run.

    `config`: a YAML file or the name of a shipped one. `options`: {"section.key": value}, or
    {"section": {"key": value}}. `processes`: if more than one, torchrun starts them. An interrupt
    saves the run and returns it. Raises `UserError` for a mistake, other classes of
    accel_gpt/errors.py for other failures.
    """
    require(
        isinstance(processes, int) and processes > 0,
        f"processes is {processes!r}; expected a whole number above 0",
    )
    join_slurm_step()
    words = [str(config), *to_words(flatten_sections(options or {}))]
    parsed = load_config(words, "accel_gpt.run", inherit)
    trained = Run(Path(parsed.out_dir))
    if processes > 1:
        train_processes(words, processes)
    else:
        with as_command(["train", *words]):
            launch(parsed, str(config))
    if in_notebook() and is_main() and not parsed.eval.only:
        from IPython.display import display

        display(trained)
    return trained


def train_processes(words: list[str], processes: int) -> None:
    """Train in new processes, as this one may have used its device.

    An interrupt reaches all of them: they save and stop, as at the time limit. Raises `PeerError`
    if one fails.
    """
    with launch_child(["train", *words], processes=processes) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            return
    if code not in (0, PREEMPTED):
        raise PeerError(f"training on {processes} processes failed; see their error above")


def flatten_sections(options: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Convert options whose sections are mappings, as in a YAML file, to dotted keys.

    A mapping that is itself the value of an option stays one. Raises `UserError` for an option that
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


def to_words(options: Mapping[str, object]) -> list[str]:
    """Write `options` as words of a command line."""
    words = []
    for key, value in options.items():
        if value is None or isinstance(value, bool | list | tuple | dict):
            words.append(f"--{key}={json.dumps(value, default=str)}")
        else:
            words.append(f"--{key}={value}")
    return words


@contextmanager
def as_command(words: list[str]) -> Iterator[None]:
    """Run a command, which `words` name, in this process.

    A command leaves what ends with its process: signal handlers, environment variables, the state
    of torch and of Accelerate. Afterwards they are as before.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    argv = sys.argv
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    sys.argv = ["accel-gpt", *words]  # what run.json records
    try:
        yield
    except SystemExit as error:
        raise UserError(f"accel-gpt {words[0]} ended with code {error.code}; see above") from None
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
