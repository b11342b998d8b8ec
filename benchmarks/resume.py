"""Measure who resumes on the right data: stop trainers in many ways and see what they read next.

    python benchmarks/resume.py PEERS [--systems NAME ...] [--jobs 2] [--json FILE]

PEERS is a folder with checkouts of accelerate, nanoGPT, litgpt and nanochat, which are run by their
documented commands (`resume_drivers.py`), without `torch.compile`. A `.venv` in a checkout, and in
a folder `transformers`, is the Python that runs it. `record_training.py` records each update from
outside: the token ids that entered the model, the loss, and fingerprints of weights and optimizer
state. So the step that a launch resumed from is the step after which the run had these weights,
whatever the trainer prints.

Each trainer runs undisturbed, then stops as each line of the tables says. The random steps, delays
and bits have a fixed seed. Weights, data and losses have the same bits in each launch of a trainer
that resumes exactly; the moments of the kills vary with the machine.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, attempt, make_parser, print_table, run_command, save_report, start_report
from resume_drivers import DRIVERS, EVERY, STEPS, Driver
from safetensors.torch import load_file

from accel_gpt.commands.verify_resume import kill_tree

KILLS = 10  # of one run, at random moments
SAVE_KILLS = 20  # each within a save
FLIPS = 8  # random bits of the newest checkpoint, one a trial
STOP = 34  # updates before SIGTERM, before twice the processes, and before a bit is flipped
POISONED = 45  # the update whose loss is NaN
PACE = 0.05  # seconds slept after each update, so that a save does not span many
GAP = 0.3  # seconds without a change between two saves
POLL = 0.005  # seconds between two looks at a run
QUIET = 120  # seconds without an update after which a launch hangs
TERM_LIMIT = 60  # seconds that a trainer may take to end after SIGTERM
SEED = 1
Update = dict[str, Any]  # a line of `record_training.py`, of all processes together
Area = frozenset[tuple[str, int, int]]  # names, sizes and times of files


def main() -> None:
    """Run every experiment for every trainer, and print the tables."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--systems", nargs="+", choices=DRIVERS, default=[*DRIVERS])
    parser.add_argument("--jobs", type=int, default=1, help="trainers that run at a time")
    args = parser.parse_args()
    report = start_report()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        work = Path(folder)
        trials = {name: partial(measure, name, args.peers, work) for name in args.systems}
        jobs = {name: pool.submit(attempt, name, trial) for name, trial in trials.items()}
        report["found"] = {name: job.result() for name, job in jobs.items() if job.result()}
    save_report(args.json, report)
    print_report(report["found"])


def measure(name: str, peers: Path, work: Path) -> dict[str, Any]:
    """Run every experiment for one trainer."""
    driver = DRIVERS[name](peers.resolve(), work / name)
    whole = Run(driver, "undisturbed")
    whole.launch()
    if whole.code:
        raise SystemExit(f"{name} failed: {last_line(whole)}")
    found: dict[str, Any] = {"versions": versions(driver), "updates": len(whole.path)}
    for what, experiment in EXPERIMENTS.items():
        trial = partial(experiment, driver, whole, random.Random(SEED))
        found[what] = attempt(f"{name}, {what}", trial) or {"error": "not measured"}
        print(f"{name}, {what}: {json.dumps(found[what])}", flush=True)
    return found


def versions(driver: Driver) -> str:
    """Return the packages of a trainer's environment, and the commit of its checkout."""
    names = ["torch", "accelerate", "transformers", "lightning", "litdata", "torchdata"]
    script = (
        "import importlib.metadata as m; names = {d.name for d in m.distributions()}; "
        f"print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names} if n in names))"
    )
    found = run_command([driver.python, "-c", script]).strip()
    if driver.peer is not None and (driver.peer / ".git").exists():
        found += " at " + run_command(["git", "rev-parse", "--short", "HEAD"], driver.peer).strip()
    return found


# --------------------------------------------------------------------------- runs


