"""`accel-gpt verify-resume CONFIG`: kill and resume runs, compare them with an undisturbed run.

Trains a few steps in real processes, once undisturbed. Then trains again with SIGKILL at random
moments; each launch uses one of the requested numbers of processes. Compares the metrics and the
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from accel_gpt.children import launch_child
from accel_gpt.commands.options import VerifyResumeCommand
from accel_gpt.config.plan import make_plan, plural, shared_micro_batch, shorten, with_size
from accel_gpt.config.values import to_yaml
from accel_gpt.console import install_exit_handlers, table, write_err
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import write_file
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.runs.checkpoint import find_checkpoint
from accel_gpt.runs.folder import RunFolder

POLL_SECONDS = 0.005  # between two looks at the step of a launch
LAST_LINES = 30  # shown of a launch that failed; torchrun adds about 20 to the trainer's
TOLERANCE = 1e-3  # relative, of losses on several numbers of processes; assumption
METRICS = (  # name, prefix of the keys
    ("losses", "train/loss"),
    ("gradient norms", "train/grad_norm"),
    ("learning rates", "train/lr"),
    ("tokens", "tokens"),
    ("batch hashes", "data/batch_hash"),
    ("evaluations", "eval/"),
)
OTHER = "other metrics"  # counts, epochs and the metrics of --code; not speed or memory
KINDS = ("steps", *dict(METRICS), OTHER, "weights", "optimizer state")
# values that may differ with the number of processes; JUDGED must lie within the tolerance
ROUNDED = ("losses", "gradient norms", "evaluations", OTHER, "weights", "optimizer state")
JUDGED = ("losses", "evaluations")


def run(options: VerifyResumeCommand) -> int:
    """Kill and resume runs of a config; return 1 if they differ from an undisturbed run.

    Raises `UserError` if the config does not fit the numbers of processes, `LaunchFailed` if a
    launch fails.
    """
    install_exit_handlers()
    config = shorten(options.loaded, options.steps)
    for world_size in options.processes:
        # one size for all numbers of processes: the bits of a reproducible run depend on it
        size = shared_micro_batch(config, world_size)
        if size != config.train.micro_batch_sequences:
            config = with_size(config, size)
            sequences = plural(size, "sequence")
            write_err(f"train.micro_batch_size lowered to {sequences}, for {world_size} processes")
        make_plan(config, world_size)
    one_size = len(set(options.processes)) == 1
    ensure_data(config)
    folder = Path(tempfile.mkdtemp(prefix="accel_gpt_verify_"))
    write_file(folder / "config.yaml", [to_yaml(config).encode()])
    trial = Trial(options, folder, one_size or config.train.reproducible)
    if config.own.file:  # the launches use this copy, so you may change the file meanwhile
        trial.code = folder / config.own.name
        write_file(trial.code, [config.own.source])
    try:
        trial.run()
        sys.stdout.write(trial.report())
    finally:
        if trial.failed or not trial.equal:
            write_err(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if trial.equal and trial.proven else 1


# --------------------------------------------------------------------------- launches


class LaunchFailed(AccelGPTError):
    """A launch failed before its run was complete."""

    exit_code = 1


class Trial:
    """The launches of one command in a folder, and the findings.

    `exact`: runs must be equal bit for bit; if not, see `Finding`.
    """

    def __init__(self, options: VerifyResumeCommand, folder: Path, exact: bool) -> None:
        self.options = options
        self.folder = folder
        self.code: Path | None = None  # the file of --code
        self.exact = exact
        self.random = random.Random(options.seed)
        self.findings = [Finding(kind, exact or kind not in ROUNDED) for kind in KINDS]
        self.runs = 0
        self.kills = 0
        self.failed = False  # a launch failed
        self.resumed: set[int] = set()  # steps at which a launch went on
        self.world_sizes: list[int] = []  # of each launch
        self.seconds: list[float] = []  # of each launch

    @property
    def equal(self) -> bool:
        """Whether all runs so far are as equal as required."""
        return all(finding.equal for finding in self.findings)

    @property
    def proven(self) -> bool:
        """Whether a launch resumed between the first and the last step, if launches were killed."""
        return bool(self.resumed) or not self.options.kills

    def run(self) -> None:
        """Train once undisturbed, then with kills until all have happened or a run differs."""
        whole = self.folder / "undisturbed"
        self.launch(whole, self.options.processes[0], kill_after=None)
        run_seconds = self.seconds[0]  # of the fastest run that took one launch
        while self.equal and (self.runs == 0 or self.kills < self.options.kills):
            self.runs += 1
            folder = self.folder / f"disturbed_{self.runs}"
            launches = self.train_with_kills(folder, run_seconds)
            if launches == 1:
                run_seconds = min(run_seconds, self.seconds[-1])
            self.compare(whole, folder)
            if self.equal:
                shutil.rmtree(folder)

    def train_with_kills(self, folder: Path, run_seconds: float) -> int:
        """Launch a run and kill it at random moments, until it is done; return the launches.

        Every second moment, the first one included, is a random step; the others are random times,
        so that some are in the start-up.
        """
        launches = 0
        done = False
        while not done:
            kill_after = None
            at_step = None
            step = RunFolder(folder).step
            if self.kills < self.options.kills:
                kill_after = self.random.uniform(0, run_seconds)
                if self.kills % 2 == 0 and step + 1 < self.options.steps:
                    at_step = self.random.randrange(step + 1, self.options.steps)
            world_size = self.random.choice(self.options.processes)
            done = self.launch(folder, world_size, kill_after, at_step)
            launches += 1
            began = RunFolder(folder).last_launch("step")
            if began is not None and 0 < began < self.options.steps:
                self.resumed.add(began)
        return launches

    def compare(self, whole: Path, folder: Path) -> None:
        """Compare a run with the undisturbed one, and print the result."""
        undisturbed = run_values(whole, self.options.steps)
        disturbed = run_values(folder, self.options.steps)
        for finding in self.findings:
            finding.compare(undisturbed[finding.kind], disturbed[finding.kind])
        differing = [finding.kind for finding in self.findings if not finding.equal]
        verdict = f"DIFFERS in {', '.join(differing)}" if differing else "agrees"
        write_err(f"{folder.name} {verdict}")

    def launch(
        self, folder: Path, world_size: int, kill_after: float | None, at_step: int | None = None
    ) -> bool:
        """Launch a run, and kill it; return whether it was done before.

        Kills it when it has logged `at_step` and saved a checkpoint, or if that is None after
        `kill_after` seconds. Raises `LaunchFailed` with the last lines of its output if it fails.
        """
        self.world_sizes.append(world_size)
        number = len(self.world_sizes)
        output = self.folder / f"launch_{number}.log"
        name = f"launch {number}, {folder.name} on {plural(world_size, 'process', 'processes')}"
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
            if at_step is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(kill_after)
            else:
                run = RunFolder(folder)
                while process.poll() is None and (run.step < at_step or not run.checkpoints):
                    time.sleep(POLL_SECONDS)
        finally:
            late = process.poll() is None
            if late:
                kill_tree(process)
        seconds = time.monotonic() - start
        self.seconds.append(seconds)
        if late and process.returncode == -signal.SIGKILL:
            self.kills += 1
            logged = plural(len(list(RunFolder(folder).records())), "step")
            write_err(
                f"{name}: killed after {seconds:.1f} s, {logged} logged ({self.kills} so far)"
            )
            return False
        if process.returncode:
            self.failed = True
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-LAST_LINES:])
            raise LaunchFailed(f"{name} failed with exit code {process.returncode}:\n{shown}")
        write_err(f"{name}: done after {seconds:.1f} s")
        return True

    def command(self, folder: Path) -> list[str]:
        """Return the arguments of `accel-gpt` that train in `folder`."""
        arguments = ["train", str(self.folder / "config.yaml"), "--out_dir", str(folder)]
        if self.code is not None:
            arguments += ["--code", str(self.code)]
        resolved = RunFolder(self.folder / "undisturbed").config
        if resolved:  # the values that auto resolved to there
            for key in ("train.mixed_precision", "train.compile"):
                arguments += [f"--{key}", str(resolved[key])]
        return arguments

    def report(self) -> str:
        """Return a summary, a table of the findings, and the first difference of each kind."""
        if not self.equal:
            result = "stop and resume is NOT the same as never stopping"
        elif not self.proven:
            result = "no launch resumed between the first and the last step; raise --steps"
        elif self.exact:
            result = "stop and resume equals never stopping, bit for bit"
        else:
            result = (
                f"within {TOLERANCE:g}; set train.reproducible to true for equality bit for bit"
            )
        sizes = ", ".join(str(size) for size in sorted(set(self.world_sizes)))
        processes = "process" if sizes == "1" else "processes"
        text = (
            f"{plural(self.runs, 'run')} of {plural(self.options.steps, 'step')} with "
            f"{plural(self.kills, 'kill')}, compared with an undisturbed run; "
            f"{len(self.world_sizes)} launches on {sizes} {processes}, "
            f"{sum(self.seconds):.0f} s\n"
        )
        steps = ", ".join(f"{step:,}" for step in sorted(self.resumed))
        text += f"launches resumed from step {steps}\n\n" if steps else "no launch resumed\n\n"
        header = ("", "compared", "different", "largest difference", "")
        rows = [header, *(finding.row() for finding in self.findings)]
        text += table(rows, "<", ">", ">", ">", "<")
        for finding in self.findings:
            if finding.first:
                text += f"first difference in {finding.kind}: {finding.first}\n"
        return f"{text}{result}\n"


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants, and wait until they end: they hold the folder's lock.

    Suspends them first, so that they start no more processes.
    """
    top = psutil.Process(process.pid)
    tree: list[psutil.Process] = []
    while True:
        fresh = [one for one in (top, *top.children(recursive=True)) if one not in tree]
        if not fresh:
            break
        for one in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        tree += fresh
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            while one.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
    process.wait()


