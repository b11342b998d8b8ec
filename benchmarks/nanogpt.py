"""Ours beside nanoGPT: same model, batch, data and machine, in one interleaved run.

    python benchmarks/nanogpt.py NANOGPT_FOLDER TEXT [--steps 300] [--rounds 5]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, driven unmodified (in a copy) with the CPU
settings of its README; TEXT is tinyshakespeare. Both run in turn as whole processes; a round's
figure is the median time of an iteration, as each system reports it. Prints medians over the rounds
and their ratio.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 12 * 64
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--lr_decay_iters=2000 --dropout=0.0"
)


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        peer = work / "nanoGPT"
        shutil.copytree(options.nanogpt, peer)
        shutil.copy(options.text, peer / "data/shakespeare_char/input.txt")
        call([sys.executable, "prepare.py"], peer / "data/shakespeare_char")
        times: dict[str, list[float]] = {"nanoGPT": [], "accel_gpt": []}
        for number in range(options.rounds):
            times["nanoGPT"].append(nanogpt_step_ms(peer, options.steps))
            times["accel_gpt"].append(our_step_ms(work, options.text, options.steps, number))
            print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.2f} ms" for k, v in times.items()))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, step_ms in median.items():
        print(f"{name:<10} {step_ms:8.2f} ms a step, {TOKENS / step_ms * 1e3:10,.0f} tokens/s")
    print(f"ratio of tokens/s, ours to nanoGPT's: {median['nanoGPT'] / median['accel_gpt']:.3f}")


def nanogpt_step_ms(peer: Path, steps: int) -> float:
    """Median time of an iteration in its own log, after the first ten."""
    shown = call([sys.executable, *NANOGPT.split(), f"--max_iters={steps}"], peer)
    return statistics.median([float(ms) for ms in re.findall(r"time ([\d.]+)ms", shown)][10:])


def our_step_ms(work: Path, text: Path, steps: int, number: int) -> float:
    """Median of perf/step_ms, a line every step, after the first ten."""
    command = [sys.executable, "-m", "accel_gpt.cli", "train"]
    command += [str(ROOT / "configs/shakespeare_char_cpu.yaml"), "--data.prepare.path", str(text)]
    command += ["--train.max_steps", str(steps), "--out_dir", f"run{number}", "--log.every", "1"]
    command += ["--eval.every", "0", "--eval.tokens", "768", "--sample.every", "0"]
    call(command, work)
    lines = (work / f"run{number}" / "metrics.jsonl").read_text().splitlines()
    return statistics.median([json.loads(line)["perf/step_ms"] for line in lines][10:])


def call(command: list[str], folder: Path) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