class Run:
    """A run of a trainer: its folder, and what its launches did.

    `path`: the updates that led to the present weights, as far as they are known. `start`: the
    update that the newest launch resumed from; None if it began with weights that the run never
    had. `intact`: whether it had the optimizer's state of that update, too. `undone`: updates that
    the newest launch makes again. `saved`: what a save may change, at the last look.
    """

    def __init__(self, driver: Driver, name: str) -> None:
        self.driver = driver
        self.out = driver.work / name
        self.out.mkdir()
        self.records = driver.work / f"{name}.jsonl"
        self.log = driver.work / f"{name}.log"
        self.weights = driver.work / f"{name}.pt"
        self.path: list[Update] = []
        self.first: tuple[int, int] | None = None  # fingerprints before the first update
        self.start: int | None = 0
        self.intact = True
        self.undone: list[Update] = []
        self.saved: Area = frozenset()
        self.ranks: list[list[Update]] = []  # what each process of the newest launch wrote
        self.place = 0  # bytes of its records that were read
        self.fresh = 0  # updates of the newest launch
        self.saves: list[float] = []  # seconds from the first to the last change of each save
        self.code = 0  # that the newest launch ended with

    def launch(
        self,
        stop: Callable[["Run"], bool] = lambda run: False,
        signal_number: int = signal.SIGKILL,
        processes: int = 1,
        **environment: str,
    ) -> None:
        """Start or resume the run; signal it once `stop` returns True."""
        self.ranks = [[] for _ in range(processes)]
        self.place = 0
        self.fresh = 0
        self.start = None
        words = self.driver.command(self.out, processes)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        recorder = ROOT / "benchmarks/record_training.py"
        start = [*launcher, str(processes)] if processes > 1 else []
        self.records.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [self.driver.python, *start, str(recorder), *map(str, words)],
                cwd=self.driver.folder,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "TORCHDYNAMO_DISABLE": "1",
                    "RECORD": str(self.records),
                    "RECORD_PACE": str(PACE),
                    "RECORD_WEIGHTS": str(self.weights),
                }
                | self.driver.environment
                | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        try:
            self.watch(process, stop)
            if process.poll() is None and signal_number != signal.SIGKILL:
                process.send_signal(signal_number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERM_LIMIT)
        finally:
            if process.poll() is None:
                kill_tree(process)
        self.read()
        self.code = process.returncode

    def watch(self, process: subprocess.Popen[str], stop: Callable[["Run"], bool]) -> None:
        """Follow a launch until it ends or shall be stopped; measure its saves."""
        self.saved = self.area()
        first = last = 0.0
        heard = time.monotonic()
        updates = 0
        while process.poll() is None:
            self.read()
            area = self.area()
            now = time.monotonic()
            if area != self.saved:
                first = first or now
                last = now
                self.saved = area
            elif first and now > last + GAP:
                self.saves.append(last - first)
                first = 0.0
            if stop(self):
                return
            if self.fresh > updates:
                updates = self.fresh
                heard = now
            elif now > heard + QUIET:
                if not updates:
                    raise SystemExit(f"{self.out} makes no update")
                print(f"{self.out}: killed, as it hangs after {updates} updates", flush=True)
                return
            time.sleep(POLL)

    def area(self) -> Area:
        """Look at the files that a save changes."""
        found = set()
        for top in self.out.glob(self.driver.area or self.driver.pattern):
            walk = os.walk(top)  # skips folders that are renamed or removed meanwhile
            below = (os.path.join(folder, name) for folder, _, names in walk for name in names)
            for path in (str(top), *below):
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    found.add((path, status.st_size, status.st_mtime_ns))
        return frozenset(found)

    def read(self) -> None:
        """Read the new updates of the newest launch."""
        if not self.records.exists():
            return
        with self.records.open("rb") as file:
            file.seek(self.place)
            written = file.read()
        written = written[: written.rfind(b"\n") + 1]
        self.place += len(written)
        for line in written.splitlines():
            record = json.loads(line)
            self.ranks[record["rank"]].append(record)
        for number in range(self.fresh, min(map(len, self.ranks))):
            update = merge([rank[number] for rank in self.ranks])
            if number == 0:
                self.locate(update["before"])
            self.path.append(update)
            self.fresh += 1

    def locate(self, before: list[int]) -> None:
        """Find the update after which the run had the weights that a launch began with."""
        self.first = self.first or before
        had = [self.first, *(update["after"] for update in self.path)]
        whole = [step for step, one in enumerate(had) if one == before]
        weights = [step for step, one in enumerate(had) if one[0] == before[0]]
        self.intact = bool(whole)
        self.start = (whole or weights or [None])[-1]
        self.undone = self.path[self.start or 0 :]
        del self.path[self.start or 0 :]


