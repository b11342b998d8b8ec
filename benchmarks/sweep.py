"""A table of short runs that differ in a few keys: which values learn fastest.

    python benchmarks/sweep.py CONFIG.yaml "" "--optim.muon_lr 0.02" ... [--seeds 1337 1338]
        [--common "--train.max_steps 100"] [--threads 1] [--out sweep.json]

Each text in quotes is one try: what is set over the config, and over --common, which all share. The
runs follow one another, each in a process of its own, without samples and checkpoints but the last,
and evaluate at their end unless --common says more. Prints val loss and bits per byte, means over
the seeds, with tokens and the seconds of training (evaluation included); --out adds a line of JSON
for each run, with its whole curve.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

from accel_gpt import train
from accel_gpt.console import run_main

QUIET = "--eval.every 0 --sample.every 0 --checkpoint.every 0 --log.every 1000 --log.level warning"
QUIET += " --log.trackers []"


def main() -> None:
    """Run every try with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("tries", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--common", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    print("| set over the config | val loss | spread | bits per byte | tokens | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    for options in asked.tries:
        found = [run(asked, options, seed) for seed in asked.seeds]
        print(row(options, found), flush=True)


def run(asked: argparse.Namespace, options: str, seed: int) -> dict[str, Any] | None:
    """The curve and the last figures of one run; None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [asked.config, *shlex.split(f"{QUIET} {asked.common} {options}")]
        words += ["--seed", str(seed), "--out_dir", f"{folder}/run"]
        words += ["--train.cpu_threads", str(asked.threads)]
        # a copy of this process, in which torch is imported already and has not computed anything
        child = multiprocessing.get_context("fork").Process(target=launch, args=(words,))
        child.start()
        child.join()
        if child.exitcode:
            return None
        lines = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    curve = [record for line in lines if "eval/val_loss" in (record := json.loads(line))]
    found = {"options": options, "common": asked.common, "seed": seed, "curve": curve}
    if asked.out:
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return found


def launch(words: list[str]) -> None:
    """Train, without a word, in a child process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(run_main(train.main, words))


def row(options: str, found: list[dict[str, Any] | None]) -> str:
    """One try as a line of the table."""
    last = [one["curve"][-1] for one in found if one]
    if not last:
        return f"| `{options}` | failed | | | | |"
    losses = [record["eval/val_loss"] for record in last]
    bits = statistics.mean(record["eval/val_bits_per_byte"] for record in last)
    seconds = statistics.mean(record["time"] for record in last)
    return (
        f"| `{options or 'as it is'}` | {statistics.mean(losses):.4f} "
        f"| {max(losses) - min(losses):.4f} | {bits:.4f} | {last[0]['tokens']:,} | {seconds:.1f} |"
    )


if __name__ == "__main__":
    main()
