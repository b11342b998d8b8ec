"""A run of two hours on a CPU that is killed every ten minutes and moved once.

    python benchmarks/hours.py [--out runs/hours] [--budget 2h] [--kill_every 600] [--docs docs]

1. Text: the documentation and licences of the packages that the README's test command installs, and
   of Python's standard library. One document a module (its docstrings) or a file (METADATA,
   LICENSE, .md, .rst, .txt). A paragraph that stood before is left out. About 53 MB.
2. `accel-gpt train laptop --data.text text --train.budget BUDGET`, killed by SIGKILL every
   `--kill_every` seconds and started again with the same command. After half of the budget, the
   folder that it stands in gets another name: OUT/first becomes OUT/second.
3. `evaluate` on the whole val split, `doctor`, `report`, two samples for each of five prompts, the
   first two that come, and `plan` for five GPUs.

Prints tables of the launches and of the GPUs, and writes OUT/hours.json. All of it is kept in OUT:
the same command goes on after an interruption of this script, too. With --docs, it writes the
picture images/hours.png and the report explanation/run-of-hours-report.html there.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    OURS,
    draw_schemes,
    print_table,
    python_path,
    read_records,
    run_command,
    save_report,
    start_report,
)

from accel_gpt.config.options import duration

RUN = "runs/hours"
PROMPTS = ("The", "Returns", "Parameters", "This function", "If you want to")
FEWEST_CHARACTERS = 200  # of a document
MOST_CHARACTERS = 200_000  # of a file; larger ones are tables
SHORT_PARAGRAPH = 60  # characters; a shorter one may come again
GPUS = {"t4": 0.3, "rtx 3060": 0.1, "rtx 4090": 0.5, "a100": 1.3, "h100": 2.5}  # price: assumption
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Make the text, train, and look at the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hours"))
    parser.add_argument("--budget", default="2h")
    parser.add_argument("--kill_every", type=float, default=600, help="seconds")
    parser.add_argument("--docs", type=Path, help="folder of the docs, for the picture and report")
    args = parser.parse_args()
    half = (duration("--budget", args.budget) or 0) / 2
    file = args.out / "hours.json"
    report = json.loads(file.read_text()) if file.exists() else start_report()
    first, second = args.out / "first", args.out / "second"
    if "text" not in report:
        report["text"] = write_text(first / "text")
        save_report(file, report)
    launches: list[dict[str, Any]] = report.setdefault("launches", [])
    while not launches or launches[-1]["exit_code"]:
        if first.exists() and sum(one["seconds"] for one in launches) > half:
            first.rename(second)
        words = ["train", "laptop", "--data.text", "text", "--train.budget", args.budget]
        words += [word for one in PROMPTS for word in ("--sample.prompts", one)]
        launches.append(launch(first if first.exists() else second, words, args.kill_every))
        print(launches[-1], flush=True)
        save_report(file, report)
    report |= look_at(second)
    save_report(file, report)
    if args.docs:
        publish(second / RUN, report, args.docs)
    head = ["launch", "folder", "minutes", "steps", "newest checkpoint", "exit code"]
    print_table(head, [[*launch_cells(n, one)] for n, one in enumerate(launches, 1)])
    print_table(
        ["GPU", "minutes", "cost", "if an hour costs"],
        [
            [gpu, f"{60 * plan['hours']:.1f}", f"{plan['cost']:.3f}", f"{GPUS[gpu]:.2f}"]
            for gpu, plan in report["plans"].items()
        ],
    )


def launch_cells(number: int, one: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a launch."""
    yield str(number)
    yield one["folder"]
    yield f"{one['seconds'] / 60:.1f}"
    yield f"{one['step']:,}"
    yield f"{one['checkpoint']:,}"
    yield str(one["exit_code"])


# --------------------------------------------------------------------------- text


def write_text(folder: Path) -> dict[str, int]:
    """Write one file a document; return how many, and their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    count = size = 0
    for name, paragraphs in read_documents():
        kept = []
        for paragraph in paragraphs:
            words = paragraph.strip()
            if words in seen:
                continue
            if len(words) > SHORT_PARAGRAPH:
                seen.add(words)
            if words:
                kept.append(paragraph)
        document = "\n\n".join(kept) + "\n"
        if len(document) < FEWEST_CHARACTERS:
            continue
        (folder / f"{name.replace('/', '.')}.txt"[-200:]).write_text(document, encoding="utf-8")
        count += 1
        size += len(document.encode())
    return {"documents": count, "bytes": size}


def read_documents() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the paragraphs of each module and each file of documentation."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    for root in (packages, library):
        for path in sorted(root.rglob("*")):
            if root == library and {"site-packages", "dist-packages"} & set(path.parts):
                continue
            is_text = path.suffix in (".md", ".rst", ".txt") or path.name == "METADATA"
            if path.suffix != ".py" and not is_text and "LICENSE" not in path.name:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if path.suffix == ".py":
                yield str(path.relative_to(root)), docstrings(text)
            elif len(text) <= MOST_CHARACTERS:
                yield str(path.relative_to(root)), text.split("\n\n")


def docstrings(source: str) -> list[str]:
    """Return the paragraphs of a module's docstrings, each after the name of what it describes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    paragraphs: list[str] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            name = "" if isinstance(node, ast.Module) else f"{node.name}: "
            paragraphs += (name + text).split("\n\n")
        inner = getattr(node, "body", [])
        pending += reversed(inner if isinstance(inner, list) else [])
    return paragraphs


