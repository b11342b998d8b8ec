"""Tokens per second beside nanoGPT, transformers' Trainer and litgpt: whole processes in turn.

    python benchmarks/peers.py NANOGPT_FOLDER TEXT [--sizes char4 char6 gpt2] [--rounds 3]
        [--systems NAME ...] [--batch N] [--litgpt PYTHON] [--json FILE] [--allow_busy]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, TEXT is tinyshakespeare. All train the same model
on the same tokens on a CPU, in float32 or, where it says so, bf16, eager and compiled; "nanoGPT" is
as its README runs it on a CPU, "accel_gpt, auto" as our configs ship. A round's metric is the
median time of a step after warm-up, as each system reports it. Prints medians over the rounds, ours
to each as tokens/s, and the goals; rounds are added to those that FILE holds of the same commit.
Where others kept the machine busy it warns and does not write FILE. PYTHON is one that has litgpt
(default: this one).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import (
    Metrics,
    OtherLoad,
    add_report_options,
    facts,
    headline,
    interleave,
    median,
    save,
    table,
)
from systems import CHARS, GPT2, Job, gather, has_litgpt, subjects

SIZES = {
    "char4": Job(4, 4, 128, 64, 12, CHARS, steps=220, warmup=20, window=20),
    "char6": Job(6, 6, 384, 256, 8, CHARS, steps=16, warmup=4, window=2),
    "gpt2": Job(12, 12, 768, 512, 2, GPT2, steps=8, warmup=3, window=1),
}
NAME, TRAINER = "accel_gpt", "Trainer"
AUTO, TRAINER_FORMS = f"{NAME}, auto", 4


@dataclass(frozen=True)
class Goals:
    """Ratios of tokens/s."""

    auto_to_nanogpt: float
    auto_to_trainer: float  # in its fastest form
    float32_to_nanogpt: float = 1.1


GOALS = {"char4": Goals(2.0, 1.8), "char6": Goals(3.0, 1.6), "gpt2": Goals(3.0, 1.4)}


def main() -> None:
    """Run every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--systems", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of each size's own")
    parser.add_argument("--batch", type=int, help="sequences a step, in place of each size's own")
    parser.add_argument("--litgpt", default=sys.executable)
    add_report_options(parser)
    args = parser.parse_args()
    machine, load = facts(), OtherLoad(args)
    report: dict[str, Any] = {"facts": machine, "sizes": {}}
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text())
        if before["facts"]["commit"] == machine["commit"]:
            report["sizes"] = before["sizes"]
    print(headline(machine))
    with tempfile.TemporaryDirectory() as folder:
        work, data = Path(folder), [SIZES[size].data for size in args.sizes]
        gather(args.nanogpt, args.text, work, data)
        for size in args.sizes:
            changes = {"steps": args.steps, "batch": args.batch}
            job = replace(SIZES[size], **{key: value for key, value in changes.items() if value})
            run = subjects(work, job, args.litgpt)
            if not has_litgpt(args.litgpt):
                print("litgpt is not installed and left out; name a Python that has it: --litgpt")
                del run["litgpt, compiled"]
            chosen = {name: run[name] for name in args.systems or run if name in run}
            found = interleave(chosen, args.rounds, load)
            if report["sizes"].get(size, {}).get("job") != json.loads(json.dumps(vars(job))):
                report["sizes"][size] = {"job": vars(job), "rounds": {}}  # rounds of another job
            kept = report["sizes"][size]["rounds"]
            for name, rounds in found.items():
                kept.setdefault(name, []).extend(rounds)
            print("\n" + format_size(size, job, kept) + "\n", flush=True)
            save(args.json, report, load)


def format_size(size: str, job: Job, found: dict[str, list[Metrics]]) -> str:
    """Medians of a size, ours to each, and the goals."""
    step_ms = {name: median(rounds, "step_ms") for name, rounds in found.items()}
    memory = {name: median(rounds, "memory_gb") for name, rounds in found.items()}
    mine = [name for name in step_ms if name.startswith(NAME)]
    rows = []
    for name, ms in step_ms.items():
        ratios = [f"{ms / step_ms[of]:.2f}" for of in mine]
        rows.append([name, len(found[name]), f"{ms:,.1f}", f"{1e3 * job.tokens / ms:,.0f}"])
        rows[-1] += [f"{memory[name]:.2f}", *ratios]
    title = f"{size}: {job.n_layer} layers x {job.n_embd}, {job.batch} x {job.block_size} tokens"
    head = ["", "rounds", "ms a step", "tokens/s", "GB", *(f"{name} to it" for name in mine)]
    return f"{title}\n\n{table(head, rows)}\n\n{format_goals(step_ms, GOALS[size])}"


def format_goals(step_ms: Mapping[str, float], goals: Goals) -> str:
    """Our ratios beside their goals, as far as both systems of one were measured."""
    trainers = [name for name in step_ms if name.startswith(TRAINER)]
    fastest = min(trainers, key=lambda name: step_ms[name], default=TRAINER)
    wanted = [
        (AUTO, "nanoGPT", goals.auto_to_nanogpt),
        (NAME, "nanoGPT", goals.float32_to_nanogpt),
        (AUTO, fastest, goals.auto_to_trainer),
    ]
    rows = []
    for ours, peer, goal in wanted:
        if ours in step_ms and peer in step_ms:
            ratio = step_ms[peer] / step_ms[ours]
            verdict = "reached" if ratio >= goal else "missed"
            form = f" (fastest of {len(trainers)} of {TRAINER_FORMS} forms)"
            over = f"{ours} over {peer}{form if peer in trainers else ''}"
            rows.append([over, f"{goal:.1f} x", f"{ratio:.2f} x", verdict])
    return table(["tokens/s", "goal", "measured", ""], rows)


if __name__ == "__main__":
    main()
