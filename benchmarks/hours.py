"""A run of two hours on a CPU that is killed every ten minutes and moved once.

    python benchmarks/hours.py [--out runs/hours] [--budget 2h] [--kill_every 600]

1. Text: the documentation and licences of the packages that the README's test command installs, and
   of Python's standard library. One document a module (its docstrings) or a file (METADATA,
   LICENSE, .md, .rst, .txt). A paragraph that stood before is left out. About 53 MB.
2. `accel-gpt train laptop --data.text text --train.budget BUDGET`, killed by SIGKILL every
   `--kill_every` seconds and started again with the same command. After half of the budget, the
   folder that it stands in gets another name: OUT/first becomes OUT/second.
3. `evaluate` on the whole val split, `doctor`, `report`, and two samples for each of five prompts,
   the first two that come.

Prints a table of the launches and writes OUT/hours.json. All of it is kept in OUT: the same command
goes on after an interruption of this script, too.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import OURS, ROOT, print_table, read_records, run_command, save_report, start_report

from accel_gpt.config.options import duration

RUN = "runs/hours"
PROMPTS = ("The", "Returns", "Parameters", "This function", "If you want to")
FEWEST_CHARACTERS = 200  # of a document
MOST_CHARACTERS = 200_000  # of a file; larger ones are tables
SHORT_PARAGRAPH = 60  # characters; a shorter one may come again
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Make the text, train, and look at the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hours"))
    parser.add_argument("--budget", default="2h")
    parser.add_argument("--kill_every", type=float, default=600, help="seconds")
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
        launches.append(launch(first if first.exists() else second, args.budget, args.kill_every))
        print(launches[-1], flush=True)
        save_report(file, report)
    report |= look_at(second)
    save_report(file, report)
    print_table(
        ["launch", "folder", "minutes", "steps in metrics", "newest checkpoint", "exit code"],
        [
            [
                str(number),
                one["folder"],
                f"{one['seconds'] / 60:.1f}",
                f"{one['step']:,}",
                f"{one['checkpoint']:,}",
                str(one["exit_code"]),
            ]
            for number, one in enumerate(launches, 1)
        ],
    )


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


def launch(folder: Path, budget: str, kill_every: float) -> dict[str, Any]:
    """Start the run, or start it again; kill it after `kill_every` seconds."""
    words = ["train", "laptop", "--data.text", "text", "--train.budget", budget]
    words += ["--out_dir", RUN, *(word for one in PROMPTS for word in ("--sample.prompts", one))]
    began = time.monotonic()
    with (folder / "terminal.txt").open("a") as terminal:
        process = subprocess.Popen(
            [sys.executable, *OURS, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=terminal,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(kill_every)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            exit_code = process.wait()
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
    """Evaluate, examine and report the finished run, and write samples."""

    def tell(*words: str) -> str:
        return run_command([sys.executable, *OURS, *words], folder=folder)

    return {
        "evaluate": json.loads(tell("evaluate", RUN, "--tokens", "null", "--json")),
        "doctor": json.loads(tell("doctor", RUN, "--json")),
        "report": tell("report", RUN),
        "samples": {one: tell("sample", RUN, "--prompt", one, "--num", "2") for one in PROMPTS},
    }


if __name__ == "__main__":
    main()
