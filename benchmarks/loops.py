"""Time a plain loop: the model, its loss and its optimizer, without data, Accelerate or logs.

`gpu.py --only graphs` asks whether CUDA graphs pay over gradient accumulation. PyTorch's graphs
write gradients into memory that the next micro-step overwrites. Here each micro-step adds them to
tensors outside the graphs, which costs no more than the usual addition to `grad`: 1.5 GB of
traffic, 0.4 ms on an H200.

    graphs      GPT-2 124M, 32 sequences, four micro-steps a step: compiled, with graphs, and again

All variants start from the same weights and train on the same random tokens, so that a change that
breaks the numbers shows in the last loss.

Minutes on an H200: a variant compiles for 20 to 40 s (assumption, once with graphs and once
without), and makes 4 + 20 steps of 240 ms. In all 2.5.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Metrics, attempt, print_rule, print_table
from peers import GPT2, VOCAB_SIZES, Job
from torch import Tensor, nn

from accel_gpt.config.optim import OptimConfig
from accel_gpt.launch.compile import GRAPH_OPTIONS, forget_compiled, use_compile_cache
from accel_gpt.launch.devices import peak_flops
from accel_gpt.launch.machine import device_name
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sizes import flops_per_token, mfu
from accel_gpt.optim.groups import make_optimizer, set_lr

BATCH_SIZE = 32  # sequences of a micro-step, as in RESULTS.md
MICRO_STEPS = 4
WARMUP_STEPS = 4
STEPS = 20
TINY_STEPS = 3
BATCHES = 4  # of tokens, in turn
CLIP = 1.0
LR = 6e-4
IDLE_MS = 2.0  # of a micro-step; limit of the rule
Batch = tuple[Tensor, Tensor]  # tokens and targets, each (B, T)


@dataclass(frozen=True)
class Variant:
    """A form of the loop."""

    name: str
    batch_size: int = BATCH_SIZE
    micro_steps: int = 1
    compiled: bool = True
    graphs: bool = False
    change: Callable[[GPT], None] | None = None  # of the model, before it is compiled


def graphs(args: argparse.Namespace, _work: Path, job: Job) -> dict[str, Metrics | None]:
    """Time gradient accumulation with CUDA graphs and without, and print the rule."""
    batch_size = 2 if args.tiny else BATCH_SIZE
    common = {"batch_size": batch_size, "micro_steps": MICRO_STEPS, "compiled": not args.tiny}
    variants = [
        Variant("compiled", **common),
        Variant("graphs", graphs=True, **common),
        Variant("compiled, again", **common),
    ]
    found = compare(args, job, variants)
    plain, graph = found["compiled"], found["graphs"]
    if plain and graph:
        saved = (plain["step_ms"] - graph["step_ms"]) / MICRO_STEPS
        print_rule(
            f"graphs save {saved:.2f} ms a micro-step; losses {plain['loss']:.5f}, "
            f"{graph['loss']:.5f}; {graph['memory_gb'] - plain['memory_gb']:.2f} GB more",
            f"{IDLE_MS:g} ms and more, with equal losses",
            saved >= IDLE_MS and abs(plain["loss"] - graph["loss"]) < 0.01,
            "let train.compile graphs accumulate, with these sums in `Gradients`",
        )
    return found


def compare(
    args: argparse.Namespace, job: Job, variants: Sequence[Variant]
) -> dict[str, Metrics | None]:
    """Measure the variants in their order and print a table; a failed one has None."""
    found: dict[str, Metrics | None] = {}
    for variant in variants:
        found[variant.name] = attempt(
            variant.name, lambda variant=variant: measure(args, variant, job)
        )
        free_memory()  # also for the parts after this one, which run in other processes
        if found[variant.name]:
            line = ", ".join(f"{key} {value:,.4g}" for key, value in found[variant.name].items())
            print(f"{variant.name}: {line}", flush=True)
    flops = flops_per_token(job.model, VOCAB_SIZES[GPT2])
    peak = peak_flops(device_name(torch.device(job.device)), "bf16")
    rows = []
    for name, metrics in found.items():
        if metrics is None:
            continue
        rate = metrics["tokens_per_second"]
        share = f"{mfu(rate, flops, peak):.3f}" if peak else "-"
        cells = [f"{metrics['step_ms']:.2f}", f"{rate:,.0f}", share]
        cells += [f"{metrics['memory_gb']:.2f}", f"{metrics['first_step_seconds']:.1f}"]
        rows.append([name, *cells, f"{metrics['loss']:.6f}"])
    head = ["variant", "ms a step", "tokens/s", "MFU", "GB", "first step, s", "loss"]
    print_table(head, rows)
    return found


def measure(args: argparse.Namespace, variant: Variant, job: Job) -> Metrics:
    """Train a new model for some steps; return the median step and the peak memory."""
    device = torch.device(job.device)
    loop = Loop(variant, job, seed=0)
    batches = itertools.cycle([draw(variant, job, device) for _ in range(BATCHES)])
    start = time.perf_counter()
    loop.step(batches).item()
    first_step = time.perf_counter() - start
    if device.type == "cuda":  # without what compiling takes
        torch.cuda.reset_peak_memory_stats()
    times_ms, losses = loop.time_steps(batches, TINY_STEPS if args.tiny else STEPS)
    step_ms = statistics.median(times_ms)
    tokens = variant.micro_steps * variant.batch_size * job.block_size
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "step_ms": step_ms,
        "tokens_per_second": 1e3 * tokens / step_ms,
        "memory_gb": peak / 1e9,
        "first_step_seconds": first_step,
        "loss": losses[-1],
    }


class Loop:
    """A model with its optimizer, and the steps that train it."""

    def __init__(self, variant: Variant, job: Job, seed: int) -> None:
        use_compile_cache()
        forget_compiled()
        self.variant = variant
        self.device = torch.device(job.device)
        self.gpt = GPT.allocate(job.model, VOCAB_SIZES[GPT2], self.device).train()
        self.gpt.bf16_residual = True
        if variant.change:
            variant.change(self.gpt)
        if variant.compiled:
            self.gpt.compile(options=dict(GRAPH_OPTIONS) if variant.graphs else None)
        self.start_again(seed)
        self.sums = [torch.zeros_like(p) for p in self.gpt.parameters()] if variant.graphs else []

    def start_again(self, seed: int) -> None:
        """Draw the weights anew, for the model as it is compiled, and make a new optimizer."""
        torch.manual_seed(seed)
        self.gpt.init_weights()
        settings = OptimConfig("adamw", lr=LR, weight_decay=0.1)
        self.optimizer: Any = make_optimizer(self.gpt, settings, compiled=self.variant.compiled)
        set_lr(self.optimizer, 1.0)

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one update, as `accel_gpt.train.update` does; return the mean loss ()."""
        weights = list(self.gpt.parameters())
        total = torch.zeros((), device=self.device)
        for _ in range(self.variant.micro_steps):
            tokens, targets = next(batches)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.gpt(tokens, targets)
            (loss / self.variant.micro_steps).backward()
            total += loss.detach() / self.variant.micro_steps
            if self.variant.graphs:  # the gradients are in memory that the next graph overwrites
                torch._foreach_add_(self.sums, [weight.grad for weight in weights])
                for weight in weights:
                    weight.grad = None
        if self.variant.graphs:
            for weight, gradient in zip(weights, self.sums, strict=True):
                weight.grad = gradient
        norm = nn.utils.get_total_norm([weight.grad for weight in weights])
        self.optimizer.clip(norm, CLIP)
        self.optimizer.skip = (~(torch.isfinite(total) & torch.isfinite(norm))).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.variant.graphs:
            torch._foreach_zero_(self.sums)
        return total

    def time_steps(self, batches: Iterator[Batch], steps: int) -> tuple[list[float], list[float]]:
        """Return the milliseconds of each step after a warm-up, and the losses of these steps."""
        for _ in range(WARMUP_STEPS):
            self.step(batches)
        losses = []
        cuda = self.device.type == "cuda"
        if cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                losses.append(self.step(batches))
                event.record()
            torch.cuda.synchronize()
            times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        else:
            clock = [time.perf_counter()]
            for _ in range(steps):
                losses.append(self.step(batches))
                clock.append(time.perf_counter())
            times = [1e3 * (after - before) for before, after in itertools.pairwise(clock)]
        return times, torch.stack(losses).tolist()


def draw(variant: Variant, job: Job, device: torch.device) -> Batch:
    """Draw random tokens and their targets."""
    size = (variant.batch_size, job.block_size + 1)
    tokens = torch.randint(VOCAB_SIZES[GPT2], size).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def free_memory() -> None:
    """Free the model of the last variant: `compile` puts it in a cycle of references."""
    forget_compiled()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
