"""`accel-gpt verify-resume CONFIG`: kill and resume runs; are they equal to one never stopped?

Trains for a few steps in real processes, once undisturbed, then again and again with SIGKILL at
random moments, each launch on one of the requested numbers of processes, and compares metrics and
last checkpoints. Writes to a temporary folder: `config.yaml` (what is launched), `undisturbed/`,
`disturbed_1/`, ... and the output of each launch, `launch_1.log`, ...
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

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from accel_gpt.commands.options import VerifyResumeCommand
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import make_plan, plural, shorten
from accel_gpt.console import exit_on_sigterm, table, write_err
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import write_file
from accel_gpt.launcher import launch_child
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.training.checkpoint import find_checkpoint
from accel_gpt.training.run_folder import RunFolder

LAST_LINES = 30  # of a launch that failed; torchrun adds some 20 to the trainer's
TOLERANCE = 1e-3  # relative, of losses on several numbers of processes; assumption
METRICS = (  # name, prefix of the keys
    ("losses", "train/loss"),
    ("gradient norms", "train/grad_norm"),
    ("learning rates", "train/lr"),
    ("tokens", "tokens"),
    ("batch hashes", "data/batch_hash"),
    ("evaluations", "eval/"),
)
# what may differ with the number of processes, and what of it must lie within the tolerance
ROUNDED = ("losses", "gradient norms", "evaluations", "weights", "optimizer state")
JUDGED = ("losses", "evaluations")


def run(options: VerifyResumeCommand) -> int:
    """Kill and resume runs of a config; 1 where they differ from one that was never stopped.

    Raises `UserError` if the config does not fit the numbers of processes, `LaunchFailed` if a
    launch ends by itself.
    """
    exit_on_sigterm()
    config = shorten(options.loaded, options.steps)
    for world_size in options.processes:
        make_plan(config, world_size)
    one_size = len(set(options.processes)) == 1
    ensure_data(config)
    folder = Path(tempfile.mkdtemp(prefix="accel_gpt_verify_"))
    write_file(folder / "config.yaml", [to_yaml(config).encode()])
    trial = Trial(options, folder, one_size or config.train.reproducible)
    keep = True
    try:
        trial.run()
        keep = options.keep or not trial.equal
        sys.stdout.write(trial.report())
    except (KeyboardInterrupt, SystemExit):
        keep = options.keep
        raise
    finally:
        if keep:
            write_err(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if trial.equal else 1


# --------------------------------------------------------------------------- launches


class LaunchFailed(AccelGPTError):
    """A launch that ended by itself before its run was done."""

    exit_code = 1


class Trial:
    """The launches of one call, in a folder, and their findings.

    `exact`: runs must be equal bit for bit. Else losses within `TOLERANCE`, while gradient norms,
    weights and the optimizer's state are measured and not judged; all the rest must be equal.
    """

    def __init__(self, options: VerifyResumeCommand, folder: Path, exact: bool) -> None:
        self.options, self.folder, self.exact = options, folder, exact
        self.random = random.Random(options.seed)
        self.findings = [
            Finding(what, exact or what not in ROUNDED)
            for what in ("steps", *dict(METRICS), "weights", "optimizer state")
        ]
        self.runs = self.kills = 0
        self.world_sizes: list[int] = []  # of each launch
        self.seconds: list[float] = []  # of each launch

    @property
    def equal(self) -> bool:
        """Whether all runs so far are as equal as required."""
        return all(finding.equal for finding in self.findings)

    def run(self) -> None:
        """Train once undisturbed, then with kills until all requested ones have happened, or a run
        differs.
        """
        whole, steps = self.folder / "undisturbed", self.options.steps
        self.launch(whole, self.options.processes[0], None)
        run_seconds = self.seconds[0]  # of the fastest run in one launch
        while self.equal and (not self.runs or self.kills < self.options.kills):
            self.runs += 1
            folder, before, done = self.folder / f"disturbed_{self.runs}", len(self.seconds), False
            while not done:
                kill = self.kills < self.options.kills
                after = self.random.uniform(0, run_seconds) if kill else None
                done = self.launch(folder, self.random.choice(self.options.processes), after)
            if len(self.seconds) == before + 1:
                run_seconds = min(run_seconds, self.seconds[-1])
            for finding, one, two in zip(
                self.findings, run_values(whole, steps), run_values(folder, steps), strict=True
            ):
                finding.compare(one, two)
            differing = [finding.what for finding in self.findings if not finding.equal]
            write_err(
                f"{folder.name} {'DIFFERS in ' + ', '.join(differing) if differing else 'agrees'}"
            )
            if not (differing or self.options.keep):
                shutil.rmtree(folder)

    def launch(self, folder: Path, world_size: int, kill_after: float | None) -> bool:
        """Launch a run, killed after so many seconds; returns whether it was done before.

        Raises `LaunchFailed`, with its last lines, if it ends with an error.
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(kill_after)
        finally:
            late = process.poll() is None
            if late:
                kill_tree(process)
        seconds = time.monotonic() - start
        self.seconds.append(seconds)
        if late and process.returncode == -signal.SIGKILL:
            self.kills += 1
            logged = plural(sum(1 for _ in RunFolder(folder).records()), "step")
            write_err(
                f"{name}: killed after {seconds:.1f} s, {logged} logged ({self.kills} so far)"
            )
            return False
        if process.returncode:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            raise LaunchFailed(
                f"{name} ended by itself with code {process.returncode}:\n" + "\n".join(lines)
            )
        write_err(f"{name}: done after {seconds:.1f} s")
        return True

    def command(self, folder: Path) -> list[str]:
        """Return the arguments of `accel-gpt` that train in `folder`."""
        words = ["train", str(self.folder / "config.yaml"), "--out_dir", str(folder)]
        resolved = RunFolder(self.folder / "undisturbed").config  # what auto meant there
        for key in ("train.mixed_precision", "train.compile") if resolved else ():
            words += [f"--{key}", str(resolved[key])]
        return words

    def report(self) -> str:
        """What was done, a table of the findings, and the first difference of each kind."""
        sizes = ", ".join(map(str, sorted(set(self.world_sizes))))
        result = f"within {TOLERANCE:g}; set train.reproducible true for bit-equality"
        if not self.equal:
            result = "stop and resume is NOT the same as never stopping"
        elif self.exact:
            result = "stop and resume equals never stopping, bit for bit"
        header = ("", "compared", "different", "largest difference", "")
        rows = [header, *(finding.row() for finding in self.findings)]
        return (
            f"{plural(self.runs, 'run')} of {self.options.steps} steps with "
            f"{plural(self.kills, 'kill')}, compared with one never stopped; "
            f"{len(self.world_sizes)} launches on {sizes} "
            f"{'process' if sizes == '1' else 'processes'}, {sum(self.seconds):.0f} s\n\n"
            + table(rows, "<", ">", ">", ">", "<")
            + "".join(
                f"first difference in {finding.what}: {finding.first}\n"
                for finding in self.findings
                if finding.first
            )
            + f"{result}\n"
        )


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL a process and all below it, stopped first so that they start no more; wait for their
    end, or the next launch finds the folder locked.
    """
    top, tree = psutil.Process(process.pid), []
    while fresh := [one for one in (top, *top.children(recursive=True)) if one not in tree]:
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


# --------------------------------------------------------------------------- the comparison


def run_values(folder: Path, steps: int) -> list[dict[Any, Any]]:
    """What is compared of a run, a dictionary for each `Finding`: tensors and plain values by their
    name, or (step, key). Raises `UserError` if it lacks its last checkpoint.
    """

    def flat(value: Any, name: str) -> dict[str, Any]:
        parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        inner = parts.items() if isinstance(parts, dict) else ()
        found = {n: v for key, part in inner for n, v in flat(part, f"{name}.{key}").items()}
        return found or {name.removeprefix("."): value}

    records = list(RunFolder(folder).records())
    checkpoint = find_checkpoint(folder, str(steps))
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True, map_location="cpu")
    return [
        {(number, "step"): record["step"] for number, record in enumerate(records, start=1)},
        *(
            {(r["step"], key): r[key] for r in records for key in r if key.startswith(prefix)}
            for _, prefix in METRICS
        ),
        load_file(checkpoint / "model.safetensors"),
        flat(optimizer, ""),
    ]


@dataclass
class Finding:
    """How one kind of values compares, over all runs; `exact`: they must be equal bit for bit."""

    what: str
    exact: bool
    compared: int = 0  # values
    different: int = 0
    largest: float = 0.0  # absolute difference; nan where one side has no number
    first: str | None = None  # the first difference, with its place and both values
    equal: bool = True  # as equal as required

    def compare(self, whole: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
        """Add the values of two runs by their names, see `run_values`. One that is missing on one
        side, or of another shape, differs.
        """

        def as_tensor(value: Any) -> torch.Tensor:
            if torch.is_tensor(value):
                return value.contiguous()
            return torch.tensor(value if isinstance(value, int | float) else [], dtype=torch.double)

        for name in sorted(whole.keys() | other.keys()):
            place = f"step {name[0]}, {name[1]}" if isinstance(name, tuple) else name
            shown = [side.get(name, "nothing") for side in (whole, other)]
            one, two = map(as_tensor, shown)
            size = max(one.numel(), two.numel())
            self.compared += size
            if (one.shape, one.dtype) == (two.shape, two.dtype):
                bits = [tensor.reshape(-1, 1).view(torch.uint8) for tensor in (one, two)]
                unequal = (bits[0] != bits[1]).any(dim=1)
                if not unequal.any():
                    continue
                apart = (one.double() - two.double()).abs()
                limit = TOLERANCE * one.double().abs().maximum(two.double().abs())
                near = self.what not in JUDGED or bool((apart <= limit).all())
                self.equal &= near and not self.exact
                self.different += int(unequal.sum())
                self.largest = float(np.maximum(self.largest, float(apart.max())))  # nan stays
                index = torch.unravel_index(unequal.nonzero()[0, 0], one.shape)
                if index:
                    place += str([int(i) for i in index])
                    shown = [repr(tensor[index].item()) for tensor in (one, two)]
            else:
                self.equal, self.largest = False, math.nan
                self.different += max(size, 1)
                shown = [f"{list(v.shape)} {v.dtype}" if torch.is_tensor(v) else v for v in shown]
            self.first = self.first or f"{place}: {shown[0]} when never stopped, {shown[1]} here"

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        different, apart, verdict = "none", "", "equal" if self.compared else "none there"
        if self.different:
            different = f"{self.different:,}"
            apart = "no number" if math.isnan(self.largest) else f"{self.largest:.3g}"
            verdict = f"within {TOLERANCE:g}" if self.what in JUDGED else "measured"
        if not self.equal:
            verdict = "DIFFERENT"
        return self.what, f"{self.compared:,}", different, apart, verdict
