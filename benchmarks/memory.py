"""Peak memory of a training step on a CPU, ours beside nanoGPT's.

    python benchmarks/memory.py NANOGPT_FOLDER [--sequences 8] [--steps 2] [--rounds 3] [--json OUT]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, driven unmodified. Each figure is of a process of
its own, in turn: GPT-2 124M in nanoGPT's form (no biases, vocabulary 50,304), float32, forward,
backward, clip, AdamW. Memory is the highest resident set less that of the process after its
imports; time is that of the last step. Ours also with train.activation_checkpointing: blocks and
with train.compile. Prints medians over the rounds and their ratios. Linux.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = r"""
import json, re, sys, time
from pathlib import Path
import torch

sequences, block_size, steps, vocab_size = map(int, sys.argv[1:5])
torch.set_num_threads(int(sys.argv[5]))

def resident(key):
    status = Path("/proc/self/status").read_text()
    return int(re.search(key + r":\s+(\d+) kB", status)[1]) * 1024

def measure(start, loss_of):
    torch.manual_seed(0)
    idle = resident("VmRSS")
    model, optimizer = start()
    model.train()
    tokens = torch.randint(vocab_size, (sequences, block_size + 1))
    for _ in range(steps):
        began = time.perf_counter()
        found = loss_of(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        found[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    figures = {"bytes": resident("VmHWM") - idle, "seconds": seconds, "loss": found[1].item()}
    print(json.dumps(figures))
"""
NANOGPT = (
    COMMON
    + r"""
from model import GPT, GPTConfig

def start():
    config = GPTConfig(block_size, vocab_size, 12, 12, 768, dropout=0.0, bias=False)
    model = GPT(config)
    return model, model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")

import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    import torch._dynamo  # as configure_optimizers imports it
def loss_of(model, tokens, targets):
    logits, loss = model(tokens, targets)  # held as in its train.py
    return logits, loss
measure(start, loss_of)
"""
)
OURS = (
    COMMON
    + r"""
from accel_gpt.config.experiment import OptimConfig, TrainConfig
from accel_gpt.model.gpt import GPT
from accel_gpt.config.model import ModelConfig
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import keep_freed_memory
from accel_gpt.training.accelerator import set_up_model
import torch._dynamo

keep_freed_memory()
torch.set_flush_denormal(True)

def start():
    model = GPT(ModelConfig(block_size=block_size, bias=False, mlp="gelu_erf"), vocab_size)
    set_up_model(model, TrainConfig(**json.loads(sys.argv[6])))
    return model, make_optimizer(model, OptimConfig())
measure(start, lambda model, tokens, targets: (None, model(tokens, targets)))
"""
)
SYSTEMS: dict[str, dict[str, Any]] = {
    "accel_gpt": {},
    "accel_gpt, compiled": {"compile": True},
    "accel_gpt, checkpointing": {"activation_checkpointing": "blocks"},
}


def main() -> None:
    """Run all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="*", default=["nanoGPT", *SYSTEMS])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    words = [asked.sequences, asked.block_size, asked.steps, asked.vocab_size, asked.threads]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in asked.systems}
    for number in range(asked.rounds):
        for name, figures in found.items():
            code, folder = (NANOGPT, asked.nanogpt) if name == "nanoGPT" else (OURS, None)
            command = [sys.executable, "-c", code, *map(str, words)]
            command.append(json.dumps(SYSTEMS.get(name, {})))
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            figures.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number}, {name}: {figures[-1]}", flush=True)
    show(found)
    if asked.json:
        asked.json.write_text(json.dumps({"asked": words, "found": found}, indent=1))


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and ratios to the first."""
    first: dict[str, float] | None = None
    for name, figures in found.items():
        median = {key: statistics.median([f[key] for f in figures]) for key in ("bytes", "seconds")}
        first = first or median
        memory, time = (median[key] / first[key] for key in ("bytes", "seconds"))
        print(
            f"{name:<26}{median['bytes'] / 1e9:8.2f} GB {memory:6.3f}"
            f"{median['seconds']:10.1f} s {time:6.3f}"
        )


if __name__ == "__main__":
    main()
