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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import tyro

from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config, LogConfig
from accel_gpt.config.parse import load_config, parse_command, split_options, to_yaml
from accel_gpt.config.plan import in_steps, make_plan, plural
from accel_gpt.console import exit_on_sigterm, write_err
from accel_gpt.errors import AccelGPTError, not_negative, require
from accel_gpt.files import write_file
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.tables import table
from accel_gpt.training.run_folder import RunFolder

DIFFERENT = 1  # exit code
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


@dataclass(frozen=True)
class VerifyResumeCommand:
    """Prove that a config's runs, killed and launched again, equal one that was never stopped.

    Any --section.key of the config may be set as well, but the length of the run and where it
    writes. Exit code 1 when something differs.
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    steps: int = 20
    """Steps of each run."""
    kills: int = 5
    """Launches that end with SIGKILL to all their processes at a random moment; 0: one run more,
    not stopped, tells whether the machine repeats itself."""
    processes: tuple[int, ...] = (1,)
    """Numbers of processes, separated by commas, of which each launch has one at random; the run
    that is never stopped has the first."""
    seed: int = 0
    """Of the moments and of the numbers of processes; that of the run stays the config's."""
    keep: bool = False
    """Keep the temporary folder of the runs also when all is equal."""

    def __post_init__(self) -> None:
        require(self.steps >= 2, f"steps is {self.steps}; it must be 2 or more, to stop between")
        not_negative("verify-resume", self, "kills")
        require(
            bool(self.processes) and min(self.processes) > 0,
            f"processes is {','.join(map(str, self.processes))}; expected numbers above 0",
        )


def main(argv: Sequence[str]) -> int:
    """Kill and resume runs of a config; 1 where they differ from one that was never stopped."""
    from accel_gpt.hub.pretrained import inherit

    own, rest = split_options(VerifyResumeCommand, argv)
    options = parse_command(VerifyResumeCommand, own, "accel-gpt verify-resume")
    config = load_config([options.config, *rest], "accel-gpt verify-resume", inherit)
    exit_on_sigterm()
    return verify_resume(options, config)


def verify_resume(options: VerifyResumeCommand, config: Config) -> int:
    """Train, kill, compare and report; 0 if all is equal, else 1.

    Raises `UserError` if the config does not fit the numbers of processes, `LaunchFailed` if a
    launch ends by itself.
    """
    from accel_gpt.training.setup import ensure_data

    config = shortened(config, options.steps)
    for world_size in options.processes:
        make_plan(config, world_size)
    one_size = len(set(options.processes)) == 1
    require(
        one_size or not isinstance(config.data.train, TextStream),
        f"processes is {','.join(map(str, options.processes))}, but streamed text goes on on the "
        "same number only; give one number",
    )
    ensure_data(config.data)
    trial = Trial(options, Path(tempfile.mkdtemp(prefix="accel_gpt_verify_")), one_size)
    trial.exact |= config.train.reproducible
    write_file(trial.folder / "config.yaml", [to_yaml(config).encode()])
    keep, equal = options.keep, False
    try:
        findings = trial.run()
        equal = all(finding.equal for finding in findings)
        keep |= not equal
        sys.stdout.write(trial.report(findings))
    except Exception:  # but not Ctrl-C
        keep = True
        raise
    finally:
        if keep:
            write_err(f"kept: {trial.folder}")
        else:
            shutil.rmtree(trial.folder, ignore_errors=True)
    return 0 if equal else DIFFERENT


