"""Wall time to nanoGPT's val loss, and the loss after its budget: the fast recipe beside nanoGPT.

    python benchmarks/time_to_loss.py NANOGPT_FOLDER TEXT [--seeds 5] [--budget_seeds 5]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, driven unmodified (in a copy) with the CPU
settings of its README, 2,000 steps; TEXT is tinyshakespeare. Ours is
configs/fast_shakespeare_cpu.yaml on the same text and characters. They run in turn, seed by seed;
then, for --budget_seeds, ours once more with as many tokens and with as much time as nanoGPT took.

The losses of both are those of the whole val split in windows of the model's context: ours as it
evaluates itself every --every steps, nanoGPT's of checkpoints that it saves every 50 (its own
figure is of a few random windows). A time is that of the first such loss of at most --target; it
counts training steps, evaluation and saving are left out of both. A run that never reaches it
counts as its whole time, and is told. "with the start" adds what a process takes before its first
step; ours, as it stands, is the whole command, its one evaluation and its checkpoint included.
Prints each run, means and spreads; --out writes them as JSON.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, call
from systems import CHARS, gather

CONFIG = ROOT / "configs/fast_shakespeare_cpu.yaml"
STEPS, EVERY, FIRST = 2000, 50, 1500  # of nanoGPT: its steps, between checkpoints, first looked at
TOKENS = STEPS * 12 * 64
NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters=2000 "
    f"--dropout=0.0 --max_iters={STEPS} --eval_interval={EVERY} --always_save_checkpoint=True"
)
# nanoGPT has a fixed seed and one name for all checkpoints; its files stay as they are
DRIVER = """
import runpy, sys, torch
seed, save = int(sys.argv.pop(1)), torch.save
plain = torch.manual_seed
torch.manual_seed = lambda number: plain(number + seed)
torch.save = lambda kept, path: save(kept, f"{path}.{kept['iter_num']}")
runpy.run_path("train.py", run_name="__main__")
"""
SCORE = """
import sys, numpy, torch
from model import GPT, GPTConfig
data = torch.from_numpy(numpy.fromfile("data/shakespeare_char/val.bin", numpy.uint16).astype(int))
for path in sys.argv[1:]:
    kept = torch.load(path, weights_only=False)
    gpt = GPT(GPTConfig(**kept["model_args"]))
    gpt.load_state_dict(kept["model"])
    T, total = gpt.config.block_size, 0.0
    gpt.eval()
    with torch.no_grad():
        for start in range(0, len(data) - 1, 64 * T):
            rows = data[start : start + 64 * T + 1]
            full = (len(rows) - 1) // T * T
            for a, b in ((0, full), (full, len(rows) - 1)):
                if b > a:
                    shape = (-1, min(T, b - a))
                    x, y = rows[a:b].view(shape), rows[a + 1 : b + 1].view(shape)
                    total += gpt(x, y)[1].item() * (b - a)
    print("loss", kept["iter_num"], total / (len(data) - 1))
