"""`accel-gpt verify-resume CONFIG`: kill and resume runs; are they equal to one never stopped?

Trains for a few steps in real processes, once undisturbed, then again and again with SIGKILL at
random moments, each launch on one of the requested numbers of processes, and compares metrics and
last checkpoints. Writes to a temporary folder: `config.yaml` (what is launched), `undisturbed/`,
`disturbed_1/`, ... and the output of each launch, `launch_1.log`, ...
"""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from accel_gpt.commands.compare_runs import KINDS, ROUNDED, TOLERANCE, Finding, run_values
from accel_gpt.commands.options import VerifyResumeCommand
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import make_plan, plural, shorten
from accel_gpt.console import exit_on_sigterm, table, write_err
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import write_file
from accel_gpt.launcher import launch_child
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.training.run_folder import RunFolder

LAST_LINES = 30  # of a launch that failed; torchrun adds some 20 to the trainer's


def run(options: VerifyResumeCommand) -> int:
    """Kill and resume runs of a config; 1 if they differ from one that was never stopped.

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

    `exact`: runs must be equal bit for bit; else see `Finding`.
    """

    def __init__(self, options: VerifyResumeCommand, folder: Path, exact: bool) -> None:
        self.options = options
        self.folder = folder
        self.exact = exact
        self.random = random.Random(options.seed)
        self.findings = [Finding(kind, exact or kind not in ROUNDED) for kind in KINDS]
        self.runs = 0
        self.kills = 0
        self.world_sizes: list[int] = []  # of each launch
        self.seconds: list[float] = []  # of each launch

    @property
    def equal(self) -> bool:
        """Whether all runs so far are as equal as required."""
        return all(finding.equal for finding in self.findings)

    def run(self) -> None:
        """Train once undisturbed, then with kills until all have happened or a run differs."""
        whole = self.folder / "undisturbed"
        self.launch(whole, self.options.processes[0], kill_after=None)
        run_seconds = self.seconds[0]  # of the fastest run in one launch
        while self.equal and (self.runs == 0 or self.kills < self.options.kills):
            self.runs += 1
            folder = self.folder / f"disturbed_{self.runs}"
            launches = self.train_with_kills(folder, run_seconds)
            if launches == 1:
                run_seconds = min(run_seconds, self.seconds[-1])
            self.compare(whole, folder)
            if self.equal and not self.options.keep:
                shutil.rmtree(folder)

    def train_with_kills(self, folder: Path, run_seconds: float) -> int:
        """Launch a run, killed at random moments, until it is done; returns how often."""
        launches = 0
        done = False
        while not done:
            kill_after = None
            if self.kills < self.options.kills:
                kill_after = self.random.uniform(0, run_seconds)
            world_size = self.random.choice(self.options.processes)
            done = self.launch(folder, world_size, kill_after)
            launches += 1
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

    def launch(self, folder: Path, world_size: int, kill_after: float | None) -> bool:
        """Launch a run, and kill it after so many seconds; returns whether it was done before.

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
            logged = plural(len(list(RunFolder(folder).records())), "step")
            write_err(
                f"{name}: killed after {seconds:.1f} s, {logged} logged ({self.kills} so far)"
            )
            return False
        if process.returncode:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-LAST_LINES:])
            raise LaunchFailed(f"{name} ended by itself with code {process.returncode}:\n{shown}")
        write_err(f"{name}: done after {seconds:.1f} s")
        return True

    def command(self, folder: Path) -> list[str]:
        """Return the arguments of `accel-gpt` that train in `folder`."""
        words = ["train", str(self.folder / "config.yaml"), "--out_dir", str(folder)]
        resolved = RunFolder(self.folder / "undisturbed").config
        if resolved:  # what auto meant there
            for key in ("train.mixed_precision", "train.compile"):
                words += [f"--{key}", str(resolved[key])]
        return words

    def report(self) -> str:
        """Say what was done; a table of the findings; the first difference of each kind."""
        if not self.equal:
            result = "stop and resume is NOT the same as never stopping"
        elif self.exact:
            result = "stop and resume equals never stopping, bit for bit"
        else:
            result = f"within {TOLERANCE:g}; set train.reproducible true for bit-equality"
        sizes = ", ".join(str(size) for size in sorted(set(self.world_sizes)))
        processes = "process" if sizes == "1" else "processes"
        text = (
            f"{plural(self.runs, 'run')} of {self.options.steps} steps with "
            f"{plural(self.kills, 'kill')}, compared with one never stopped; "
            f"{len(self.world_sizes)} launches on {sizes} {processes}, "
            f"{sum(self.seconds):.0f} s\n\n"
        )
        header = ("", "compared", "different", "largest difference", "")
        rows = [header, *(finding.row() for finding in self.findings)]
        text += table(rows, "<", ">", ">", ">", "<")
        for finding in self.findings:
            if finding.first:
                text += f"first difference in {finding.kind}: {finding.first}\n"
        return f"{text}{result}\n"


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it, and wait for their end: they hold the lock of the folder.

    They are suspended first, so that they start no more.
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
