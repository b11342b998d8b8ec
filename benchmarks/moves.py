"""Move a run to twelve empty machines, on a store that cuts a tenth of the requests.

    python benchmarks/moves.py [--moves 12] [--seed 1] [--minutes 4] [--cut 0.1]
        [--folder runs/moves] [--out FILE]

1. `accel-gpt prepare stdlib` writes the data to a local folder and to `s3://bucket/data`. A run of
   `--minutes` on one process trains on the local folder, undisturbed and without copies. It gets
   the folder as a `file://` URL: an evaluation reads other tokens of a folder without a scheme.
2. The same config lies at `s3://bucket/run/config.yaml`. Each machine is an empty working folder,
   home and cache, and gets the address of the config and nothing else. They have one process and
   two (torchrun) in turn: with `train.reproducible`, both give the same bits. A machine ends with
   SIGKILL to all processes at a random moment, while it starts, or in the middle of a copy, or with
   SIGTERM. One is started while another trains. One is stopped by SIGSTOP, loses the run to the
   next machine, and goes on when that has made a copy.
3. The run that moved is compared with the undisturbed one, bit for bit.

The S3 server is moto, behind `cutting_proxy.py`. Prints a table of the machines and the goals, and
ends with code 1 if one is missed. What the machines printed is kept in `--folder`.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import OURS, ROOT, print_table, run_command, save_report, start_report
from cutting_proxy import BUCKET, CutS3, Request, cut_s3
from safetensors.numpy import load

from accel_gpt.files import sha256
from accel_gpt.runs.folder import RunFolder

RUN = f"{BUCKET}/run"
DATA = f"{BUCKET}/data"
CONFIG = f"{RUN}/config.yaml"
OUT_DIR = Path("runs/run")  # the default of a config at s3://bucket/run/config.yaml
PREPARE = ("prepare", "stdlib", "--tokenizer", "bpe", "--vocab_size", "1024")
PROMPTS = ("def ", "import ")
SHARD_TOKENS = 100_000
TRIAL_STEPS = 60  # of the run that measures the speed
COPY_SECONDS = 10.0  # between two checkpoints, on one process
UPLOAD_KILLS = 3
COPY_FILES = 7  # of a copy, before its manifest
POLL = 0.01  # seconds between two looks
START_SECONDS = 45.0  # in which a machine is killed while it starts: import, lease, copy
START_LIMIT = 180.0  # seconds until a machine makes a step
STEP_LIMIT = 60.0  # seconds without a step, after which a machine hangs
TERM_LIMIT = 90.0  # seconds for a save, and a copy of it
MARK = "MOVES_MACHINE"  # in the environment of a machine's processes
BUSY, PREEMPTED = 6, 75  # exit codes
LEASE = "lease.json"
STEP_LINE = re.compile(r"step ([\d,]+)/")
WORKER_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+)", re.MULTILINE)  # as torchrun reports it
FILE_OF_COPY = re.compile(r".*/step_(\d+)/([^/]+)")


def main() -> None:
    """Train the undisturbed run, move the other one, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moves", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4, help="of the undisturbed run")
    parser.add_argument("--cut", type=float, default=0.1, help="share of requests")
    parser.add_argument("--folder", type=Path, default=Path("runs/moves"), help="is replaced")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args()
    report = start_report()
    report["arguments"] = {key: str(value) for key, value in vars(args).items()}
    work = args.folder.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with cut_s3(work / "requests.jsonl", args.cut, args.seed) as s3:
        goals = Goals()
        whole = train_whole(work, s3, args.minutes, report, goals)
        tour = Tour(
            work=work,
            s3=s3,
            chance=random.Random(args.seed),
            moves=args.moves,
            steps=report["steps"],
            goals=goals,
        )
        began = time.monotonic()
        try:
            tour.travel()
            report["tour_seconds"] = time.monotonic() - began
            compare(tour, whole, goals)
        except Stuck as error:
            goals.add("the run goes on to its end", False, error)
        finally:
            for machine in tour.machines:
                machine.kill()
        report["machines"] = [describe(machine) for machine in tour.machines]
        report["requests"] = describe_requests(s3.requests())
    report["goals"] = goals.lines
    save_report(args.out, report)
    print_report(report)
    sys.exit(0 if goals.reached else 1)


