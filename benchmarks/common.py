"""What the scripts of this folder share: whole processes in turn, medians, tables, the facts of the
machine that a figure belongs to, and how busy others kept it meanwhile.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Metrics = dict[str, float]
STAT = Path("/proc/stat")
BUSY_SHARE = 0.05  # of the cores' time; assumption: less is within the spread of the rounds
IDLE_SECONDS = 1.0  # how long the machine is watched before the first process


def call(command: Sequence[str | Path], folder: Path | None = None, **env: str) -> str:
    """Output of a command that must succeed."""
    words = [str(word) for word in command]
    # the package of this checkout, wherever the process is started
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    full = {**os.environ, "PYTHONPATH": paths, **env}
    done = subprocess.run(words, cwd=folder, env=full, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)[:300]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def last_json(output: str) -> Any:
    """The last line of an output, which is JSON."""
    return json.loads(output.strip().splitlines()[-1])


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds: of all cores since boot, and of this process with the children that ended."""

    total: float
    busy: float
    steal: float  # taken by other virtual machines
    own: float

    @classmethod
    def parse(cls, stat: str, own: float, ticks_per_second: int = 100) -> "CpuTimes":
        """From the first line of /proc/stat, proc_stat(5); guest time is in user time already."""
        ticks = [int(word) / ticks_per_second for word in stat.split()[1:9]]
        user, nice, system, idle, iowait, irq, softirq, steal = ticks
        busy = user + nice + system + irq + softirq
        return cls(busy + idle + iowait + steal, busy, steal, own)

    @classmethod
    def sample(cls) -> "CpuTimes | None":
        """Now; None on systems without /proc/stat."""
        if not STAT.exists():
            return None
        usage = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(used.ru_utime + used.ru_stime for used in usage)
        return cls.parse(STAT.read_text(), own, os.sysconf("SC_CLK_TCK"))

    def shares_since(self, before: "CpuTimes") -> Metrics:
        """Shares of the cores' time that steal and processes which are not ours took."""
        total = max(self.total - before.total, 1e-9)
        others = self.busy - before.busy - (self.own - before.own)
        return {"steal": (self.steal - before.steal) / total, "others": max(others / total, 0.0)}


class OtherLoad:
    """What others took of the cores while we measured; refuses to write a busy machine's figures.

    A child counts as ours once it has been waited for, so laps begin and end without children.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.allowed, self.busy = args.allow_busy, False
        self.before = CpuTimes.sample()
        if self.before is None:
            print(f"there is no {STAT}: cannot tell whether the machine is busy")
            return
        time.sleep(IDLE_SECONDS)
        self.lap("before the start")
        self.require_idle(args.json)
        self.busy = False  # what counts is the load beside the rounds

    def lap(self, name: str) -> Metrics:
        """Shares since the last lap, with a warning where they are too large; {} if unknown."""
        now, before = CpuTimes.sample(), self.before
        if now is None or before is None:
            return {}
        self.before, shares = now, now.shares_since(before)
        if sum(shares.values()) > BUSY_SHARE:
            self.busy = True
            print(
                f"WARNING: the machine is busy, {name}: steal {shares['steal']:.1%}, other "
                f"processes {shares['others']:.1%} of the cores' time",
                flush=True,
            )
        return shares

    def require_idle(self, path: Path | None) -> None:
        """Exit with code 2 if a report is to be written and the machine was busy."""
        if path and self.busy and not self.allowed:
            print(
                f"{path} is not written, as others took more than {BUSY_SHARE:.0%} of the cores' "
                "time; run it again when the machine is idle, or with --allow_busy",
                file=sys.stderr,
            )
            sys.exit(2)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--allow_busy`."""
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument(
        "--allow_busy", action="store_true", help="write it, with the shares, of a busy machine too"
    )


def interleave(
    subjects: Mapping[str, Callable[[], Metrics]], rounds: int, load: OtherLoad | None = None
) -> dict[str, list[Metrics]]:
    """Metrics of each subject in each round, one of each in turn, with the round's other load."""
    found: dict[str, list[Metrics]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name, subject in subjects.items():
            found[name].append(subject())
            line = ", ".join(f"{key} {value:,.4g}" for key, value in found[name][-1].items())
            print(f"round {number}, {name}: {line}", flush=True)
        shares = load.lap(f"round {number}") if load and subjects else {}
        for name in subjects:
            found[name][-1] |= shares
    return found


def pace(out: Path, skipped: int) -> Metrics:
    """Median time of a step in a run's metrics.jsonl, without its first lines, and peak memory."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/step_ms" in line]
    return {
        "step_ms": statistics.median(line["perf/step_ms"] for line in lines[skipped:]),
        "memory_gb": max(line["perf/memory_gb"] for line in lines),
    }


def median(rounds: Sequence[Metrics], key: str) -> float:
    """The median of one metric over the rounds."""
    return statistics.median(metrics[key] for metrics in rounds)


def window_means(values: Sequence[float], size: int) -> list[float]:
    """Means of `size` values at a time."""
    whole = range(0, len(values) - size + 1, size)
    return [statistics.fmean(values[start : start + size]) for start in whole]


def facts(threads: int | None = None) -> dict[str, Any]:
    """Hardware, versions and commit."""
    import torch

    from accel_gpt.training.machine import commit, device_name, package_versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "memory_gb": round(memory / 1e9, 1),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **package_versions()},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def headline(machine: Mapping[str, Any]) -> str:
    """The facts in a line."""
    versions = machine["versions"]
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch "
        f"{versions['torch']}, transformers {versions.get('transformers', '-')}, commit "
        f"{machine['commit']}, {machine['date']}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def save(path: Path | None, report: Mapping[str, Any], load: OtherLoad | None = None) -> None:
    """Write the report if there is a path; exits with code 2 if the machine was busy."""
    if load:
        load.require_idle(path)
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that `work` takes."""
    start = clock()
    work()
    return clock() - start
