"""What a training step cannot be faster than: its matrix products alone, beside the step itself.

    python benchmarks/limit.py [--sizes char4 char6 gpt2] [--steps 5] [--peers FILE] [--json FILE]
        [--batch N] [--processor] [--bf16]

Of each size of benchmarks/peers.py: the time of our step (forward, backward, clip, AdamW, eager, on
a batch in memory), what its matrix products and its attention take of it by PyTorch's profiler, and
what products of the same shapes take by themselves, in the fastest order of their factors. With
FILE, the JSON of benchmarks/peers.py, the ratios that are left where everything but products and
attention took no time, and where only products did, at the pace that the machine had for FILE: by
our eager step, where FILE has it. `--processor` with OMP_NUM_THREADS=1 is what other work on the
machine disturbs least.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import facts, headline, median, save, table, timed
from peers import SIZES
from systems import VOCABULARIES, Job, smaller
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from accel_gpt.model.gpt import GPT
from accel_gpt.model_config import ModelConfig
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.optim_config import OptimConfig
from accel_gpt.run.environment import keep_freed_memory

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    *("aten::masked_fill_", "aten::_softmax", "aten::_softmax_backward_data"),  # ours in bf16
)
Clock = Callable[[], float]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="count processor time, not wall")
    parser.add_argument("--bf16", action="store_true", help="mixed precision, as autocast has it")
    parser.add_argument("--batch", type=int, help="sequences a step, in place of each size's own")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_flush_denormal(True)
    known = facts()
    clock = time.process_time if asked.processor else time.perf_counter
    found = {}
    for size in asked.sizes:
        job = smaller(SIZES[size], batch=asked.batch) if asked.batch else SIZES[size]
        found[size] = measure(job, asked.steps, clock, asked.bf16)
    head = ["ms", *next(iter(found.values()))]
    print(headline(known))
    print(table(head, [[s, *(f"{ms:.1f}" for ms in f.values())] for s, f in found.items()]))
    if asked.peers:
        ours = "accel_gpt, bf16" if asked.bf16 else "accel_gpt"
        print("\n" + limits(json.loads(asked.peers.read_text())["sizes"], found, ours))
    save(asked.json, {"facts": known, "ms": found})


def measure(job: Job, steps: int, clock: Clock, bf16: bool) -> dict[str, float]:
    """Milliseconds of a step, of its parts, and of the products alone."""
    shape = ModelConfig(
        n_layer=job.n_layer,
        n_head=job.n_head,
        n_embd=job.n_embd,
        block_size=job.block_size,
        bias=False,
        mlp="gelu_erf",
    )
    gpt = GPT(shape, VOCABULARIES[job.data])
    optimizer = make_optimizer(gpt, OptimConfig())
    tokens = torch.randint(VOCABULARIES[job.data], (job.batch, job.block_size + 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = gpt(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    whole = statistics.median(timed(step, clock) for _ in range(steps))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        step()
    events = trace.key_averages(group_by_input_shape=True)
    shapes: Counter[Shapes] = Counter()
    total = inside = attention = 0.0
    for event in events:
        total += event.self_cpu_time_total
        if event.key in PRODUCTS:
            inside += event.self_cpu_time_total
            factors = event.input_shapes[1:] if event.key == "aten::addmm" else event.input_shapes
            shapes[tuple(factors[0]), tuple(factors[1])] += event.count
        elif event.key in ATTENTION:
            attention += event.self_cpu_time_total
    alone = sum(count * product_alone(*pair, clock, bf16) for pair, count in shapes.items())
    share = 1e3 * whole / total  # the profiler takes time of its own
    return {
        "step": 1e3 * whole,
        "products in it": share * inside,
        "attention in it": share * attention,
        "the rest": share * (total - inside - attention),
        "the same products alone": 1e3 * alone,
    }


def product_alone(left: tuple[int, ...], right: tuple[int, ...], clock: Clock, bf16: bool) -> float:
    """Seconds of one product, in the fastest of the layouts of its factors."""
    times, kind = [], torch.bfloat16 if bf16 else torch.float32
    for first in (False, True):
        for second in (False, True):
            a, b = (made(*of).to(kind) for of in ((left, first), (right, second)))
            out = a @ b
            multiply = torch.bmm if a.dim() == 3 else torch.mm

            def work(a: Tensor = a, b: Tensor = b, out: Tensor = out, by: Any = multiply) -> None:
                by(a, b, out=out)

            work()
            times.append(statistics.median(timed(work, clock) for _ in range(5)))
    return min(times)


def made(shape: tuple[int, ...], transposed: bool) -> Tensor:
    """Random numbers, the last two dimensions exchanged in memory or not."""
    if transposed:
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    return torch.randn(shape)


def limits(peers: dict[str, Any], found: dict[str, dict[str, float]], ours: str) -> str:
    """The best ratios to each peer that products and attention leave."""
    rows = []
    for size, ms in found.items():
        rounds = peers.get(size, {"rounds": {}})["rounds"]
        if ours not in rounds:
            continue
        pace = median(rounds[ours], "step_ms") / ms["step"]
        products = pace * ms["the same products alone"]
        least = products + pace * ms["attention in it"]
        for name, figures in rounds.items():
            step = median(figures, "step_ms")
            row = [f"{step:.1f}", f"{step / least:.2f}", f"{step / products:.2f}"]
            rows.append([size, name, *row])
    head = ["", "", "ms", "products and attention alone would be", "products alone would be"]
    return table(head, rows)


if __name__ == "__main__":
    main()
