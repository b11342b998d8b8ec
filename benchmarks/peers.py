"""Tokens per second beside nanoGPT, transformers' Trainer and litgpt: whole processes in turn.

    python benchmarks/peers.py NANOGPT_FOLDER TEXT [--sizes char4 char6 gpt2] [--rounds 3]
        [--systems NAME ...] [--batch N] [--litgpt PYTHON] [--json FILE]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, TEXT is tinyshakespeare. All train the same model
on the same tokens on a CPU, in float32 or, where it says so, bf16, eager and compiled. A round's
figure is the median time of a step after warm-up, as each system reports it. Prints medians over
the rounds and ours to each, as tokens/s; rounds are added to those that FILE holds of the same
commit. PYTHON is one that has litgpt (default: this one).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Figures, facts, headline, interleave, median, save, table
from systems import CHARS, GPT2, Job, gather, has_litgpt, smaller, subjects

SIZES = {
    "char4": Job(4, 4, 128, 64, 12, CHARS, steps=220, warmup=20, window=20),
    "char6": Job(6, 6, 384, 256, 8, CHARS, steps=16, warmup=4, window=2),
    "gpt2": Job(12, 12, 768, 512, 2, GPT2, steps=8, warmup=3, window=1),
}
GOALS = {  # ours to nanoGPT's tokens/s, and to the Trainer's
    "char4": (1.5, 2.0),
    "char6": (3.0, 3.0),
    "gpt2": (4.0, 4.0),
}
NAME = "accel_gpt"


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
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    known = facts()
    report: dict[str, Any] = {"facts": known, "sizes": {}}
    if asked.json and asked.json.exists():
        before = json.loads(asked.json.read_text())
        if before["facts"]["commit"] == known["commit"]:
            report["sizes"] = before["sizes"]
    print(headline(known))
    with tempfile.TemporaryDirectory() as folder:
        work, data = Path(folder), [SIZES[size].data for size in asked.sizes]
        gather(asked.nanogpt, asked.text, work, data)
        for size in asked.sizes:
            given = {"steps": asked.steps, "batch": asked.batch}
            job = smaller(SIZES[size], **{key: value for key, value in given.items() if value})
            run = subjects(work, job, asked.litgpt)
            if not has_litgpt(asked.litgpt):
                print("litgpt is not installed and left out; name a Python that has it: --litgpt")
                del run["litgpt, compiled"]
            chosen = {name: run[name] for name in asked.systems or run if name in run}
            found = interleave(chosen, asked.rounds)
            if report["sizes"].get(size, {}).get("job") != json.loads(json.dumps(vars(job))):
                report["sizes"][size] = {"job": vars(job), "rounds": {}}  # rounds of another job
            kept = report["sizes"][size]["rounds"]
            for name, rounds in found.items():
                kept.setdefault(name, []).extend(rounds)
            save(asked.json, report)
            print("\n" + show(size, job, kept) + "\n", flush=True)


def show(size: str, job: Job, found: dict[str, list[Figures]]) -> str:
    """Medians of a size, and ours to each."""
    step = {name: median(rounds, "step_ms") for name, rounds in found.items()}
    memory = {name: median(rounds, "memory_gb") for name, rounds in found.items()}
    mine = [name for name in step if name.startswith(NAME)]
    rows = []
    for name, ms in step.items():
        ratios = [f"{ms / step[of]:.2f}" for of in mine]
        rows.append([name, len(found[name]), f"{ms:,.1f}", f"{1e3 * job.tokens / ms:,.0f}"])
        rows[-1] += [f"{memory[name]:.2f}", *ratios]
    to_nanogpt, to_trainer = GOALS[size]
    title = (
        f"{size}: {job.n_layer} layers x {job.n_embd}, {job.batch} x {job.block_size} tokens "
        f"(goals: {to_nanogpt} x nanoGPT, {to_trainer} x Trainer)"
    )
    head = ["", "rounds", "ms a step", "tokens/s", "GB", *(f"{name} to it" for name in mine)]
    return f"{title}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
