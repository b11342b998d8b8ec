"""How time and memory of a step grow with context, width and depth, and loading with the shards.

    python benchmarks/curves.py OUT_FOLDER [--only context width depth shards] [--steps 3]
        [--points N]

Each point of the first three is a process of its own: `gpt2` preset, 4 layers of 256 channels,
2,048 tokens a step (context: 4,096), vocabulary 1,024, float32 on a CPU, forward, backward, clip,
AdamW; time is the median of the steps, memory the highest resident set above that before the model.
Loading is the time of a batch from 100 million tokens in 1 to 10,000 shards. Writes a PNG for each
and curves.json, and prints the slope in logarithms, beside that of accel_gpt/cost/flops.py.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Metrics, call, facts, headline, last_json, save, table

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import flops_per_token

VOCAB = 1024
BASE = {"n_layer": 4, "n_embd": 256, "block_size": 128}
TOKENS = {"context": 4096, "width": 2048, "depth": 2048}
CURVES = {  # the key that grows, and its values
    "context": ("block_size", (128, 256, 512, 1024, 2048, 4096)),
    "width": ("n_embd", (64, 128, 256, 512, 1024)),
    "depth": ("n_layer", (1, 2, 4, 8, 16, 32)),
}
SHARDS = (1, 10, 100, 1000, 10_000)
UNITS = {"context": "tokens", "width": "channels", "depth": "layers", "shards": "shards"}
POINT = r"""
import json, re, statistics, sys, time
from pathlib import Path
import torch
from accel_gpt.model.gpt import GPT
from accel_gpt.config.model import ModelConfig
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.config.optim import OptimConfig
from accel_gpt.training.accelerator import keep_freed_memory

shape, tokens, vocab, steps = json.loads(sys.argv[1])
keep_freed_memory()
torch.set_flush_denormal(True)
def resident(key):
    found = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
idle = resident("VmRSS")
gpt = GPT(ModelConfig(**shape), vocab)
optimizer = make_optimizer(gpt, OptimConfig())
ids = torch.randint(vocab, (tokens // shape["block_size"], shape["block_size"] + 1))
times = []
for _ in range(steps + 1):
    start = time.perf_counter()
    gpt(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    times.append(time.perf_counter() - start)
print(json.dumps({"s": statistics.median(times[1:]), "bytes": resident("VmHWM") - idle}))
"""


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=UNITS, default=[*UNITS])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--points", type=int, default=9, help="of each curve, from the left")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = facts()
    report: dict[str, Any] = {"facts": machine, "curves": {}}
    rows = []
    for name in args.only:
        found = shards(args.points) if name == "shards" else curve(name, args)
        slopes = {key: slope(found["x"], found[key]) for key in found if key != "x"}
        report["curves"][name] = {"points": found, "slopes": slopes}
        draw(args.out / f"{name}.png", name, found, slopes)
        last = {key: slope(found["x"][-2:], found[key][-2:]) for key in slopes}
        rows.append([name, f"{found['x'][0]:,} to {found['x'][-1]:,}"])
        for each in (slopes, last):
            rows[-1] += [f"{each[key]:.2f}" if key in each else "" for key in ("s", "flops", "gb")]
        print(rows[-1], flush=True)
    head = ["", "from", "time", "FLOP model", "memory", "time, last two", "model", "memory"]
    print(headline(machine) + "\n" + table(head, rows))
    save(args.out / "curves.json", report)


def curve(name: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds, bytes and model FLOPs of a step, by what grows."""
    key, values = CURVES[name]
    tokens = TOKENS[name]
    found: dict[str, list[float]] = {"x": [], "s": [], "flops": [], "gb": []}
    for value in values[: args.points]:
        shape = {**BASE, key: value}
        shape["n_head"] = shape["n_embd"] // 64
        words = json.dumps([shape, tokens, VOCAB, args.steps])
        measured: Metrics = last_json(call([sys.executable, "-c", POINT, words]))
        flops = tokens * flops_per_token(ModelConfig(**shape), VOCAB)
        rates = (value, measured["s"], flops, measured["bytes"] / 1e9)
        for series, figure in zip(found.values(), rates, strict=True):
            series.append(figure)
    return found


def shards(points: int) -> dict[str, list[float]]:
    """Seconds of a batch of 12 x 1,024 tokens, by the number of shards."""
    from data import T, make_shards, timed, windows_of

    found: dict[str, list[float]] = {"x": [], "s": []}
    with tempfile.TemporaryDirectory() as folder:
        for count in SHARDS[:points]:
            make_shards(Path(folder) / str(count), count, 100_000_000)
            read = windows_of(Path(folder) / str(count))
            windows = len(next(read)[0])
            for _ in range(100_000_000 // (windows * T) + 1):
                next(read)  # every shard has been opened
            times = [timed(lambda read=read: [next(read) for _ in range(32)]) for _ in range(15)]
            found["x"].append(count)
            found["s"].append(statistics.median(times) / 32 / windows * 12)
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line through the logarithms, by least squares."""
    u, v = [math.log(value) for value in x], [math.log(value) for value in y]
    return statistics.linear_regression(u, v).slope


def draw(path: Path, name: str, found: dict[str, list[float]], slopes: dict[str, float]) -> None:
    """One picture: time, the FLOP model at the same mean, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    with_memory = "gb" in found
    figure, axes = pyplot.subplots(1, 1 + with_memory, figsize=(5 + 4.5 * with_memory, 3.8))
    left = axes[0] if with_memory else axes
    x = found["x"]
    label = f"measured, slope {slopes['s']:.2f}"
    left.loglog(x, [1e3 * s for s in found["s"]], "o-", color="#2563eb", label=label)
    if "flops" in found:
        level = statistics.fmean(
            math.log(s / f) for s, f in zip(found["s"], found["flops"], strict=True)
        )
        line = [1e3 * math.exp(level) * f for f in found["flops"]]
        label = f"FLOP model, slope {slopes['flops']:.2f}"
        left.loglog(x, line, "--", color="#9ca3af", label=label)
    left.set_ylabel("ms a step" if with_memory else "ms a batch of 12 x 1,024 tokens")
    if with_memory:
        label = f"measured, slope {slopes['gb']:.2f}"
        axes[1].loglog(x, found["gb"], "o-", color="#059669", label=label)
        axes[1].set_ylabel("GB above the idle process")
    for axis in axes if with_memory else [axes]:
        axis.set_xticks(x, [f"{value:,}" for value in x])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        if high / low < 10:
            axis.set_ylim(low / 3, high * 3)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(UNITS[name])
        axis.grid(color="#e5e7eb", which="both")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    tokens = f", {TOKENS[name]:,} tokens a step" if with_memory else ""
    figure.suptitle(f"cost by {name}{tokens}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
