"""The Python interface: `accel_gpt.run`, the `Run` that it returns, and `accel_gpt.load`.

Each takes the options of its command, and raises the error that the command would print. Training
and evaluating run in a process of their own.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from accel_gpt import errors
from accel_gpt.children import PREFIXES, launch_child
from accel_gpt.commands.export import export_model
from accel_gpt.commands.options import (
    EvaluateCommand,
    ExportCommand,
    PushCommand,
    SampleCommand,
)
from accel_gpt.commands.push import push_model
from accel_gpt.commands.resolve import load_code
from accel_gpt.commands.sample import continue_prompt
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_given
from accel_gpt.console import FAILURE_FILE
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, PeerError, require
from accel_gpt.health.case import Line
from accel_gpt.health.doctor import examine
from accel_gpt.launcher import PREEMPTED, STOP_WITH_PARENT
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.own_code import Weights
from accel_gpt.report.plots import loss_curves
from accel_gpt.report.runs import open_runs
from accel_gpt.runs.folder import RunFolder
from accel_gpt.transformers_io.load import load_pretrained

if TYPE_CHECKING:
    from pandas import DataFrame

LAST_LINES_SECONDS = (
    5.0  # for the last lines of a child; a process of it may outlive it; assumption
)


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
        arguments = [str(self.path), *to_arguments({**options, "json": True})]
        EvaluateCommand.parse(arguments)  # raises for a mistake before a process starts
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            run_command(["evaluate", *arguments], output=output)
            output.seek(0)
            report = output.read()
        metrics = json.loads(report)["metrics"] if report else {}  # rank 0 alone prints it
        return {key: math.nan if value is None else value for key, value in metrics.items()}

    def doctor(self) -> list[Line]:
        """Answer nine questions about the run; as `accel-gpt doctor`."""
        (run,) = open_runs([str(self.path)])
        return examine(run)

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
    checkpoint: str | int | None = None,
    device: torch.device | str = "cpu",
    code: str | Path | None = None,
    weights: Weights = "evaluated",
) -> tuple[LanguageModel, Tokenizer]:
    """Load the model and the tokenizer of a run, a folder or a Hub id.

    The model is in evaluation mode. `checkpoint`: which one of a run, as last, best or a step;
    None: the best, or the newest if no best one is kept. `code`: if the run used a `model()` of
    your file, the path of this file; it is executed. `weights`: evaluated or trained, if the run
    used an `evaluated()` of your file.
    """
    own = load_code(None if code is None else os.path.expanduser(code))
    which = None if checkpoint is None else str(checkpoint)
    return load_pretrained(os.path.expanduser(name), which, device, own, weights)


def run(config: str | Path, options: Mapping[str, object] | None = None, processes: int = 1) -> Run:
    """Train as `accel-gpt train CONFIG --section.key value ...` does, or resume the run.

    `config`: a YAML file, or the name of a shipped config. `options`: {"section.key": value}.
    `processes`: number of processes; torchrun starts more than one. An interrupt saves the run and
    returns it. Raises `UserError` for a mistake, and another class of accel_gpt/errors.py for any
    other failure.
    """
    require(
        isinstance(processes, int) and processes > 0,
        f"processes is {processes!r}; expected a whole number above 0",
    )
    arguments = [str(config), *to_arguments(options or {})]
    given = read_given(arguments, "accel_gpt.run")
    trained = Run(Path(given.get("out_dir", Config().out_dir)))
    code = run_command(["train", *arguments], processes)
    if code == PREEMPTED and not any(trained.path.glob("checkpoints/step_*")):
        raise KeyboardInterrupt  # before the first step
    if in_notebook():
        from IPython.display import display

        display(trained)
    return trained


def run_command(
    arguments: list[str], processes: int = 1, output: IO[str] | int | None = None
) -> int:
    """Run `accel-gpt ARGUMENTS` in a new process, which shows its progress; return its exit code.

    A call works in any thread, leaves this process unchanged, and frees the device at its end. An
    interrupt reaches the command, which saves and stops. `output`: takes its standard output.
    Raises the error of the command, and `KeyboardInterrupt` if an interrupt ended it.
    """
    # a notebook shows what is written to its streams, and standard error in red
    shown = sys.stdout if in_notebook() else sys.stderr
    copied = in_notebook() or sys.stderr is not sys.__stderr__
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "error.json")
        environment = {FAILURE_FILE: str(report), "PYTHONUNBUFFERED": "1"}
        if processes == 1:  # under a launcher, the child takes the place of this process
            for key, value in os.environ.items():
                if key.startswith(PREFIXES):
                    environment.setdefault(key, value)
            environment[STOP_WITH_PARENT] = str(os.getpid())
        stderr = None
        if copied:
            stderr = subprocess.STDOUT if output is None else subprocess.PIPE
            output = subprocess.PIPE if output is None else output
        with launch_child(
            arguments,
            processes=processes,
            environment=environment,
            stdout=output,
            stderr=stderr,
        ) as child:
            printed = child.stderr or child.stdout
            # writes the lines as they come
            reader = threading.Thread(target=shown.writelines, args=(printed or (),), daemon=True)
            reader.start()
            code = wait_for(child, forward=processes == 1)
            reader.join(LAST_LINES_SECONDS)
        if code in (0, PREEMPTED):
            return code
        try:
            failure = json.loads(report.read_text(encoding="utf-8"))
            kind: type[AccelGPTError] = getattr(errors, failure["class"])
        except (OSError, ValueError):  # a bug, or the system killed the child
            told = f"accel-gpt {arguments[0]} ended with exit code {code}; see its error above"
            raise PeerError(told) from None
        raise kind(failure["message"].removeprefix("error: "))


def in_notebook() -> bool:
    """Return whether a notebook runs this process."""
    return "ipykernel.zmqshell" in sys.modules


def wait_for(child: subprocess.Popen[str], forward: bool) -> int:
    """Wait for a child and return its exit code.

    `forward`: send it an interrupt of this process. A terminal and a notebook send one to both
    processes at once; the child counts the two as one. A second interrupt ends the wait.
    """
    try:
        code = child.wait()
    except KeyboardInterrupt:
        if forward:
            child.send_signal(signal.SIGINT)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    if code in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt
    return code


def to_arguments(options: Mapping[str, object]) -> list[str]:
    """Convert `options` to command-line arguments."""
    arguments = []
    for key, value in options.items():
        if value is None or isinstance(value, bool | list | tuple | dict):
            arguments.append(f"--{key}={json.dumps(value, default=str)}")
        else:
            arguments.append(f"--{key}={value}")
    return arguments
