"""Whether a user's own config, killed and launched again, equals never stopping.

    accel-gpt verify-resume CONFIG.yaml [--steps 20] [--kills 5] [--processes 1,2] [--section.key v]

Trains for a few steps in real processes, once undisturbed, then again and again with SIGKILL at
random moments, each launch on one of the numbers of processes, and compares the folders. All is
written to a temporary folder: `config.yaml` (what is launched), `undisturbed/`, `disturbed_1/`, ...
and what each launch said, `launch_1.log`, ...
"""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import psutil

from accel_gpt.commands.run_comparison import TOLERANCE, Finding, compare_runs, table
from accel_gpt.commands.verify_resume import VerifyResumeCommand
from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config, LogConfig
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import in_steps, make_plan, plural
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.training.accelerator import ensure_data
from accel_gpt.training.run_folder import RunFolder

DIFFERENT = 1  # exit code
LAST_LINES = 30  # of a launch that failed; torchrun adds some 20 to the trainer's


class LaunchFailed(UserError):
    """A launch that ended by itself before its run was done."""

    exit_code = 1


@dataclass
class Trial:
    """The launches made so far, and what is told of them."""

    asked: VerifyResumeCommand
    room: Path
    draw: random.Random
    kills: int = 0
    worlds: list[int] = field(default_factory=list)  # of each launch
    seconds: float = 0.0  # of all launches
    whole_seconds: float = 0.0  # of the fastest run in one launch


def verify_resume(asked: VerifyResumeCommand, config: Config) -> int:
    """Train, kill, compare and tell; 0 where all is equal, else 1.

    Raises `UserError` for a config that does not fit these processes, `LaunchFailed` where a launch
    ends by itself.
    """
    config = shortened(config, asked.steps)
    exact = check(asked, config)
    ensure_data(config.data)
    room = Path(tempfile.mkdtemp(prefix="accel_gpt_verify_"))
    write_file(room / "config.yaml", [to_yaml(config).encode()])
    trial, equal = Trial(asked, room, random.Random(asked.seed)), False
    keep = asked.keep
    try:
        runs = disturbed_runs(trial, undisturbed_run(trial), exact)
        equal = all(finding.equal for findings in runs for finding in findings)
        keep = keep or not equal
        sys.stdout.write(report(trial, runs, exact))
    except Exception:  # but not Ctrl-C
        keep = True
        raise
    finally:
        if keep:
            say(f"kept: {room}")
        else:
            shutil.rmtree(room, ignore_errors=True)
    return 0 if equal else DIFFERENT


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{text}\n")


# --------------------------------------------------------------------------- what is launched


