"""What the scripts of this folder share: whole processes in turn, medians, tables, and the facts of
the machine that a figure belongs to.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]


def call(command: Sequence[str | Path], folder: Path | None = None, **env: str) -> str:
    """Output of a command that must succeed."""
    words = [str(word) for word in command]
    # the package of this checkout, wherever the process is started
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    known = {**os.environ, "PYTHONPATH": paths, **env}
    done = subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)[:300]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def last_json(shown: str) -> Any:
    """The last line of an output, which is JSON."""
    return json.loads(shown.strip().splitlines()[-1])


def interleave(
    subjects: Mapping[str, Callable[[], Figures]], rounds: int
) -> dict[str, list[Figures]]:
    """Figures of each subject in each round; a round is one of each in turn."""
    found: dict[str, list[Figures]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name, subject in subjects.items():
            found[name].append(subject())
            shown = ", ".join(f"{key} {value:,.4g}" for key, value in found[name][-1].items())
            print(f"round {number}, {name}: {shown}", flush=True)
    return found


def pace(out: Path, skipped: int) -> Figures:
    """Median time of a step in a run's metrics.jsonl, without its first lines, and peak memory."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/step_ms" in line]
    return {
        "step_ms": statistics.median(line["perf/step_ms"] for line in lines[skipped:]),
        "memory_gb": max(line["perf/memory_gb"] for line in lines),
    }


def median(rounds: Sequence[Figures], key: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(figures[key] for figures in rounds)


def window_means(values: Sequence[float], size: int) -> list[float]:
    """Means of `size` values at a time."""
    whole = range(0, len(values) - size + 1, size)
    return [statistics.fmean(values[start : start + size]) for start in whole]


def facts(threads: int | None = None) -> dict[str, Any]:
    """Hardware, versions and commit."""
    import torch

    from accel_gpt.run.environment import commit, device_name, package_versions

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
        "load": os.getloadavg()[0],
    }


def headline(known: Mapping[str, Any]) -> str:
    """The facts in a line."""
    versions = known["versions"]
    return (
        f"{known['device']}, {known['cores']} cores, {known['threads']} threads, torch "
        f"{versions['torch']}, transformers {versions.get('transformers', '-')}, commit "
        f"{known['commit']}, {known['date']}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def save(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report, where one is asked for."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that `work` takes."""
    start = clock()
    work()
    return clock() - start
