"""How long it takes until something happens: imports, the help, the first step, eager and compiled.

    python benchmarks/startup.py CONFIG.yaml [--rounds 5] [--compiled 1] [--json FILE]
        [--allow_busy] [--section.key value ...]

Whole processes in turn, with the data prepared. Imports and the help are the time of a process less
that of one that does nothing. The first step is counted from the moment that `import torch` has
returned to the end of the first update; compiled, from an empty cache (cold) and from the cache
that this left (warm), in --compiled rounds. Prints medians.
"""

import argparse
import functools
import shutil
import sys
import tempfile
from pathlib import Path

from common import (
    Metrics,
    OtherLoad,
    add_report_options,
    call,
    facts,
    headline,
    interleave,
    last_json,
    median,
    save,
    table,
    timed,
)

from accel_gpt.config.parse import load_config
from accel_gpt.training.setup import ensure_data

GOALS = {"accel-gpt --help": 0.3, "first step": 1.5}  # seconds
IMPORTS = (
    "accel_gpt.cli",
    "accel_gpt.config.parse",
    "torch",
    "accel_gpt.model.gpt",
    "accel_gpt.train",
)
FIRST = """
import json, os, sys, time
import torch
start = time.perf_counter()
from accel_gpt.cli import main
from accel_gpt import train
update = train.update
def first(run):
    update(run)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print()
    print(json.dumps({"s": time.perf_counter() - start}), flush=True)
    os._exit(0)
train.update = first
sys.argv.insert(1, "train")
main()
"""


def main() -> None:
    """Time everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", type=int, default=1)
    add_report_options(parser)
    args, options = parser.parse_known_args()
    words = [str(args.config), *options]
    ensure_data(load_config(words, "benchmarks/startup.py").data)
    machine, load = facts(), OtherLoad(args)
    with tempfile.TemporaryDirectory() as folder:
        run = functools.partial(first_step, Path(folder), words)
        quick = {"nothing": lambda: seconds("-c", "pass")}
        quick |= {f"import {n}": functools.partial(seconds, "-c", f"import {n}") for n in IMPORTS}
        quick["accel-gpt --help"] = lambda: seconds("-m", "accel_gpt.cli", "--help")
        quick["first step"] = run
        found = interleave(quick, args.rounds, load)
        slow = {"first step, compiled, cold": functools.partial(run, compiled=True, cold=True)}
        slow["first step, compiled, warm"] = functools.partial(run, compiled=True)
        found |= interleave(slow, args.compiled, load)
    found = {name: rounds for name, rounds in found.items() if rounds}
    nothing = median(found.pop("nothing"), "s")
    rows = []
    for name, rounds in found.items():
        spent = median(rounds, "s") - (0 if name.startswith("first") else nothing)
        rows.append([name, f"{spent:.3f}", GOALS.get(name, "")])
    print(headline(machine))
    print(table([f"above {nothing:.3f} s of Python", "s", "goal"], rows))
    save(args.json, {"facts": machine, "config": str(args.config), "rounds": found}, load)


def seconds(*words: str) -> Metrics:
    """Of a whole process."""
    return {"s": timed(lambda: call([sys.executable, *words]))}


def first_step(
    folder: Path, words: list[str], compiled: bool = False, cold: bool = False
) -> Metrics:
    """From `import torch` to the end of the first update of a new run."""
    out, cache = folder / "run", folder / "cache"
    for old in (out, cache)[: 1 + cold]:
        shutil.rmtree(old, ignore_errors=True)
    options = ["--out_dir", str(out), "--train.compile", str(compiled).lower()]
    command = [sys.executable, "-c", FIRST, *words, *options]
    found: Metrics = last_json(call(command, TORCHINDUCTOR_CACHE_DIR=str(cache)))
    return found


if __name__ == "__main__":
    main()