def merge(parts: Sequence[Update]) -> Update:
    """Return one update of several processes: all rows, and the mean loss."""
    rows = [row for part in parts for row in part["rows"]]
    return {**parts[0], "rows": rows, "loss": statistics.fmean(part["loss"] for part in parts)}


def at_update(step: int) -> Callable[[Run], bool]:
    """Stop when the run has made `step` updates."""
    return lambda run: bool(run.fresh) and len(run.path) >= step


def after_first_update(run: Run) -> bool:
    """Stop when the launch has made an update."""
    return bool(run.fresh)


def resume(run: Run, stop: Callable[[Run], bool]) -> str:
    """Resume a run as documented; if that fails, remove the newest checkpoint and try again.

    Returns what it began with: "intact" (weights and moments of an update of this run), "by hand"
    (the same, but only after checkpoints were removed), "nothing left" (it had to start again),
    "wrong optimizer", or "wrong weights" (weights that the run never had).
    """
    updates = len(run.path)
    removed = 0
    while True:
        run.launch(stop)
        if run.fresh:
            break
        left = run.driver.checkpoints(run.out)
        if not left:
            raise SystemExit(f"{run.driver.name} failed: {last_line(run)}")
        print(f"{run.out}: {left[-1][0].name} removed, after: {last_line(run)}", flush=True)
        for path in left[-1]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        removed += 1
    if run.start is None:
        return "wrong weights"
    if run.start == 0 and updates >= EVERY:
        return "nothing left"
    if not run.intact:
        return "wrong optimizer"
    return "by hand" if removed else "intact"


def last_line(run: Run) -> str:
    """Return the last line that a launch wrote."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    return lines[-1][-200:]


# --------------------------------------------------------------------------- experiments


def kill_anywhere(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Kill a run ten times at random moments; compare it with the undisturbed one."""
    run = Run(driver, "killed")
    lost = []
    resumed = STEPS
    results = Counter[str]()
    first, *others = sorted(chance.sample(range(5, STEPS), KILLS))
    run.launch(at_random_moment(first, chance))
    for step in [*others, None]:
        updates = len(run.path)
        stop = at_random_moment(step, chance) if step else lambda run: False
        results[resume(run, stop)] += 1
        if run.start is not None:
            lost.append(updates - run.start)
            resumed = min(resumed, run.start)
    return {
        "resumes": dict(results),
        "lost": sorted(lost),
        **compare(run, whole, resumed),
        "weights": weight_difference(run, whole),
        "exit_code": run.code,
    }


def at_random_moment(step: int, chance: random.Random) -> Callable[[Run], bool]:
    """Stop within the update after the first `step` ones."""
    return soon_after(at_update(step), 2 * PACE, chance)


def soon_after(
    begun: Callable[[Run], bool], seconds: float, chance: random.Random
) -> Callable[[Run], bool]:
    """Stop at a random moment within `seconds` after `begun` first returns True."""
    delay = chance.uniform(0, seconds)
    end: float | None = None

    def stop(run: Run) -> bool:
        nonlocal end
        if end is None and begun(run):
            end = time.monotonic() + delay
        return end is not None and time.monotonic() >= end

    return stop