def shortened(config: Config, steps: int) -> Config:
    """`config` as a run of `steps` steps that logs each, saves often and uploads nothing."""
    schedule, tokens = config.schedule, config.train.tokens_per_step
    warmup = in_steps(schedule.warmup_tokens, tokens) or schedule.warmup_steps
    decay = in_steps(schedule.decay_tokens, tokens) or schedule.decay_steps or 0
    if warmup >= steps and schedule.name != "constant":
        warmup = steps - 1
        schedule = replace(schedule, warmup_steps=warmup, warmup_tokens=None)
    if schedule.name == "wsd" and decay > steps - warmup:
        schedule = replace(schedule, decay_steps=steps - warmup, decay_tokens=None)
    checkpoint = replace(config.checkpoint, every=max(1, steps // 10), every_tokens=None)
    return replace(
        config,
        schedule=schedule,
        train=replace(config.train, max_steps=steps, max_tokens=None),
        sample=replace(config.sample, every=0),
        log=LogConfig(every=1, trackers=(), batch_hash=True),
        hub=replace(config.hub, push="never"),
        checkpoint=replace(checkpoint, keep_last=2, resume="auto"),
    )


# --------------------------------------------------------------------------- launches


class LaunchFailed(AccelGPTError):
    """A launch that ended by itself before its run was done."""

    exit_code = 1


class Trial:
    """The launches of one call, in a folder. `exact`: runs must be equal bit for bit."""

    def __init__(self, options: VerifyResumeCommand, folder: Path, exact: bool) -> None:
        self.options, self.folder, self.exact = options, folder, exact
        self.random = random.Random(options.seed)
        self.runs = self.kills = 0
        self.world_sizes: list[int] = []  # of each launch
        self.seconds = 0.0  # of all launches
        self.run_seconds = 0.0  # of the fastest run in one launch

    def run(self) -> list["Finding"]:
        """Train once undisturbed, then with kills until all requested ones have happened.

        Returns the comparison with the undisturbed run, over all runs.
        """
        undisturbed, found = self.folder / "undisturbed", []
        self.launch(undisturbed, self.options.processes[0], None)
        self.run_seconds = self.seconds
        while not self.runs or self.kills < self.options.kills:
            self.runs += 1
            folder, launches, done = self.folder / f"disturbed_{self.runs}", 0, False
            while not done:
                kill = self.kills < self.options.kills
                after = self.random.uniform(0, self.run_seconds) if kill else None
                start, launches = self.seconds, launches + 1
                done = self.launch(folder, self.random.choice(self.options.processes), after)
            if launches == 1:
                self.run_seconds = min(self.run_seconds, self.seconds - start)
            found.append(compare_runs(undisturbed, folder, self.options.steps, self.exact))
            differing = [finding.what for finding in found[-1] if not finding.equal]
            write_err(
                f"{folder.name} {'DIFFERS in ' + ', '.join(differing) if differing else 'agrees'}"
            )
            if not (differing or self.options.keep):
                shutil.rmtree(folder)
        return [reduce(Finding.joined, of_one) for of_one in zip(*found, strict=True)]

    def launch(self, folder: Path, world_size: int, kill_after: float | None) -> bool:
        """Launch a run, killed after so many seconds; returns whether it was done before.

        Raises `LaunchFailed`, with its last lines, if it ends with an error.
        """
        self.world_sizes.append(world_size)
        number = len(self.world_sizes)
        output = self.folder / f"launch_{number}.log"
        name = f"launch {number}, {folder.name} on {plural(world_size, 'process', 'processes')}"
        start = time.monotonic()
        with output.open("wb") as file, running(self.command(folder, world_size), file) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(kill_after)
            late = process.poll() is None
        seconds = time.monotonic() - start
        self.seconds += seconds
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

    def command(self, folder: Path, world_size: int) -> list[str]:
        """The command line of a launch: the trainer alone, or as many as torchrun starts."""
        words = [sys.executable, "-m"]
        if world_size > 1:
            words += ["torch.distributed.run", "--standalone"]
            words += ["--nproc_per_node", str(world_size), "-m"]
        words += ["accel_gpt.train", str(self.folder / "config.yaml"), "--out_dir", str(folder)]
        resolved = RunFolder(self.folder / "undisturbed").config  # what auto meant there
        for key in ("train.mixed_precision", "train.compile") if resolved else ():
            words += [f"--{key}", str(resolved[key])]
        return words

    def report(self, findings: Sequence["Finding"]) -> str:
        """What was done, a table of the findings, and the first difference of each kind."""
        sizes = ", ".join(map(str, sorted(set(self.world_sizes))))
        if not all(finding.equal for finding in findings):
            result = "stop and resume is NOT the same as never stopping"
        elif self.exact:
            result = "stop and resume equals never stopping, bit for bit"
        else:
            result = f"within {TOLERANCE:g}; set train.reproducible true for bit-equality"
        lines = [
            f"{plural(self.runs, 'run')} of {self.options.steps} steps with "
            f"{plural(self.kills, 'kill')}, compared with one never stopped; "
            f"{len(self.world_sizes)} launches on {sizes} "
            f"{'process' if sizes == '1' else 'processes'}, {self.seconds:.0f} s",
            "",
            findings_table(findings),
            *(
                f"first difference in {finding.what}: {finding.first}"
                for finding in findings
                if finding.first and not (finding.equal and self.exact)
            ),
            result,
        ]
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def running(command: Sequence[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, which our signals do not reach; at the end it is killed
    with all processes below it.
    """
    process = subprocess.Popen(
        command,
        env=environment_without_launcher(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, stopped first so that they start no more."""

    def tree() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            return [top, *top.children(recursive=True)]
        return []

    def alive(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        return False

    stopped: list[psutil.Process] = []
    while fresh := [process for process in tree() if process not in stopped]:
        for process in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped += fresh
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    while any(map(alive, stopped)):  # or the next launch finds the folder locked
        time.sleep(0.01)


# --------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Finding:
    """How one thing compares: how many values there are, and how many differ by how much."""

    what: str
    compared: int
    different: int
    largest: float  # absolute difference; nan where one side has no number
    first: str | None  # the first difference, with its place and both values
    equal: bool  # as equal as required

    def joined(self, other: "Finding") -> "Finding":
        """Both as one; the first difference is that of the earlier."""
        return replace(
            self,
            compared=self.compared + other.compared,
            different=self.different + other.different,
            largest=float(np.maximum(self.largest, other.largest)),
            first=self.first or other.first,
            equal=self.equal and other.equal,
        )


def compare_runs(whole: Path, other: Path, steps: int, exact: bool) -> list[Finding]:
    """One finding each for the steps, the kinds of metrics, the weights and the optimizer's state.

    `exact`: equal bit for bit. Else losses within `TOLERANCE`, while gradient norms, weights and
    the optimizer's state are measured and not judged; all the rest must be equal still.
    Raises `UserError` if a run lacks its last checkpoint.
    """
    import torch
    from safetensors.torch import load_file

    from accel_gpt.training.checkpoint import find_checkpoint

    def state(checkpoint: Path) -> dict[str, Any]:
        file = checkpoint / "optimizer.bin"
        saved = torch.load(file, weights_only=True, map_location="cpu")
        parts = {"state": saved["state"], "param_groups": dict(enumerate(saved["param_groups"]))}
        return {
            f"{part}.{number}.{key}": value
            for part, entries in parts.items()
            for number, entry in entries.items()
            for key, value in entry.items()
        }

    runs = [list(RunFolder(folder).records()) for folder in (whole, other)]
    numbered = [{(i, "step"): r["step"] for i, r in enumerate(run, start=1)} for run in runs]
    findings = [compare_values("steps", numbered, exact)]
    for what, prefix in METRICS:
        values = [
            {(r["step"], key): r[key] for r in run for key in r if key.startswith(prefix)}
            for run in runs
        ]
        findings.append(compare_values(what, values, exact))
    last = [find_checkpoint(folder, str(steps)) for folder in (whole, other)]
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in last]
    findings.append(compare_values("weights", weights, exact))
    findings.append(compare_values("optimizer state", [state(path) for path in last], exact))
    return findings


def compare_values(what: str, sides: Sequence[Mapping[Any, Any]], exact: bool) -> Finding:
    """Compare tensors and numbers of two sides by their name, or (step, key).

    One that is missing on one side, or of another shape, differs.
    """
    import torch

    def as_tensor(value: Any) -> torch.Tensor:
        if torch.is_tensor(value):
            return value
        numbers = isinstance(value, bool | int | float | list | tuple)
        return torch.tensor(value, dtype=torch.float64) if numbers else torch.empty(0)

    exact |= what not in ROUNDED
    compared = different = 0
    first, largest, equal = None, 0.0, True
    for name in sorted(sides[0].keys() | sides[1].keys()):
        values = [side.get(name, "nothing") for side in sides]
        one, two = map(as_tensor, values)
        size = max(one.numel(), two.numel())
        compared += size
        place = f"step {name[0]}, {name[1]}" if isinstance(name, tuple) else name
        alike = one.shape == two.shape and one.dtype == two.dtype
        if not (alike and all(name in side for side in sides)):
            different, equal, largest = different + max(size, 1), False, math.nan
            values = [f"{list(v.shape)} {v.dtype}" if torch.is_tensor(v) else v for v in values]
        else:
            bits = [t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (one, two) if size]
            unequal = (bits[0] != bits[1]).any(dim=1).reshape(one.shape) if size else one != two
            if not unequal.any():
                continue
            apart = (one.double() - two.double()).abs()
            near = apart <= TOLERANCE * one.double().abs().maximum(two.double().abs())
            equal = equal and not exact and (what not in JUDGED or bool(near.all()))
            different += int(unequal.sum())
            largest = float(np.maximum(largest, float(apart.max())))  # nan stays
            if index := tuple(int(i) for i in unequal.nonzero()[0]):
                place += str(list(index))
            if torch.is_tensor(values[0]):
                values = [repr(t[index].item()) for t in (one, two)]
        first = first or f"{place}: {values[0]} when never stopped, {values[1]} here"
    return Finding(what, compared, different, largest, first, equal)


def findings_table(findings: Sequence[Finding]) -> str:
    """The findings as aligned lines."""
    rows = [("", "compared", "different", "largest difference", "")]
    for finding in findings:
        different, apart = "none", ""
        if finding.different:
            different = f"{finding.different:,}"
            apart = "no number" if math.isnan(finding.largest) else f"{finding.largest:.3g}"
        if not finding.compared:
            verdict = "none there"
        elif not finding.equal:
            verdict = "DIFFERENT"
        elif not finding.different:
            verdict = "equal"
        else:
            verdict = f"within {TOLERANCE:g}" if finding.what in JUDGED else "measured"
        rows.append((finding.what, f"{finding.compared:,}", different, apart, verdict))
    return table(rows, "<", ">", ">", ">", "<")
