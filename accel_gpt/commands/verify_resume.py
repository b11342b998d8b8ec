"""`accel-gpt verify-resume CONFIG`: kill and resume runs, compare them with an undisturbed run.

Trains a few steps in real processes, once undisturbed. Then trains again with SIGKILL at random
moments; the launches use the requested numbers of processes in turn. Compares the metrics and the
last checkpoints. Writes to a temporary folder: `config.yaml` (the launched config), `undisturbed/`,
`disturbed_1/`, ..., and the output of each launch, `launch_1.log`, ...
"""

import contextlib
import hashlib
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from accel_gpt.children import launch_child
from accel_gpt.commands.options import VerifyResumeCommand
from accel_gpt.config.plan import make_plan, plural, shared_micro_batch, shorten, with_sizes
from accel_gpt.config.stages import stage_configs
from accel_gpt.config.values import to_yaml
from accel_gpt.console import install_exit_handlers, write_err
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.files import write_file
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.runs.checkpoint import EVALUATED, SAFE_WEIGHTS, find_checkpoint
from accel_gpt.runs.folder import RunFolder

POLL_SECONDS = 0.005  # between two looks at the step of a launch
LAST_LINES = 30  # shown of a launch that failed; torchrun adds about 20 to the trainer's
SHOWN = 10  # differences that are printed


def run(options: VerifyResumeCommand) -> int:
    """Kill and resume runs of a config; return 1 if they differ from an undisturbed run.

    Raises `UserError` if the config does not fit the numbers of processes, `LaunchFailed` if a
    launch fails. Then, and if runs differ, the folder is kept.
    """
    install_exit_handlers()
    config = shorten(options.loaded, options.steps)
    require(
        config.train.reproducible or len(set(options.processes)) == 1,
        "--processes has several numbers, but train.reproducible is false; set it to true",
    )
    for world_size in options.processes:
        # one size for all numbers of processes: the bits of a reproducible run depend on it
        stages = stage_configs(config)
        config = with_sizes(config, [shared_micro_batch(one, world_size) for one in stages])
        make_plan(config, world_size)
    ensure_data(config)
    folder = Path(tempfile.mkdtemp(prefix="accel_gpt_verify_"))
    write_file(folder / "config.yaml", [to_yaml(config).encode()])
    trial = Trial(options, folder)
    try:
        trial.run()
        return trial.report()
    finally:
        if trial.failed or trial.differences:
            write_err(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------- launches


class LaunchFailed(AccelGPTError):
    """A launch failed before its run was complete."""

    exit_code = 1


class Trial:
    """The launches of one command in a folder, and the differences that they found."""

    def __init__(self, options: VerifyResumeCommand, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.undisturbed = folder / "undisturbed"
        self.runs = 0
        self.launches = 0
        self.kills = 0
        self.failed = False  # a launch failed
        self.compared = 0  # values
        self.differences: list[str] = []
        self.run_seconds = math.inf  # of the undisturbed run
        self.resumed: set[int] = set()  # steps at which a launch went on

    def run(self) -> None:
        """Train once undisturbed, then with kills until all have happened or a run differs."""
        start = time.monotonic()
        self.launch(self.undisturbed, kill=False)
        self.run_seconds = time.monotonic() - start
        whole = run_values(self.undisturbed)
        while not self.differences and (self.runs == 0 or self.kills < self.options.kills):
            self.runs += 1
            folder = self.folder / f"disturbed_{self.runs}"
            done = False
            while not done:
                done = self.launch(folder, kill=self.kills < self.options.kills)
                began = RunFolder(folder).last_launch("step") or 0
                if 0 < began < self.options.steps:
                    self.resumed.add(began)
            values = run_values(folder)
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
        output = self.folder / f"launch_{self.launches}.log"
        processes = plural(world_size, "process", "processes")
        name = f"launch {self.launches}, {folder.name} on {processes}"
        # the undisturbed run has resolved each `auto`
        resolved = self.undisturbed / "config.yaml"
        config = resolved if resolved.exists() else self.folder / "config.yaml"
        command = ["train", str(config), "--out_dir", str(folder)]
        own_code = self.options.loaded.own.file
        if own_code:
            command += ["--code", own_code]
        with output.open("wb") as file:
            process = launch_child(
                command, processes=world_size, stdout=file, stderr=file, own_group=True
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
        if late and process.returncode == -signal.SIGKILL:
            self.kills += 1
            write_err(f"{name}: killed at step {RunFolder(folder).step} ({self.kills} so far)")
            return False
        if process.returncode:
            self.failed = True
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-LAST_LINES:])
            raise LaunchFailed(f"{name} failed with exit code {process.returncode}:\n{shown}")
        write_err(f"{name}: done")
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

    def report(self) -> int:
        """Print a summary, the first differences, and the result; return the exit code.

        If launches were killed, one must have resumed between the first and the last step.
        """
        resumed = ", ".join(f"{step:,}" for step in sorted(self.resumed)) or "none"
        code = 1
        if self.differences:
            result = "stop and resume is NOT the same as never stopping"
        elif self.options.kills and not self.resumed:
            result = "no launch resumed between the first and the last step; raise --steps"
        else:
            result = "stop and resume equals never stopping, bit for bit"
            code = 0
        lines = [
            f"{plural(self.runs, 'run')} of {plural(self.options.steps, 'step')} with "
            f"{plural(self.kills, 'kill')}, compared with an undisturbed run",
            f"steps at which launches resumed: {resumed}",
            f"metrics and tensors: {self.compared:,} compared, {len(self.differences):,} different",
            *self.differences[:SHOWN],
            result,
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return code


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants, and wait until they end: they hold the folder's lock."""
    top = psutil.Process(process.pid)
    top.suspend()  # so that it starts no more processes, and its children stay its own
    alive = True
    while alive:
        alive = False
        for child in top.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive = True
                    child.kill()
    process.kill()
    process.wait()


# --------------------------------------------------------------------------- comparing


def run_values(folder: Path) -> dict[str, str]:
    """Describe the metrics, weights and optimizer state of a run by name; no speeds and times.

    Raises `UserError` if the run lacks its last checkpoint.
    """
    found: dict[str, Any] = {}
    for number, record in enumerate(RunFolder(folder).records(), start=1):
        step = record.pop("step")
        found[f"step of record {number}"] = step
        for key, value in record.items():
            if key != "time" and not key.startswith(("perf/", "launch/")):
                found[f"{key} at step {step}"] = value
    checkpoint = find_checkpoint(folder, "last")
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True, map_location="cpu")
    found |= load_file(checkpoint / SAFE_WEIGHTS) | flatten_state(optimizer)
    if (checkpoint / EVALUATED).exists():
        evaluated = load_file(checkpoint / EVALUATED)
        found |= {f"{name}, evaluated": value for name, value in evaluated.items()}
    return {name: describe_value(value) for name, value in found.items()}


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


def describe_value(value: Any) -> str:
    """Return a text that another value has only if all bits are equal; 0.0 differs from -0.0."""
    if not torch.is_tensor(value):
        return repr(value)
    total = value.double().sum().item()
    digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{list(value.shape)} {value.dtype} with sum {total!r}, SHA-256 {digest}"


def differing_values(whole: dict[str, str], other: dict[str, str]) -> list[str]:
    """Describe each value that differs between two runs, or that one run lacks."""
    found = []
    for name in dict.fromkeys([*whole, *other]):
        undisturbed = whole.get(name, "missing")
        here = other.get(name, "missing")
        if undisturbed != here:
            found.append(f"{name}: {undisturbed} undisturbed, {here} here")
    return found