class Goals:
    """What must hold, with what was seen."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, goal: str, holds: bool, seen: object = "") -> None:
        """Note a goal, and print it if it is missed."""
        self.lines.append({"goal": goal, "holds": holds, "seen": str(seen)})
        if not holds:
            print(f"MISSED: {goal}: {seen}", flush=True)

    @property
    def reached(self) -> bool:
        """Return whether all goals hold."""
        return all(line["holds"] for line in self.lines)


# --------------------------------------------------------------------------- the undisturbed run


def train_whole(
    work: Path, s3: CutS3, minutes: float, report: dict[str, Any], goals: Goals
) -> Path:
    """Prepare the data, put the config into the bucket, and train without a disturbance."""
    prepare = [sys.executable, *OURS, *PREPARE, "--shard_tokens", str(SHARD_TOKENS), "--out"]
    run_command([*prepare, work / "data"], folder=work)
    run_command([*prepare, f"s3://{DATA}"], folder=work, **s3.environment("prepare"))
    store = s3.open(s3.server_port, "owner")
    local = {path.name: path.read_bytes() for path in (work / "data").iterdir()}
    stored = {path: store.cat_file(path) for path in store.ls(DATA, detail=False)}
    remote = {path.rpartition("/")[2]: content for path, content in stored.items()}
    goals.add("the data in the bucket are those of a local folder", local == remote, len(remote))
    folder = f"file://{work / 'data'}"
    train_config(work, config_text(folder, TRIAL_STEPS, every=TRIAL_STEPS), "trial")
    records = RunFolder(work / "trial").records()
    step_ms = statistics.median(record["perf/step_ms"] for record in records)
    every = max(round(1000 * COPY_SECONDS / step_ms), 1)
    report["steps"] = steps = round(60_000 * minutes / step_ms)
    report["every"] = every
    print(f"{steps} steps of {step_ms:.0f} ms, a checkpoint every {every}", flush=True)
    store.pipe_file(CONFIG, config_text(f"s3://{DATA}", steps, every).encode())
    began = time.monotonic()
    train_config(work, config_text(folder, steps, every), "whole")
    report["whole_seconds"] = time.monotonic() - began
    print(f"undisturbed run: {report['whole_seconds']:.0f} s", flush=True)
    return work / "whole"


def train_config(work: Path, text: str, name: str) -> None:
    """Train a config to the folder `name` of `work`."""
    file = work / f"{name}.yaml"
    file.write_text(text)
    command = [sys.executable, *OURS, "train", file, "--out_dir", work / name]
    run_command(command, folder=work, XDG_CACHE_HOME=str(work / "cache"))


def config_text(data: str, steps: int, every: int) -> str:
    """Return the config of a run on the folder `data`; `every`: steps between checkpoints."""
    return f"""
