"""`accel-gpt verify-resume CONFIG`: kill and resume runs, compare them with an undisturbed run.

Trains a few steps in real processes, once undisturbed. Then trains again with SIGKILL at random
moments; the launches use the requested numbers of processes in turn. Compares the metrics and the
last checkpoints. Writes to a temporary folder: `config.yaml` (the launched config), `undisturbed/`,
`disturbed_1/`, ..., the output of each launch, `launch_1.log`, ..., and a copy of the file of
--code.
"""

import contextlib
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from accel_gpt.children import launch_child
from accel_gpt.commands.options import VerifyResumeCommand
from accel_gpt.config.plan import make_plan, plural, shared_micro_batch, shorten, with_size
from accel_gpt.config.values import to_yaml
from accel_gpt.console import install_exit_handlers, write_err
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.files import write_file
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.runs.checkpoint import find_checkpoint
from accel_gpt.runs.folder import RunFolder

POLL_SECONDS = 0.005  # between two looks at the step of a launch
LAST_LINES = 30  # shown of a launch that failed; torchrun adds about 20 to the trainer's
SHOWN = 10  # differences that are printed


def run(options: VerifyResumeCommand) -> int:
    """Kill and resume runs of a config; return 1 if they differ from an undisturbed run.

    Raises `UserError` if the config does not fit the numbers of processes, `LaunchFailed` if a
    launch fails.
    """
    install_exit_handlers()
    config = shorten(options.loaded, options.steps)
    require(
        config.train.reproducible or len(set(options.processes)) == 1,
        "--processes has several numbers, but train.reproducible is false; set it to true",
    )
    for world_size in options.processes:
        # one size for all numbers of processes: the bits of a reproducible run depend on it
        config = with_size(config, shared_micro_batch(config, world_size))
        make_plan(config, world_size)
    ensure_data(config)
    folder = Path(tempfile.mkdtemp(prefix="accel_gpt_verify_"))
    write_file(folder / "config.yaml", [to_yaml(config).encode()])
    trial = Trial(options, folder)
    if config.own.file:  # the launches use this copy, so you may change the file meanwhile
        write_file(folder / config.own.name, [config.own.source])
        trial.code = ["--code", str(folder / config.own.name)]
    try:
        trial.run()
        sys.stdout.write(trial.report())
    finally:
        if trial.failed or trial.differences:
            write_err(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if trial.proven and not trial.differences else 1


# --------------------------------------------------------------------------- launches


class LaunchFailed(AccelGPTError):
    """A launch failed before its run was complete."""

    exit_code = 1


class Trial:
    """The launches of one command in a folder, and the differences that they found."""

    def __init__(self, options: VerifyResumeCommand, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.code: list[str] = []  # arguments that name the file of --code
        self.runs = 0
        self.launches = 0
        self.kills = 0
        self.failed = False  # a launch failed
        self.compared = 0  # values
        self.differences: list[str] = []
        self.run_seconds = math.inf  # of the fastest run that took one launch
        self.resumed: set[int] = set()  # steps at which a launch went on

    @property
    def proven(self) -> bool:
        """Whether a launch resumed between the first and the last step, if launches were killed."""
        return bool(self.resumed) or not self.options.kills

    def run(self) -> None:
        """Train once undisturbed, then with kills until all have happened or a run differs."""
        undisturbed = self.folder / "undisturbed"
        self.launch(undisturbed, kill=False)
        whole = run_values(undisturbed, self.options.steps)
        while not self.differences and (self.runs == 0 or self.kills < self.options.kills):
            self.runs += 1
            folder = self.folder / f"disturbed_{self.runs}"
            done = False
            while not done:
                done = self.launch(folder, kill=self.kills < self.options.kills)
                began = RunFolder(folder).last_launch("step") or 0
                if 0 < began < self.options.steps:
                    self.resumed.add(began)
            values = run_values(folder, self.options.steps)
            self.compared += len(values)
            self.differences = differing_values(whole, values)
            write_err(f"{folder.name} {'DIFFERS' if self.differences else 'agrees'}")
            if not self.differences:
                shutil.rmtree(folder)

    def launch(self, folder: Path, kill: bool) -> bool:
        """Launch a run, `kill` it at a random moment, and return whether it was done before.

        Raises `LaunchFailed` with the last lines of its output if it fails.
        """
        world_size = self.options.processes[self.launches % len(self.options.processes)]
        self.launches += 1
        new = not folder.exists()
        output = self.folder / f"launch_{self.launches}.log"
        processes = plural(world_size, "process", "processes")
        name = f"launch {self.launches}, {folder.name} on {processes}"
        start = time.monotonic()
        with output.open("wb") as file:
            process = launch_child(
                self.command(folder),
                processes=world_size,
                stdout=file,
                stderr=file,
                own_group=True,
            )
        try:
            if kill:
                self.wait_for_moment(process, RunFolder(folder))
            else:
                process.wait()
        finally:
            late = process.poll() is None
            if late:
                kill_tree(process)
        seconds = time.monotonic() - start
        if late and process.returncode == -signal.SIGKILL:
            self.kills += 1
            step = RunFolder(folder).step
            write_err(f"{name}: killed after {seconds:.1f} s, at step {step} ({self.kills} so far)")
            return False
        if process.returncode:
            self.failed = True
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-LAST_LINES:])
            raise LaunchFailed(f"{name} failed with exit code {process.returncode}:\n{shown}")
        write_err(f"{name}: done after {seconds:.1f} s")
        if new:
            self.run_seconds = min(self.run_seconds, seconds)
        return True

    def wait_for_moment(self, process: subprocess.Popen[str], run: RunFolder) -> None:
        """Wait for a random moment of a run, or for its end.

        Every second moment, the first one included, is a random step after the first checkpoint;
        the others are random times, so that some are in the start-up.
        """
        if self.kills % 2 == 0 and run.step + 1 < self.options.steps:
            step = random.randrange(run.step + 1, self.options.steps)
            while process.poll() is None and (run.step < step or not run.checkpoints):
                time.sleep(POLL_SECONDS)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, self.run_seconds))

    def command(self, folder: Path) -> list[str]:
        """Return the arguments of `accel-gpt` that train in `folder`."""
        config = str(self.folder / "config.yaml")
        arguments = ["train", config, "--out_dir", str(folder), *self.code]
        resolved = RunFolder(self.folder / "undisturbed").config
        if resolved:  # the values that auto resolved to there
            for key in ("train.mixed_precision", "train.compile"):
                arguments += [f"--{key}", str(resolved[key])]
        return arguments

    def report(self) -> str:
        """Return a summary, the first differences, and the result."""
        resumed = ", ".join(f"{step:,}" for step in sorted(self.resumed)) or "none"
        lines = [
            f"{plural(self.runs, 'run')} of {plural(self.options.steps, 'step')} with "
            f"{plural(self.kills, 'kill')}, compared with an undisturbed run",
            f"steps at which launches resumed: {resumed}",
            f"metrics and tensors: {self.compared:,} compared, {len(self.differences):,} different",
            *self.differences[:SHOWN],
        ]
        if self.differences:
            lines.append("stop and resume is NOT the same as never stopping")
        elif not self.proven:
            lines.append("no launch resumed between the first and the last step; raise --steps")
        else:
            lines.append("stop and resume equals never stopping, bit for bit")
        return "\n".join([*lines, ""])


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants, and wait until they end: they hold the folder's lock.

    Suspends them first, so that they start no more processes.
    """
    top = psutil.Process(process.pid)
    tree: list[psutil.Process] = []
    while fresh := [one for one in (top, *top.children(recursive=True)) if one not in tree]:
        for member in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.suspend()
        tree += fresh
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            while member.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
    process.wait()


# --------------------------------------------------------------------------- comparing


def run_values(folder: Path, steps: int) -> dict[str, Any]:
    """Return the metrics, weights and optimizer state of a run by name; no speeds and times.

    Raises `UserError` if the run lacks its last checkpoint.
    """
    found: dict[str, Any] = {}
    for number, record in enumerate(RunFolder(folder).records(), start=1):
        step = record.pop("step")
        found[f"step of record {number}"] = step
        for key, value in record.items():
            if key != "time" and not key.startswith("perf/"):
                found[f"{key} at step {step}"] = value
    checkpoint = find_checkpoint(folder, str(steps))
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True, map_location="cpu")
    return found | load_file(checkpoint / "model.safetensors") | flatten_state(optimizer)


def flatten_state(value: Any, name: str = "optimizer") -> dict[str, Any]:
    """Map the dotted name of each leaf of nested mappings and lists to its value.

    An empty mapping or list is a leaf.
    """
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, part in value.items():
        leaves |= flatten_state(part, f"{name}.{key}")
    return leaves


def differing_values(whole: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Describe each value of two runs that differs in any bit, or that one run lacks."""
    found = []
    for name in dict.fromkeys([*whole, *other]):
        one = whole.get(name, "missing")
        two = other.get(name, "missing")
        if not same_bits(one, two):
            found.append(f"{name}: {describe_value(one)} undisturbed, {describe_value(two)} here")
    return found


def same_bits(one: Any, two: Any) -> bool:
    """Return whether two values are equal: tensors by their bytes, so 0.0 differs from -0.0."""
    if not torch.is_tensor(one) or not torch.is_tensor(two):
        return type(one) is type(two) and repr(one) == repr(two)
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return one.reshape(-1).view(torch.uint8).equal(two.reshape(-1).view(torch.uint8))


def describe_value(value: Any) -> str:
    """Return the value itself; of a tensor, the shape, the type and the sum of its elements."""
    if not torch.is_tensor(value):
        return str(value)
    return f"{list(value.shape)} {value.dtype} with sum {value.double().sum().item()!r}"
