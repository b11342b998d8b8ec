"""Helpers of the scripts here: processes in turn, medians, tables, facts of the machine."""

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

import torch

from accel_gpt.training.machine import commit, device_name, package_versions

ROOT = Path(__file__).resolve().parents[1]
Metrics = dict[str, float]


def run_command(command: Sequence[str | Path], folder: Path | None = None, **env: str) -> str:
    """Run a command in `folder` and return its output; exit with its last lines if it fails.

    The command imports accel_gpt from this checkout, whatever its folder is.
    """
    words = [str(word) for word in command]
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)[:300]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def last_json(output: str) -> Any:
    """Parse the last line of an output as JSON."""
    return json.loads(output.strip().splitlines()[-1])


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes, with what a GPU still computes for it."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleave(
    subjects: Mapping[str, Callable[[], Metrics]], rounds: int
) -> dict[str, list[Metrics]]:
    """Measure all subjects in turn, `rounds` times, so that a drift of the machine hits all."""
    found: dict[str, list[Metrics]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name, measure in subjects.items():
            metrics = measure()
            found[name].append(metrics)
            line = ", ".join(f"{key} {value:,.4g}" for key, value in metrics.items())
            print(f"round {number}, {name}: {line}", flush=True)
    return found


def median(rounds: Sequence[Metrics], key: str) -> float:
    """Return the median of one metric over the rounds."""
    return statistics.median(metrics[key] for metrics in rounds)


def window_means(values: Sequence[float], size: int) -> list[float]:
    """Return the means of `size` values at a time."""
    starts = range(0, len(values) - size + 1, size)
    return [statistics.fmean(values[start : start + size]) for start in starts]


def flags(options: Mapping[str, object]) -> list[str]:
    """Write options as the words of a command line; None and booleans as YAML has them."""
    words = []
    for key, value in options.items():
        words.append(f"--{key}")
        words.append(json.dumps(value) if value is None or value in (True, False) else str(value))
    return words


def machine_facts() -> dict[str, Any]:
    """Describe the machine, its versions and this checkout: what a figure belongs to."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory / 1e9, 1),
        "load_average": os.getloadavg()[0],  # of the last minute: 0 on an idle machine
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **package_versions()},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def headline(facts: Mapping[str, Any]) -> str:
    """Write the facts as one line."""
    parts = [
        str(facts["device"]),
        f"{facts['cores']} cores",
        f"{facts['threads']} threads",
        f"load {facts['load_average']:.1f}",
        f"torch {facts['versions']['torch']}",
        f"commit {facts['commit']}",
        str(facts["date"]),
    ]
    return ", ".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def save_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report as JSON if `path` is given."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