# --------------------------------------------------------------------------- comparing


def run_values(folder: Path, steps: int) -> dict[str, dict[Any, Any]]:
    """Return the values of a run for each of `KINDS`, by name or by (step, key).

    Raises `UserError` if the run lacks its last checkpoint.
    """
    records = list(RunFolder(folder).records())
    checkpoint = find_checkpoint(folder, str(steps))
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in KINDS}
    for number, record in enumerate(records, start=1):
        found["steps"][number, "step"] = record["step"]
        for key, value in record.items():
            if key not in ("step", "time") and not key.startswith("perf/"):
                found[metric_kind(key)][record["step"], key] = value
    found["weights"] = load_file(checkpoint / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True, map_location="cpu")
    found["optimizer state"] = flatten_state(optimizer)
    return found


def metric_kind(key: str) -> str:
    """Return the kind of values that a key of metrics.jsonl belongs to."""
    return next((kind for kind, prefix in METRICS if key.startswith(prefix)), OTHER)


def flatten_state(value: Any, name: str = "") -> dict[str, Any]:
    """Map the dotted name of each leaf of nested mappings and lists to its value.

    An empty mapping or list is a leaf.
    """
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, part in value.items():
        found |= flatten_state(part, f"{name}.{key}" if name else str(key))
    return found


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor as it is and a number as a tensor; for other values, an empty tensor."""
    if torch.is_tensor(value):
        return value.contiguous()
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.double)
    return torch.tensor([], dtype=torch.double)


@dataclass
class Finding:
    """The comparison of one kind of values over all runs; `exact`: they must be equal bit for bit.

    If not `exact`, losses and evaluations must lie within `TOLERANCE`. Gradient norms, weights and
    the optimizer state are only measured.
    """

    kind: str
    exact: bool
    compared: int = 0  # values
    different: int = 0
    largest: float = 0.0  # absolute difference; nan if a side has no number
    first: str | None = None  # the first difference: its location and both values
    equal: bool = True  # as equal as required

    def compare(self, whole: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
        """Add the values of two runs, see `run_values`.

        A value differs if one run lacks it, or if the shapes differ.
        """
        for name in sorted(whole.keys() | other.keys()):
            self.compare_value(
                location=f"step {name[0]}, {name[1]}" if isinstance(name, tuple) else name,
                one=whole.get(name, "nothing"),
                two=other.get(name, "nothing"),
            )

    def compare_value(self, location: str, one: Any, two: Any) -> None:
        """Add a value of each of two runs."""
        first = as_tensor(one)
        second = as_tensor(two)
        size = max(first.numel(), second.numel())
        self.compared += size
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            self.equal = False
            self.different += max(size, 1)
            self.largest = math.nan
            self.note_first(location, describe_value(one), describe_value(two))
            return
        unequal = (bytes_of(first) != bytes_of(second)).any(dim=1)
        if not unequal.any():
            return
        if self.exact or not self.is_near(first, second):
            self.equal = False
        self.different += int(unequal.sum())
        difference = float((first.double() - second.double()).abs().max())
        if math.isnan(difference) or difference > self.largest:  # a nan stays
            self.largest = difference
        index = torch.unravel_index(unequal.nonzero()[0, 0], first.shape)
        if index:
            location += str([int(i) for i in index])
            one = repr(first[index].item())
            two = repr(second[index].item())
        self.note_first(location, f"{one}", f"{two}")

    def is_near(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Return whether all values lie within the tolerance; True unless the kind is judged."""
        if self.kind not in JUDGED:
            return True
        difference = (one.double() - two.double()).abs()
        limit = TOLERANCE * one.double().abs().maximum(two.double().abs())
        return bool((difference <= limit).all())

    def note_first(self, location: str, one: str, two: str) -> None:
        """Keep the first difference."""
        if self.first is None:
            self.first = f"{location}: {one} undisturbed, {two} here"

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table: kind, compared, different, largest difference, verdict."""
        different = "none"
        difference = ""
        verdict = "equal" if self.compared else "no values"
        if self.different:
            different = f"{self.different:,}"
            difference = "no number" if math.isnan(self.largest) else f"{self.largest:.3g}"
            verdict = f"within {TOLERANCE:g}" if self.kind in JUDGED else "measured"
        if not self.equal:
            verdict = "DIFFERENT"
        return self.kind, f"{self.compared:,}", different, difference, verdict


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element (N, bytes), which tell zero from negative zero."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def describe_value(value: Any) -> str:
    """Return the shape and type of a tensor, or the value itself."""
    if torch.is_tensor(value):
        return f"{list(value.shape)} {value.dtype}"
    return str(value)