"""
Found = dict[str, Any]


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget_seeds", type=int, default=5)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=1.91)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        peer = gather(asked.nanogpt, asked.text, Path(folder), [CHARS])
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            theirs = nanogpt(peer, seed, asked.target)
            mine = ours(Path(folder), asked, seed, "ours", every=asked.every)
            new = [theirs, mine, ours(Path(folder), asked, seed, "ours, as it stands")]
            if seed - asked.first_seed < asked.budget_seeds:
                per_step = mine["seconds"] / mine["steps"]
                longer = {
                    "ours, nanoGPT's tokens": TOKENS // (mine["tokens"] // mine["steps"]),
                    "ours, nanoGPT's time": int(theirs["all_seconds"] / per_step),
                }
                new += [ours(Path(folder), asked, seed, *item) for item in longer.items()]
            for one in new:
                print(json.dumps(one), flush=True)
            found += new
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))
    print(table(found, asked.target))


def nanogpt(peer: Path, seed: int, target: float) -> Found:
    """One run of nanoGPT: when its checkpoints first reach the target."""
    out = f"out{seed}"
    start = time.perf_counter()
    shown = call(
        [sys.executable, "-c", DRIVER, str(seed), *NANOGPT.split(), f"--out_dir={out}"], peer
    )
    wall = time.perf_counter() - start
    each = [float(ms) / 1e3 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", shown)]
    usual = statistics.median(each)
    # an iteration's time has the evaluation and the saving before it
    plain = [usual if i % EVERY == 0 else seconds for i, seconds in enumerate(each)]
    paths = [f"{out}/ckpt.pt.{n}" for n in range(FIRST, STEPS + 1, EVERY)]
    scored = call([sys.executable, "-c", SCORE, *paths], peer)
    losses = {int(n): float(x) for n, x in re.findall(r"loss (\d+) ([\d.]+)", scored)}
    steps, reached = crossing(losses, target)
    shutil.rmtree(peer / out)
    return {
        **{"what": "nanoGPT", "seed": seed, "steps": steps, "reached": reached},
        "tokens": steps * 12 * 64,
        "seconds": sum(plain[:steps]),
        "with_start": wall - sum(each) + sum(plain[:steps]),
        "all_seconds": sum(plain[:STEPS]),
        "last_loss": losses[STEPS],
    }


def ours(
    work: Path, asked: argparse.Namespace, seed: int, what: str, steps: int = 0, every: int = 0
) -> Found:
    """One run of ours, of `steps` in place of the config's: when it first reaches the target."""
    run = work / f"run{seed}"
    command = [sys.executable, "-m", "accel_gpt.cli", "train", str(CONFIG), "--seed", str(seed)]
    command += ["--data.prepare.path", str(asked.text.resolve()), "--out_dir", str(run)]
    command += ["--eval.every", str(every), "--train.cpu_threads", str(asked.threads)]
    command += ["--log.every", "1"]  # perf/step_ms of every step, evaluation not in it
    if steps:  # the same recipe, its cooldown as long a share of the run
        command += ["--train.max_steps", str(steps)]
    start = time.perf_counter()
    call(command, work)
    wall = time.perf_counter() - start
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    curve = {one["step"]: one for one in lines if "eval/val_loss" in one}
    at, reached = crossing({n: one["eval/val_loss"] for n, one in curve.items()}, asked.target)
    last = lines[-1]
    steps_ms = {one["step"]: one["perf/step_ms"] for one in lines if "perf/step_ms" in one}
    return {
        **{"what": what, "seed": seed, "steps": at, "reached": reached},
        "tokens": curve[at]["tokens"],
        "seconds": sum(ms for step, ms in steps_ms.items() if step <= at) / 1e3,
        "with_start": None if every else wall,
        "all_seconds": sum(steps_ms.values()) / 1e3,
        "all_tokens": last["tokens"],
        "last_loss": last["eval/val_loss"],
    }


def crossing(losses: dict[int, float], target: float) -> tuple[int, bool]:
    """The first step with a loss of at most `target`, else the last; and whether it reached it."""
    below = [step for step in sorted(losses) if losses[step] <= target]
    return (below[0], True) if below else (max(losses), False)


def table(found: list[Found], target: float) -> str:
    """Means and spreads by what ran."""
    lines = [
        f"| | seeds | reached {target} | seconds to it | with the start | steps to it "
        "| seconds in all | loss at the end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("seconds", "with_start", "steps", "all_seconds", "last_loss")
    for what in dict.fromkeys(one["what"] for one in found):
        runs = [one for one in found if one["what"] == what]
        lines.append(
            f"| {what} | {len(runs)} | {sum(one['reached'] for one in runs)} "
            + "".join(f"| {spread([one[key] for one in runs])} " for key in keys)
            + "|"
        )

    def mean(what: str, key: str) -> float:
        return statistics.mean(one[key] for one in found if one["what"] == what)

    training = mean("ours", "seconds") / mean("nanoGPT", "seconds")
    whole = mean("ours, as it stands", "with_start") / mean("nanoGPT", "with_start")
    lines.append(f"\nours of nanoGPT's: {training:.3f} of the training, {whole:.3f} with the start")
    return "\n".join(lines)


def spread(values: list[float | None]) -> str:
    """Mean, least and largest."""
    if None in values:
        return ""
    return f"{statistics.mean(values):.5g} ({min(values):.5g} to {max(values):.5g})"


if __name__ == "__main__":
    main()