# --------------------------------------------------------------------------- the run


def launch(folder: Path, words: Sequence[str], kill_every: float) -> dict[str, Any]:
    """Start or resume the run; kill it after `kill_every` seconds."""
    began = time.monotonic()
    with (folder / "terminal.txt").open("a") as terminal:
        process = subprocess.Popen(
            [sys.executable, *OURS, *words, "--out_dir", RUN],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=terminal,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(kill_every)
        except BaseException as error:  # also if this script is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            exit_code = process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    if exit_code not in (0, -signal.SIGKILL):
        sys.exit(f"the run ended with code {exit_code}: see {folder}/terminal.txt")
    metrics = folder / RUN / "metrics.jsonl"
    checkpoints = sorted((folder / RUN / "checkpoints").glob("step_*[0-9]"))
    return {
        "folder": folder.name,
        "seconds": time.monotonic() - began,
        "step": read_records(folder / RUN)[-1]["step"] if metrics.exists() else 0,
        "checkpoint": int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0,
        "exit_code": exit_code,
    }


def look_at(folder: Path) -> dict[str, Any]:
    """Evaluate, examine and report the finished run, write samples, and plan it for GPUs."""

    def tell(*words: str | Path) -> str:
        return run_command([sys.executable, *OURS, *words], folder=folder)

    steps = str(read_records(folder / RUN)[-1]["step"])
    plans = {}
    for gpu, price in GPUS.items():
        words = ["--gpu", gpu, "--price", str(price), "--train.max_steps", steps]
        plans[gpu] = json.loads(tell("plan", Path(RUN, "config.yaml"), *words, "--json"))["time"]
    return {
        "evaluate": json.loads(tell("evaluate", RUN, "--tokens", "null", "--json")),
        "doctor": json.loads(tell("doctor", RUN, "--json")),
        "report": tell("report", RUN),
        "samples": {one: tell("sample", RUN, "--prompt", one, "--num", "2") for one in PROMPTS},
        "plans": plans,
    }


# --------------------------------------------------------------------------- the docs


def publish(run: Path, report: dict[str, Any], docs: Path) -> None:
    """Write the picture and the report of the run into the docs."""
    shutil.copy(run / "report.html", docs / "explanation/run-of-hours-report.html")
    compared = next(line for line in report["doctor"]["lines"] if line["name"] == "counting")
    others = dict(re.findall(r"(5-gram|lzma) ([\d.]+)", compared["compared"]))
    moved = max(one["checkpoint"] for one in report["launches"] if one["folder"] == "first")
    draw_schemes(docs / "images/hours.png", lambda: draw(run, others, moved))


def draw(run: Path, others: dict[str, str], moved: int) -> Any:
    """Draw bits per byte over hours, with the kills, and return the figure.

    `others`: bits per byte of what the model is compared with. `moved`: the step at which the
    run went on in the other folder.
    """
    from matplotlib import pyplot

    records = read_records(run)
    evaluated = [one for one in records if "eval/val_bits_per_byte" in one]
    last = evaluated[-1]
    bits = last["eval/val_bits_per_byte"] / last["eval/val_loss"]  # of a nat per token
    hours = [one["time"] / 3600 for one in records if "train/loss" in one]
    losses = [bits * one["train/loss"] for one in records if "train/loss" in one]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot(hours, losses, linewidth=0.8, alpha=0.5, label="train")
    axes.plot(
        [one["time"] / 3600 for one in evaluated],
        [one["eval/val_bits_per_byte"] for one in evaluated],
        marker="o",
        markersize=3,
        label="held-out documents",
    )
    launches = json.loads((run / "run.json").read_text())["launches"]
    steps = [one["step"] for one in records]
    times = [one["time"] / 3600 for one in records]
    labels = {"killed, resumed": ("C3", "--"), "killed, moved, resumed": ("C4", "-")}
    for one in launches[1:]:
        label = "killed, moved, resumed" if one["step"] == moved else "killed, resumed"
        color, style = labels[label]
        seen = label in axes.get_legend_handles_labels()[1]
        axes.axvline(
            float(np.interp(one["step"], steps, times)),
            color=color,
            linewidth=1,
            linestyle=style,
            label=None if seen else label,
        )
    for name, value in others.items():
        axes.axhline(float(value), color="C5", linewidth=0.8, linestyle=":")
        axes.annotate({"lzma": "xz"}.get(name, name), (0.4 * max(hours), float(value)), va="bottom")
    axes.set(xlabel="hours", ylabel="bits per byte", ylim=(1.0, 3.2))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return figure


if __name__ == "__main__":
    main()