data: {{train: "{data}", shuffle: groups}}
model: {{n_layer: 4, n_head: 4, n_embd: 128, block_size: 128}}
train: {{tokens_per_step: 2048, micro_batch_size: 8, max_steps: {steps}, reproducible: true}}
optim: {{lr: 1e-3}}
schedule: {{warmup_steps: {max(steps // 20, 1)}}}
eval: {{every: {every}, tokens: 16384}}
sample: {{every: {every}, prompts: {json.dumps(PROMPTS)}, max_new_tokens: 24}}
checkpoint: {{every: {every}}}
log: {{every: 1}}
"""


# --------------------------------------------------------------------------- machines


class Machine:
    """An empty machine that gets the address of a config, and what it does.

    `lines`: what it printed, with the time of each. `end`, `code`: how it ended, and its exit code.
    """

    def __init__(self, work: Path, s3: CutS3, number: int, processes: int) -> None:
        self.name = f"machine_{number:02}"
        self.number = number
        self.processes = processes
        self.s3 = s3
        self.end = ""
        self.code: int | None = None
        self.incomplete: list[str] = []  # files of an interrupted copy
        self.lines: list[tuple[float, str]] = []
        self.steps: list[tuple[float, int]] = []  # time and number of each step that it printed
        self.newest_before = 0  # the newest step that any machine had made
        self.folder = work / self.name
        for name in ("home", "cache", "tmp"):
            (self.folder / name).mkdir(parents=True)
        environment = {
            **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",  # so that the times of its lines are right
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "CUDA_VISIBLE_DEVICES": "",
            MARK: self.name,
            **s3.environment(self.name),
        }
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        words = [*(launcher if processes > 1 else []), *OURS, "train", f"s3://{CONFIG}"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        """Note each line that the machine prints; keep them beside its folder."""
        assert self.process.stdout is not None
        with self.folder.with_suffix(".txt").open("w") as kept:
            for line in self.process.stdout:
                now = time.monotonic()
                self.lines.append((now, line.rstrip("\n")))
                match = STEP_LINE.match(line)
                if match:
                    self.steps.append((now, int(match[1].replace(",", ""))))
                kept.write(f"{now - self.began:7.2f} {line}")
                kept.flush()

    @property
    def out_dir(self) -> Path:
        """Return the folder of the run on this machine."""
        return self.folder / OUT_DIR

    @property
    def step(self) -> int:
        """Return the newest step; 0 before the first."""
        return self.steps[-1][1] if self.steps else 0

    def requests(self) -> list[Request]:
        """Return the requests of this machine."""
        return [request for request in self.s3.requests() if request.who == self.name]

    def copies(self) -> dict[int, float]:
        """Return the steps that it copied completely, with the time when each was complete."""
        found: dict[int, float] = {}
        for request in self.requests():
            match = FILE_OF_COPY.fullmatch(request.path)
            is_manifest = match and match[2] == "manifest.json" and request.method == "PUT"
            if match and is_manifest and request.took_effect and request.end:
                found.setdefault(int(match[1]), request.end)
        return found

    # ----------------------------------------------------------------------- processes

    def pids(self) -> list[int]:
        """Return all living processes of the machine, also those in other sessions."""
        found = []
        mark = f"{MARK}={self.name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the machine."""
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def freeze(self) -> None:
        """Stop all processes at once: the second time those that were being started."""
        self.send(signal.SIGSTOP)
        self.send(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill all processes at once, so that none learns that another has ended."""
        if self.code is None:
            self.freeze()
            while self.pids():
                self.send(signal.SIGKILL)
                time.sleep(POLL)
            self.wait(10)

    def wait(self, seconds: float) -> bool:
        """Wait until the machine's command ends, and note its exit code; return whether it did."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self.thread.join(5)
        code = self.process.returncode
        if self.processes > 1 and code == 1:  # torchrun's, for any failure
            text = "\n".join(line for _, line in self.lines)
            codes = WORKER_CODE.findall(text.partition("Root Cause")[2])
            code = int(codes[0]) if codes else code
        self.code = code
        return True

    def last_line(self) -> str:
        """Return the last line that it printed, and where to read the others."""
        lines = [line for _, line in self.lines if line.strip()] or [""]
        return f"{lines[-1][:300]!r}; see {self.folder.with_suffix('.txt')}"


# --------------------------------------------------------------------------- the tour


End = Callable[[Machine], None]


class Stuck(Exception):
    """The run does not go on."""


class Tour:
    """The moves of a run."""

    def __init__(
        self, work: Path, s3: CutS3, chance: random.Random, moves: int, steps: int, goals: Goals
    ) -> None:
        self.work = work
        self.s3 = s3
        self.chance = chance
        self.moves = moves
        self.steps = steps
        self.goals = goals
        self.machines: list[Machine] = []
        self.numbers = itertools.count(1)
        self.store = s3.open(s3.server_port, "owner")  # looks at the bucket, and meets no cuts

    def ends(self) -> list[End]:
        """Return how the machines end, in order: what is special, and kills at random moments.

        One SIGTERM meets one process, the other one two.
        """
        special = [self.terminate, self.terminate, self.pause, self.refuse_guest]
        special += [self.kill_at_start]
        ends = [*[self.kill_in_copy] * UPLOAD_KILLS, *special, *[self.kill] * self.moves]
        ends = ends[: self.moves]
        while True:
            self.chance.shuffle(ends)
            terms = [place % 2 for place, end in enumerate(ends) if end == self.terminate]
            if sorted(terms) == [0, 1][: len(terms)]:
                return ends

    def start(self, processes: int) -> Machine:
        """Start the next machine."""
        newest = max((machine.step for machine in self.machines), default=0)
        machine = Machine(self.work, self.s3, next(self.numbers), processes)
        machine.newest_before = newest
        self.machines.append(machine)
        return machine

    def travel(self) -> None:
        """Move the run from machine to machine until it ends."""
        paused: Machine | None = None
        ends = self.ends()
        print(", ".join(end.__name__ for end in ends), flush=True)
        for move, end in enumerate(ends, start=1):
            machine = self.start(processes=2 - move % 2)
            if paused:
                self.return_from_the_dead(paused, machine)
            if end != self.kill_at_start:
                share = (move - self.chance.uniform(0.2, 1)) / (self.moves + 1)
                self.await_step(machine, round(self.steps * share))
                time.sleep(self.chance.uniform(0, 1))
            end(machine)
            paused = machine if end == self.pause else None
            self.tell(machine)
        last = self.start(processes=2 - (self.moves + 1) % 2)
        if paused:
            self.return_from_the_dead(paused, last)
        self.await_step(last, self.steps)
        ended = last.wait(TERM_LIMIT)
        self.goals.add("the last machine ends with code 0", ended and last.code == 0, last.code)
        last.end = "finished"
        self.tell(last)

    def tell(self, machine: Machine) -> None:
        """Print what a machine did."""
        print(json.dumps(describe(machine)), flush=True)

    def await_step(self, machine: Machine, step: int) -> None:
        """Wait until a machine has made the step `step`, and at least one of those that are new."""
        self.watch(machine, lambda: machine.step >= max(step, machine.newest_before + 1))

    def watch(self, machine: Machine, done: Callable[[], object]) -> None:
        """Wait until something holds; raise `Stuck` if the machine ends or hangs before."""
        heard = time.monotonic()
        count = 0
        while not done():
            limit = STEP_LIMIT if count else START_LIMIT
            if machine.process.poll() is not None:
                machine.wait(5)
                raise Stuck(f"{machine.name} ended with {machine.code}: {machine.last_line()}")
            if len(machine.lines) > count:
                count = len(machine.lines)
                heard = time.monotonic()
            elif time.monotonic() > heard + limit:
                raise Stuck(f"{machine.name} is silent for {limit:g} s: {machine.last_line()}")
            time.sleep(POLL)

    # ----------------------------------------------------------------------- ends

    def kill(self, machine: Machine) -> None:
        """Kill a machine now."""
        machine.kill()
        machine.end = "SIGKILL"

    def pause(self, machine: Machine) -> None:
        """Stop a machine, which goes on later."""
        machine.freeze()
        machine.end = "SIGSTOP"

    def kill_at_start(self, machine: Machine) -> None:
        """Kill a machine at a random moment before its first step, or at the step."""
        end = machine.began + self.chance.uniform(0, START_SECONDS)
        self.watch(machine, lambda: machine.steps or time.monotonic() > end)
        machine.kill()
        machine.end = "SIGKILL while it started"

    def kill_in_copy(self, machine: Machine) -> None:
        """Kill a machine while it sends a random file of its next copy."""
        seen = len(machine.requests())
        files = self.chance.randint(1, COPY_FILES)

        def sends() -> bool:
            sent = [
                request
                for request in machine.requests()[seen:]
                if request.method == "PUT" and FILE_OF_COPY.fullmatch(request.path)
            ]
            names = {request.path.rpartition("/")[2] for request in sent}
            return len(names) >= files or "manifest.json" in names

        self.watch(machine, sends)
        machine.kill()
        machine.end = "SIGKILL in a copy"
        machine.incomplete = self.incomplete_copies(machine)
        self.goals.add(
            f"{machine.name} left files of a copy without a manifest",
            bool(machine.incomplete),
            machine.incomplete,
        )

    def incomplete_copies(self, machine: Machine) -> list[str]:
        """Return the files in the bucket that a machine wrote for a copy without a manifest."""
        paths = self.store.find(RUN)
        whole = {path.rpartition("/")[0] for path in paths if path.endswith("/manifest.json")}
        wrote = {request.path.lstrip("/") for request in machine.requests()}
        files = [path for path in paths if path in wrote and FILE_OF_COPY.fullmatch(path)]
        return [path for path in files if path.rpartition("/")[0] not in whole]

    def terminate(self, machine: Machine) -> None:
        """End a machine politely."""
        machine.process.send_signal(signal.SIGTERM)
        machine.end = "SIGTERM"
        if not machine.wait(TERM_LIMIT):
            raise Stuck(f"{machine.name} did not end after SIGTERM: {machine.last_line()}")
        # torchrun that gets a signal does not report the codes of its processes
        expected = PREEMPTED if machine.processes == 1 else 1
        goal = f"{machine.name} ends with {expected} after SIGTERM and has copied its last step"
        holds = machine.code == expected and machine.step in machine.copies()
        seen = f"code {machine.code}, step {machine.step}: {machine.last_line()}"
        self.goals.add(goal, holds, seen)

    def refuse_guest(self, owner: Machine) -> None:
        """Start a machine while another one trains; then kill that one."""
        before = owner.step
        guest = self.start(processes=1)
        self.watch(owner, lambda: guest.wait(0.01))
        guest.end = "refused"
        writes = [
            f"{request.method} {request.path}"
            for request in guest.requests()
            if request.method not in ("GET", "HEAD")
        ]
        goal = f"{guest.name} ends with code 6 as {owner.name} is alive, and writes nothing"
        holds = guest.code == BUSY and not writes
        self.goals.add(goal, holds, f"code {guest.code}, {writes}: {guest.last_line()}")
        self.watch(owner, lambda: owner.step > before + 1)
        self.tell(guest)
        self.kill(owner)

    def return_from_the_dead(self, paused: Machine, owner: Machine) -> None:
        """Continue a paused machine when its run went on elsewhere and was copied there."""
        self.watch(owner, owner.copies)
        copies = paused.copies()
        at = time.monotonic()
        paused.send(signal.SIGCONT)
        if not paused.wait(TERM_LIMIT):
            raise Stuck(f"{paused.name} goes on beside {owner.name}: {paused.last_line()}")
        paused.end = "SIGSTOP, returned too late"
        published = paused.copies().keys() - copies.keys()
        wrote = [
            request.path
            for request in paused.requests()
            if request.begin > at and request.method not in ("GET", "HEAD") and request.took_effect
        ]
        goal = f"{paused.name} ends with code 6 after it lost the run, and publishes no step"
        holds = paused.code == BUSY and not published
        seen = f"code {paused.code}, published {sorted(published)}, wrote {wrote}"
        self.goals.add(goal, holds, f"{seen}: {paused.last_line()}")
        self.tell(paused)


# --------------------------------------------------------------------------- comparing


def compare(tour: Tour, whole: Path, goals: Goals) -> None:
    """Compare the run that moved with the undisturbed one."""
    last = tour.machines[-1].out_dir
    compare_weights(tour, last, whole, goals)
    compare_records(last, whole, goals)
    one, two = first_samples(last), first_samples(whole)
    goals.add("equal samples", one == two, f"of {len(one)} and {len(two)} steps")
    names = {RunFolder(machine.out_dir).stored_name for machine in tour.machines if machine.steps}
    goals.add("one name in trackers and copies", len(names) == 1 and "" not in names, names)
    check_owners(tour, goals)
    cuts = Counter(request.cut for request in tour.s3.requests() if request.cut)
    goals.add("requests were cut", bool(cuts) == bool(tour.s3.cut), dict(cuts))


def compare_weights(tour: Tour, last: Path, whole: Path, goals: Goals) -> None:
    """Compare the weights on the last machine and in the bucket with those of a run `whole`."""
    expected = weights(weights_file(whole).read_bytes())
    seen = f"SHA-256 {sha256(weights_file(last))} and {sha256(weights_file(whole))}"
    same = weights(weights_file(last).read_bytes()) == expected
    goals.add("equal weights, bit for bit", same, seen)
    copied = f"step_{tour.steps:08d}/model.safetensors"
    files = [path for path in tour.store.find(RUN) if path.endswith(copied)]
    stored = [weights(tour.store.cat_file(path)) for path in files]
    goals.add("the bucket holds these weights, once", stored == [expected], files)


def compare_records(last: Path, whole: Path, goals: Goals) -> None:
    """Compare the records of two runs."""
    records, expected = figures(last), figures(whole)
    steps = [record["step"] for record in records]
    once = steps == [record["step"] for record in expected]
    goals.add("each step is in metrics.jsonl once", once, f"{len(steps)} of {len(expected)}")
    wrong: dict[str, list[int]] = {}
    for record, other in zip(records, expected, strict=False):
        for key in record.keys() | other.keys():
            if record.get(key) != other.get(key):
                wrong.setdefault(key, []).append(other["step"])
    keys = {key for record in expected for key in record}
    first_wrong = {key: at[:5] for key, at in sorted(wrong.items())}
    seen = f"{len(keys)} keys; wrong at steps {first_wrong}"
    goals.add("equal figures at each step, as they are written", not wrong, seen)
    epochs = max(float(record["data/epochs"]) for record in expected)
    goals.add("the run reads less than an epoch", epochs < 1, f"{epochs:.2f}")


def weights_file(run: Path) -> Path:
    """Return the file with the weights of a run's newest checkpoint."""
    checkpoints = RunFolder(run).checkpoints
    return checkpoints[max(checkpoints)] / "model.safetensors"


def weights(file: bytes) -> dict[str, bytes]:
    """Return the tensors in a file."""
    return {name: tensor.tobytes() for name, tensor in load(file).items()}


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the records without figures of clocks and launches, each number as it is written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_float=str) for line in lines]
    return [
        {
            key: value
            for key, value in record.items()
            if key != "time" and not key.startswith(("perf/", "launch/"))
        }
        for record in records
    ]


def first_samples(run: Path) -> dict[int, list[str]]:
    """Return the samples by step: those of the first process, as a second one adds its samples."""
    folder = RunFolder(run)
    texts = {step: folder.sample_texts(step) for step in folder.samples}
    return {step: kept[: len(PROMPTS)] for step, kept in texts.items()}


def check_owners(tour: Tour, goals: Goals) -> None:
    """Check that launches follow each other, and that none publishes after it lost the lease."""
    taken: dict[str, float] = {}  # machine -> when it took the lease
    folders: dict[str, str] = {}  # of launches -> machine
    for request in tour.s3.requests():
        if request.method == "PUT" and request.path.endswith(f"/{LEASE}") and request.took_effect:
            taken.setdefault(request.who, request.end or request.begin)
            folders[request.path.split("/")[-2]] = request.who
    order = sorted(taken, key=lambda name: taken[name])
    in_names = [folders[folder] for folder in sorted(folders)]
    seen = sorted(folders)
    goals.add("the folders of launches are named in their order", in_names == order, seen)
    late = []
    by_name = {machine.name: machine for machine in tour.machines}
    for name, successor in itertools.pairwise(order):
        copies = by_name[name].copies()
        late += [f"{name}: {step}" for step, at in copies.items() if at > taken[successor]]
    goals.add("no machine publishes a step after it lost the lease", not late, late)
    good = {name: max(machine.copies(), default=0) for name, machine in by_name.items()}
    left = []
    for path in tour.store.find(RUN):
        match = FILE_OF_COPY.fullmatch(path)
        if match and path.endswith("/manifest.json"):
            owner = folders.get(path.split("/")[-3], "")
            if int(match[1]) > good.get(owner, 0):
                left.append(path)
    goals.add("the bucket holds no step that its launch did not publish", not left, left)


# --------------------------------------------------------------------------- the report


def describe(machine: Machine) -> dict[str, Any]:
    """Return the figures of a machine; times in seconds."""
    steps = machine.steps
    requests = machine.requests()
    begin = steps[0][0] if steps else machine.began + START_LIMIT
    reads = [one for one in requests if one.method == "GET" and one.begin < begin]
    copy_reads = [one for one in reads if "/step_" in one.path]
    data_reads = [one for one in requests if one.method == "GET" and f"/{DATA}" in one.path]
    leases = [one for one in requests if one.path.endswith(f"/{LEASE}")]
    taken = next((one for one in leases if one.method == "PUT"), None)
    found: dict[str, Any] = {
        "machine": machine.number,
        "processes": machine.processes,
        "end": machine.end,
        "code": machine.code,
        "from": steps[0][1] - 1 if steps else None,
        "to": machine.step,
        "again": max(machine.newest_before - steps[0][1] + 1, 0) if steps else None,
        "copied": sorted(machine.copies()),
        "incomplete": len(machine.incomplete),
        "copy_bytes": sum(one.sent for one in copy_reads),
        "data_bytes": sum(one.sent for one in data_reads),
        "requests": len(requests),
        "cut": sum(one.cut is not None for one in requests),
        "start": leases[0].begin - machine.began if leases else 0.0,
    }
    if taken and leases[0] is not taken:
        found["lease"] = taken.begin - leases[0].begin
    if copy_reads:
        found["download"] = (copy_reads[-1].end or copy_reads[-1].begin) - copy_reads[0].begin
    if steps:
        found["first_step"] = steps[0][0] - machine.began
        new = next((at for at, step in steps if step > machine.newest_before), None)
        found["new_ground"] = new - machine.began if new else None
    return found


def describe_requests(requests: Sequence[Request]) -> dict[str, Any]:
    """Count the requests and the cuts."""
    cuts = Counter(request.cut for request in requests if request.cut)
    return {
        "count": len(requests),
        "cut": sum(cuts.values()),
        "places": dict(cuts),
        "bytes_up": sum(request.received for request in requests),
        "bytes_down": sum(request.sent for request in requests),
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the machines, the goals and a summary."""
    head = ["machine", "processes", "from step", "ended by", "at step", "steps again"]
    head += ["s to a new step", "start", "lease", "copy", "data, model", "steps again"]
    head += ["copy, MB", "data, MB", "requests, cut"]
    print_table(head, [[*cells(one)] for one in report["machines"]])
    missed = [line for line in report["goals"] if not line["holds"]]
    for line in report["goals"]:
        print(f"{'ok' if line['holds'] else 'MISSED'}: {line['goal']} ({line['seen'][:200]})")
    moved = [one for one in report["machines"] if one["machine"] > 1 and one["from"] is not None]
    again = sum(one["again"] for one in moved)
    requests = report["requests"]
    print(
        f"\n{report['steps']:,} steps on {len(report['machines'])} machines: {again} steps made "
        f"again, {requests['cut']} of {requests['count']:,} requests cut, "
        f"{report.get('tour_seconds', math.nan):.0f} s in place of {report['whole_seconds']:.0f}, "
        f"{len(report['goals']) - len(missed)} of {len(report['goals'])} goals reached"
    )


def cells(one: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a machine."""
    parts = [one.get(part, 0.0) for part in ("start", "lease", "download")]
    first = one.get("first_step")
    new = one.get("new_ground")
    yield str(one["machine"])
    yield str(one["processes"])
    yield "" if one["from"] is None else f"{one['from']:,}"
    yield f"{one['end']}, code {one['code']}"
    yield f"{one['to']:,}"
    yield "" if one["again"] is None else str(one["again"])
    yield f"{new:.0f}" if new else ""
    for part in parts:
        yield f"{part:.1f}"
    yield f"{first - sum(parts):.1f}" if first else ""
    yield f"{new - first:.1f}" if new and first else ""
    yield f"{one['copy_bytes'] / 1e6:.1f}"
    yield f"{one['data_bytes'] / 1e6:.1f}"
    yield f"{one['requests']}, {one['cut']}"


if __name__ == "__main__":
    main()