def kill_in_saves(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Kill runs within their saves, twenty times; see what each resume finds.

    "resumes": their results. "incomplete": the results of those that did not go on from the
    interrupted save. "again": resumes whose first update had been made before; how many had the
    same data, and the same loss.
    """
    seconds = statistics.median(sorted(whole.saves)[-(STEPS // EVERY) :])
    results = Counter[str]()
    lost = []
    incomplete = Counter[str]()
    again = Counter[str]()
    run = Run(driver, "saving_0")
    run.launch(in_save(seconds, chance))
    for number in range(1, SAVE_KILLS + 1):
        updates = len(run.path)
        last = number == SAVE_KILLS
        result = resume(run, after_first_update if last else in_save(seconds, chance))
        results[result] += 1
        went_on = result == "intact" and updates - (run.start or 0) < EVERY // 2
        if not went_on:
            incomplete[result] += 1
        if run.start is not None:
            lost.append(updates - run.start)
        if result in ("intact", "by hand") and run.undone:
            first, before = run.path[-run.fresh], run.undone[0]
            again["of"] += 1
            again["data"] += first["rows"] == before["rows"]
            again["loss"] += first["loss"] == before["loss"]
        if len(run.path) >= STEPS and not last:
            run = Run(driver, f"saving_{number}")
            run.launch(in_save(seconds, chance))
    return {
        "milliseconds": round(1e3 * seconds),
        "resumes": dict(results),
        "incomplete": dict(incomplete),
        "lost": sorted(lost),
        "again": dict(again),
    }


def in_save(seconds: float, chance: random.Random) -> Callable[[Run], bool]:
    """Stop at a random moment within the first save of a launch that has an older checkpoint."""
    before: Area | None = None

    def begun(run: Run) -> bool:
        nonlocal before
        if not at_update(2 * EVERY - 1)(run):
            return False
        before = run.saved if before is None else before
        return run.saved != before

    return soon_after(begun, seconds, chance)


def terminate(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Send SIGTERM; see how many updates the resumed run repeats."""
    run = Run(driver, "terminated")
    run.launch(at_update(STOP), signal.SIGTERM)
    code = run.code
    updates = len(run.path)
    result = resume(run, after_first_update)
    lost = None if run.start is None else updates - run.start
    return {"exit_code": code, "resume": result, "lost": lost}


def on_two_processes(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Kill a run of one process, and resume it on two.

    "from scratch": wrong sequences of a run that began on two processes.
    """
    if driver.needs_gpus:
        return {"not on a CPU": driver.needs_gpus}
    run = Run(driver, "two")
    run.launch(at_update(STOP))
    run.launch(processes=2)
    if run.start is None:
        raise SystemExit(f"{driver.name} failed: {last_line(run)}")
    scratch = Run(driver, "two_from_scratch")
    scratch.launch(at_update(STOP), processes=2)
    return {
        "from": run.start,
        **compare(run, whole, run.start),
        "from scratch": compare(scratch, whole, 0)["wrong"],
    }


def poison(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Make the loss of one update NaN; see which weights the checkpoints hold thirty updates on."""
    run = Run(driver, "poisoned")
    run.launch(at_update(POISONED + 3 * EVERY), RECORD_NAN=str(POISONED))
    finite = [all(map(is_finite, files(one))) for one in driver.checkpoints(run.out)]
    return {
        "exit_code": run.code,
        "updates": len(run.path),
        "weights_finite": run.path[-1]["finite"],
        "newest_checkpoint_finite": finite[-1],
        "finite_checkpoints": f"{sum(finite)} of {len(finite)}",
    }


def flip_bits(driver: Driver, whole: Run, chance: random.Random) -> dict[str, Any]:
    """Flip one random bit of the newest checkpoint, eight times; see what a resume loads.

    "no effect": the resume was intact, and its first update the same; "another update": it was not.
    """
    run = Run(driver, "flipped")
    run.launch(at_update(STOP))
    path = list(run.path)
    backup = driver.work / "backup"
    shutil.copytree(run.out, backup)
    undamaged = resume(run, after_first_update)
    newest = run.start
    expected = run.path[-run.fresh]
    results = Counter[str]()
    for _ in range(FLIPS):
        shutil.rmtree(run.out)
        shutil.copytree(backup, run.out, copy_function=shutil.copy2)
        run.path = list(path)
        where = flip(files(driver.checkpoints(run.out)[-1]), chance)
        result = resume(run, after_first_update)
        if result == "intact" and run.start != newest:
            result = "skipped"
        elif result == "intact":
            same = run.path[-run.fresh] == expected
            result = "no effect" if same else "another update"
        results[result] += 1
        print(f"{driver.name}, bit of {where}: {result}, from {run.start}", flush=True)
    return {"undamaged": undamaged, "resumes": dict(results)}


def files(paths: Sequence[Path]) -> list[Path]:
    """Return the files at and below some paths."""
    found = [one for path in paths for one in (path, *path.rglob("*"))]
    return sorted(path for path in found if path.is_file())


def flip(paths: Sequence[Path], chance: random.Random) -> str:
    """Flip a bit; each bit of all files is as likely. Return where."""
    sizes = [path.stat().st_size for path in paths]
    path = chance.choices(paths, sizes)[0]
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    changed = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    return f"{path.name}, byte {place}"


def is_finite(path: Path) -> bool:
    """Return whether a file of a checkpoint holds only finite tensors; True if it holds none."""
    if path.suffix == ".safetensors":
        content: Any = load_file(path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        content = torch.load(path, weights_only=False)
    else:
        return True
    return all(bool(one.isfinite().all()) for one in tensors(content))


def tensors(content: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested mappings and lists."""
    if torch.is_tensor(content):
        yield content
    elif isinstance(content, dict):
        for one in content.values():
            yield from tensors(one)
    elif isinstance(content, list | tuple):
        for one in content:
            yield from tensors(one)


def compare(run: Run, whole: Run, since: int) -> dict[str, Any]:
    """Compare what a run read and its losses from an update on with the undisturbed run.

    "wrong": sequences that the undisturbed run did not read in the same update. Of all sequences
    that it read, "never": those that this run did not read; "more": reads beyond the same number.
    """
    parts = run.driver.parts
    pairs = list(zip(run.path, whole.path, strict=False))
    wrong = 0
    for ours, other in pairs[since:]:
        wrong += sum((read([ours], parts) - read([other], parts)).values())
    ours, others = (read([pair[side] for pair in pairs], parts) for side in (0, 1))
    return {
        "updates": len(run.path),
        "read": sum(read([pair[0] for pair in pairs[since:]], parts).values()),
        "wrong": wrong,
        "more": sum(max(ours[part] - count, 0) for part, count in others.items()),
        "never": f"{len(others.keys() - ours.keys())} of {len(others)}",
        "loss": max((abs(one["loss"] - two["loss"]) for one, two in pairs), default=0.0),
    }


def read(updates: Sequence[Update], parts: Callable[[list[int]], list[Any]]) -> Counter[Any]:
    """Count how often each piece of data was read."""
    return Counter(part for update in updates for row in update["rows"] for part in parts(row))


def weight_difference(run: Run, whole: Run) -> float:
    """Return the largest difference of two runs' final weights."""
    one, two = (torch.load(side.weights) for side in (run, whole))
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


EXPERIMENTS: dict[str, Callable[[Driver, Run, random.Random], dict[str, Any]]] = {
    "killed": kill_anywhere,
    "killed in a save": kill_in_saves,
    "SIGTERM": terminate,
    "two processes": on_two_processes,
    "NaN": poison,
    "flipped bit": flip_bits,
}


def print_report(found: dict[str, dict[str, Any]]) -> None:
    """Print one table for each experiment."""
    for what in EXPERIMENTS:
        print(f"\n{what}")
        keys = list(dict.fromkeys(key for one in found.values() for key in one[what]))
        rows = [
            [name] + [cell(one[what].get(key, "")) for key in keys] for name, one in found.items()
        ]
        print_table(["trainer", *keys], rows)


def cell(value: Any) -> str:
    """Return a figure as the cell of a table: counts by name, a list by its median and maximum."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    if isinstance(value, list):
        return f"{statistics.median(value):g} ({min(value)} to {max(value)})" if value else ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
