"""What an optimizer step costs: Muon with AdamW, ours against torch's, and AdamW alone.

    python benchmarks/optimizer.py [--rounds 7] [--seconds 2] [--shapes quickstart] [--json]

For each shape, in one process, in turn in every round: `ours` (`optim.name: muon`), with --compile
`ours, compiled`, `torch`, its Muon on the same matrices, split, and its fused AdamW on the rest,
and `adamw`, fused, on everything. Each makes as many steps a round as fit into --seconds,
at least one; gradients are random and stay. Prints medians in ms, and their ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.parse import load_config
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.optim.muon import muon_weights
from accel_gpt.training.accelerator import keep_freed_memory
from accel_gpt.training.machine import device_name

CONFIGS = Path(__file__).parents[1] / "configs"
VOCABULARIES = {"quickstart": 4096, "gpt2_124m": 50_257}
MUON = OptimConfig("muon")
Step = Callable[[], Any]


def main() -> None:
    """Time every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a way in a round")
    parser.add_argument("--shapes", nargs="+", choices=VOCABULARIES, default=[*VOCABULARIES])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    report: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": asked.rounds,
        "milliseconds": {name: measure(name, device, asked) for name in asked.shapes},
    }
    print(json.dumps(report) if asked.json else table(report))


def measure(name: str, device: torch.device, asked: argparse.Namespace) -> dict[str, float]:
    """Medians in ms of one shape."""
    config = load_config([str(CONFIGS / f"{name}.yaml")], "benchmarks/optimizer.py")
    gpt = GPT(config.model, VOCABULARIES[name]).to(device)
    for p in gpt.parameters():
        p.grad = torch.randn_like(p)
    ways: dict[str, Step] = {"ours": make_optimizer(gpt, MUON).step}
    if asked.compile:
        ways["ours, compiled"] = make_optimizer(gpt, MUON, compiled=True).step
    ways["torch"] = of_torch(gpt)
    ways["adamw"] = make_optimizer(gpt, OptimConfig()).step
    steps = {}
    for way, step in ways.items():
        timed(step, 1)  # makes its state, and compiles
        steps[way] = max(1, int(asked.seconds / timed(step, 1)))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(asked.rounds):
        for way, step in ways.items():
            times[way].append(timed(step, steps[way]))
    return {way: 1e3 * statistics.median(found) for way, found in times.items()}


def of_torch(gpt: GPT) -> Step:
    """torch's Muon and AdamW, on copies of the weights."""
    split, taken = [], set()
    for rows, weights in muon_weights(gpt).items():
        for weight in weights:
            taken.add(id(weight))
            for part in weight.detach().split(rows or weight.shape[:1]):
                split.append(nn.Parameter(part.clone()))
    rest = [nn.Parameter(p.detach().clone()) for p in gpt.parameters() if id(p) not in taken]
    for p in split + rest:
        p.grad = torch.randn_like(p)
    both = [
        torch.optim.Muon(split, MUON.lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, MUON.lr, fused=True),
    ]
    return lambda: [one.step() for one in both]


def timed(step: Step, count: int) -> float:
    """Seconds of one of `count` steps."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count


def wait() -> None:
    """Until the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        f"{report['device']}, torch {report['torch']}, {report['threads']} threads, "
        f"medians of {report['rounds']} rounds",
        "",
    ]
    for name, found in report["milliseconds"].items():
        lines += [f"| {name} | ms a step | of torch's |", "|---|---|---|"]
        lines += [f"| {w} | {ms:,.2f} | {ms / found['torch']:.2f} |" for w, ms in found.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
