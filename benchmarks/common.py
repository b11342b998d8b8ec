"""Helpers of the scripts here: commands, systems measured in turn, tables, facts of the machine."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from accel_gpt.launch.machine import commit, device_name, package_versions

ROOT = Path(__file__).resolve().parents[1]
OURS = ("-m", "accel_gpt")
SCHEMES = {"light": "", "dark": "_dark"}  # of a picture: the end of its file's name
INK, PAPER = "#d9dce1", "#1b1e24"  # of dark pictures
DARK = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "legend.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), PAPER),
    "legend.edgecolor": "#3d444d",
    "grid.color": "#6b7280",
    "axes.prop_cycle": "cycler('color', "
    "['7fb0ff', 'ffab5c', '56cfa9', 'ff8d75', 'c79bf2', 'c9a58f'])",
}
T = TypeVar("T")
Metrics = dict[str, float]
Subjects = Mapping[str, Callable[[], Metrics]]


def make_parser(doc: str | None, peer: bool) -> argparse.ArgumentParser:
    """Return a parser with the options of every script; `peer`: it takes nanoGPT and a text."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if peer:
        parser.add_argument("nanogpt", type=Path)
        parser.add_argument("text", type=Path)
    parser.add_argument("--json", type=Path, help="file for the report")
    return parser


def run_command(
    command: Sequence[str | Path],
    folder: Path | None = None,
    accepted: Sequence[int] = (0,),
    **env: str,
) -> str:
    """Run a command in `folder` and return its output; exit with its last lines if it fails.

    `accepted`: exit codes that are no failure. The command imports accel_gpt from this checkout,
    whatever its folder is.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in accepted:
        sys.exit(f"{' '.join(words)[:300]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def python_path() -> str:
    """Return the PYTHONPATH of children: this checkout, then what this process has."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def last_json(output: str) -> Any:
    """Parse the last line of an output as JSON."""
    return json.loads(output.strip().splitlines()[-1])


def read_records(out_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes on this machine and its GPU."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def attempt(what: str, measure: Callable[[], T]) -> T | None:
    """Measure; if that fails, print the reason and return None: other figures are not lost."""
    try:
        return measure()
    except SystemExit as stopped:  # of `run_command`: the end of an output
        print(f"{what}: not measured: {str(stopped).strip()[-2000:]}", flush=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        print(f"{what}: not measured: {type(error).__name__}: {reason[:300]}", flush=True)
    return None


def interleave(subjects: Subjects, rounds: int) -> dict[str, list[Metrics]]:
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


def flags(options: Mapping[str, object]) -> list[str]:
    """Write options as the words of a command line; None and booleans as YAML has them."""
    words = []
    for key, value in options.items():
        words.append(f"--{key}")
        words.append(json.dumps(value) if value is None or value in (True, False) else str(value))
    return words


def start_report() -> dict[str, Any]:
    """Print the machine, the versions and the commit that figures belong to; return them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # of the last minute: 0 on an idle machine
        "versions": dict(package_versions()),
        "card": describe_card(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }
    for key, value in facts.items():
        print(f"{key}: {value}")
    return {"facts": facts}


def describe_card() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN, Triton and the driver, and the limits of the card."""
    found = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    query = "driver_version,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found["driver, power limit, largest clock"] = done.stdout.strip().splitlines()[0]
    return found


def save_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report as JSON if `path` is given."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def print_rule(figure: str, condition: str, holds: bool, consequence: str) -> None:
    """Print a figure and the decision that it serves: what follows if a condition holds."""
    answer = "yes" if holds else "no"
    print(f"rule: {figure}. If {condition} ({answer}): {consequence}", flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print()
    for line in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(line) + " |")
    print(flush=True)


# --------------------------------------------------------------------------- pictures


def draw_schemes(path: Path, draw: Callable[[], Any]) -> None:
    """Write the figure that `draw` returns as PNG, and for dark pages as NAME_dark.png."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for scheme, end in SCHEMES.items():
        with pyplot.rc_context(DARK if scheme == "dark" else {}):
            figure = draw()
            figure.savefig(path.with_stem(path.stem + end), format="png", dpi=150)
            pyplot.close(figure)