def shortened(config: Config, steps: int) -> Config:
    """`config` as a run of `steps` steps that logs each of them and saves often, and for itself."""
    schedule, tokens = config.schedule, config.train.tokens_per_step
    warmup = in_steps(schedule.warmup_tokens, tokens) or schedule.warmup_steps
    decay = in_steps(schedule.decay_tokens, tokens) or schedule.decay_steps or 0
    if warmup >= steps and schedule.name != "constant":
        warmup = steps - 1
        schedule = replace(schedule, warmup_steps=warmup, warmup_tokens=None)
    if schedule.name == "wsd" and decay > steps - warmup:
        schedule = replace(schedule, decay_steps=steps - warmup, decay_tokens=None)
    return replace(
        config,
        schedule=schedule,
        train=replace(config.train, max_steps=steps, max_tokens=None),
        sample=replace(config.sample, every=0),
        log=LogConfig(every=1, trackers=(), batch_hash=True),
        hub=replace(config.hub, push="never"),
        checkpoint=replace(
            config.checkpoint,
            every=max(1, steps // 10),
            every_tokens=None,
            keep_last=2,
            resume="auto",
        ),
    )


def check(asked: VerifyResumeCommand, config: Config) -> bool:
    """Whether the runs must be equal bit for bit; `UserError` where they could not be made."""
    for world in asked.processes:
        make_plan(config, world)
    several = f"processes is {','.join(map(str, asked.processes))}"
    require(
        len(set(asked.processes)) == 1 or not isinstance(config.data.train, TextStream),
        f"{several}, but streamed text goes on on the same number only; give one number",
    )
    return len(set(asked.processes)) == 1 or config.train.reproducible


def command(trial: Trial, folder: Path, world: int) -> list[str]:
    """The words that launch a run: a trainer alone, or as many as torchrun starts."""
    words = [sys.executable, "-m"]
    if world > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        words += [*launcher, "-m"]
    words += ["accel_gpt.train", str(trial.room / "config.yaml"), "--out_dir", str(folder)]
    chosen = RunFolder(trial.room / "undisturbed").config  # what auto stood for there
    for key in ("train.mixed_precision", "train.compile") if chosen else ():
        words += [f"--{key}", str(chosen[key])]
    return words


# --------------------------------------------------------------------------- launches


def undisturbed_run(trial: Trial) -> Path:
    """Train in one launch; the run's folder."""
    folder = trial.room / "undisturbed"
    start = time.monotonic()
    launch(trial, folder, trial.asked.processes[0], None)
    trial.whole_seconds = time.monotonic() - start
    return folder


def disturbed_runs(trial: Trial, whole: Path, exact: bool) -> list[list[Finding]]:
    """Train with kills until all that were asked for are used up; the findings on each run."""
    runs: list[list[Finding]] = []
    while not runs or trial.kills < trial.asked.kills:
        folder = trial.room / f"disturbed_{len(runs) + 1}"
        done, launches = False, 0
        while not done:
            left = trial.asked.kills - trial.kills
            after = trial.draw.uniform(0, trial.whole_seconds) if left else None
            start = time.monotonic()
            done = launch(trial, folder, trial.draw.choice(trial.asked.processes), after)
            launches += 1
        if launches == 1:
            trial.whole_seconds = min(trial.whole_seconds, time.monotonic() - start)
        runs.append(compare_runs(whole, folder, trial.asked.steps, exact))
        differing = [finding.what for finding in runs[-1] if not finding.equal]
        say(f"{folder.name} {'DIFFERS in ' + ', '.join(differing) if differing else 'agrees'}")
        if not (differing or trial.asked.keep):
            shutil.rmtree(folder)
    return runs


def launch(trial: Trial, folder: Path, world: int, after: float | None) -> bool:
    """Launch a run, to be killed `after` so many seconds; whether it was done before.

    Raises `LaunchFailed`, with its last lines, where it ends with an error.
    """
    trial.worlds.append(world)
    log = trial.room / f"launch_{len(trial.worlds)}.log"
    name = f"launch {len(trial.worlds)}, {folder.name} on {plural(world, 'process', 'processes')}"
    start = time.monotonic()
    with log.open("wb") as output, running(command(trial, folder, world), output.fileno()) as run:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(after)
        late = run.poll() is None
    spent = time.monotonic() - start
    trial.seconds += spent
    if late and run.returncode == -signal.SIGKILL:
        trial.kills += 1
        logged = plural(sum(1 for _ in RunFolder(folder).records()), "step")
        say(f"{name}: killed after {spent:.1f} s, {logged} logged ({trial.kills} so far)")
        return False
    if run.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        raise LaunchFailed(
            f"{name} ended by itself with code {run.returncode}:\n" + "\n".join(lines)
        )
    say(f"{name}: done after {spent:.1f} s")
    return True


@contextlib.contextmanager
def running(words: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, so that no signal of ours reaches it; killed at the end
    with all that it started.
    """
    process = subprocess.Popen(
        words,
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
    """SIGKILL a process and all below it: at once, as they are stopped first and start no more."""
    stopped: dict[int, psutil.Process] = {}
    while fresh := {p.pid: p for p in tree(pid) if p.pid not in stopped}:
        for number, process in fresh.items():
            send(process, signal.SIGSTOP)
            stopped[number] = process
    for process in stopped.values():
        send(process, signal.SIGKILL)
    while any(map(alive, stopped.values())):  # or the next launch finds the folder locked
        time.sleep(0.01)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, as far as they still run."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Whether a process has not ended yet; one that waits to be asked for its code has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# --------------------------------------------------------------------------- the report


def report(trial: Trial, runs: Sequence[Sequence[Finding]], exact: bool) -> str:
    """What was done, the table over all disturbed runs, and the first difference of each kind."""
    findings = [reduce(Finding.joined, of_one) for of_one in zip(*runs, strict=True)]
    worlds = ", ".join(map(str, sorted(set(trial.worlds))))
    equal = all(finding.equal for finding in findings)
    lines = [
        f"{plural(len(runs), 'run')} of {trial.asked.steps} steps with "
        f"{plural(trial.kills, 'kill')}, compared with one never stopped; "
        f"{len(trial.worlds)} launches on {worlds} "
        f"{'process' if worlds == '1' else 'processes'}, {trial.seconds:.0f} s"
    ]
    told = [
        f"first difference in {finding.what}: {finding.first}"
        for finding in findings
        if finding.first and (not finding.equal or not exact)
    ]
    if not equal:
        last = "stop and resume is NOT the same as never stopping"
    elif exact:
        last = "stop and resume equals never stopping, bit for bit"
    else:
        last = f"within {TOLERANCE:g}; set train.reproducible true for bit-equality"
    return "\n".join([*lines, "", table(findings), *told, last]) + "\n"
