"""Time a step with each change by itself and with all of them, for `gpu.py --only ablate`.

One process, a plain loop: the model, its loss and its optimizer, without data, Accelerate or logs.
The baseline has none of the changes and is measured first and last, so that a drift shows. Every
variant starts from the same weights and trains on the same random tokens, so that a change that
breaks the numbers shows in the last loss.

A change with an option is switched by it. The others are switched off by replacing a function of
`accel_gpt.model.loss` from outside. Three have no switch and are in every variant: the gradients
overwrite the logits, the hidden states are cast before the loss, and Muon updates in place.
`gpu.py --only speed` at commit faa3c59 times a step without any of the changes.

Minutes on an H100, by arithmetic: a variant traces and loads or compiles its graph for 5 to 20 s,
then makes 8 + 60 steps of 70 ms; 14 variants and the small model take 4 to 7 minutes.
"""

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import Metrics, attempt, print_rule, print_table
from peers import CHARS, GPT2, Job
from torch import Tensor, nn

from accel_gpt.config.optim import OptimConfig
from accel_gpt.launch.compile import GRAPH_OPTIONS, forget_compiled, use_compile_cache
from accel_gpt.launch.devices import peak_flops
from accel_gpt.launch.machine import device_name
from accel_gpt.model import loss as loss_module
from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sizes import flops_per_token, mfu
from accel_gpt.optim.groups import make_optimizer, set_lr

BATCH_SIZE = 32  # sequences, as in RESULTS.md
WARMUP_STEPS = 8
STEPS = 60
SECONDS = 5.0  # at most so long, but no fewer than `LEAST_STEPS`
LEAST_STEPS = 12
BATCHES = 4  # of tokens, in turn
CLIP = 1.0
BEFORE_MS = 69.2  # benchmarks/RESULTS.md, "One H100"
BEFORE_CHUNK = 4096  # tokens
DOCUMENT_TOKENS = 500  # mean
VOCAB_SIZES = {CHARS: 65, GPT2: 50257}


@dataclass(frozen=True)
class Variant:
    """What a variant switches on; the defaults are what `accel-gpt train` does."""

    name: str
    batch_size: int = BATCH_SIZE
    bf16_residual: bool = True
    chunk: int | None = None  # tokens of the loss at a time; None: as `chunk_tokens` says
    whole_logits: int | None = None  # most logits without chunks; None: `WHOLE_LOGITS`
    float32_sums: bool = True  # the head's gradient is added in float32
    clip_in_update: bool = True
    optimizer: str = "adamw"
    documents: bool = False
    compiled: bool = True
    options: dict[str, bool] | None = None  # of inductor


BEFORE = Variant(
    "baseline",
    bf16_residual=False,
    chunk=BEFORE_CHUNK,
    float32_sums=False,
    clip_in_update=False,
)


def variants(chunk: int) -> list[Variant]:
    """Return the variants. `chunk` is `BEFORE_CHUNK`, or fewer tokens for a tiny model."""
    before = replace(BEFORE, chunk=chunk)
    found = [
        before,
        replace(before, name="bf16 residual stream", bf16_residual=True),
    ]
    for factor in (2, 4, 8):
        size = factor * chunk
        found.append(replace(before, name=f"chunks of {size:,} tokens", chunk=size))
    found += [
        replace(before, name="head's gradient added in float32", float32_sums=True),
        replace(before, name="clipping in the update", clip_in_update=True),
        Variant("all"),
        Variant("all, every logit at once", whole_logits=2**62),
        Variant("all, 64 sequences", batch_size=2 * BATCH_SIZE),
        Variant("all, 128 sequences", batch_size=4 * BATCH_SIZE),
        Variant("all, Muon", optimizer="muon"),
        Variant("all, document mask", documents=True),
        replace(before, name="baseline again"),
    ]
    return found


def ablate(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Metrics | None]:
    """Time every variant, then the small model with CUDA graphs and without."""
    chunk = 2 * job.block_size if args.tiny else BEFORE_CHUNK
    found = compare(args, job, variants(chunk), VOCAB_SIZES[job.data])
    first = found["baseline"]
    if first and not args.tiny:
        print_rule(
            f"the baseline takes {first['step_ms']:.1f} ms a step",
            f"it is not {BEFORE_MS:.0f} +- 1 on an H100",
            abs(first["step_ms"] - BEFORE_MS) > 1,
            "the changes without a switch, the versions or the card differ; find out first",
        )
    small = job
    if not args.tiny:
        small = replace(job, n_layer=6, n_head=6, n_embd=384, block_size=256)
    host_bound = [
        Variant("small model", batch_size=64),
        Variant("small model, CUDA graphs", batch_size=64, options=dict(GRAPH_OPTIONS)),
        Variant("small model, not compiled", batch_size=64, compiled=False),
    ]
    return found | compare(args, small, host_bound, VOCAB_SIZES[CHARS])


def compare(
    args: argparse.Namespace, job: Job, chosen: Sequence[Variant], vocab_size: int
) -> dict[str, Metrics | None]:
    """Measure the variants in their order and print a table; a failed one has None."""
    found: dict[str, Metrics | None] = {}
    for variant in chosen:
        if args.tiny:
            variant = replace(
                variant,
                batch_size=variant.batch_size // 8,
                compiled=False,
                whole_logits=variant.whole_logits or 0,
            )
        found[variant.name] = attempt(
            variant.name, lambda variant=variant: measure(variant, job, vocab_size)
        )
        if found[variant.name]:
            line = ", ".join(f"{key} {value:,.4g}" for key, value in found[variant.name].items())
            print(f"{variant.name}: {line}", flush=True)
    free_memory()  # for the parts after this one, which run in other processes
    measured = {name: metrics for name, metrics in found.items() if metrics}
    if not measured:
        return found
    base = next(iter(measured.values()))
    flops = flops_per_token(job.model, vocab_size)
    peak = peak_flops(device_name(torch.device(job.device)), "bf16")
    rows = []
    for name, metrics in measured.items():
        rate = metrics["tokens_per_second"]
        same = metrics["tokens"] == base["tokens"]
        rows.append(
            [
                name,
                f"{metrics['step_ms']:.2f}",
                f"{base['step_ms'] - metrics['step_ms']:.2f}" if same else "-",
                f"{rate:,.0f}",
                f"{mfu(rate, flops, peak):.3f}" if peak else "-",
                f"{metrics['memory_gb']:.2f}",
                f"{metrics['first_step_seconds']:.1f}",
                f"{metrics['loss']:.6f}",
            ]
        )
    head = ["variant", "ms a step", "saved, ms", "tokens/s", "MFU", "GB", "first step, s", "loss"]
    print_table(head, rows)
    return found


@contextlib.contextmanager
def switched(variant: Variant) -> Iterator[None]:
    """Replace what the variant switches off in the loss; forget what was compiled before."""
    loss_module._compile.cache_clear()
    with contextlib.ExitStack() as patches:

        def patch(name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(loss_module, name, value))

        if variant.whole_logits is not None:
            patch("WHOLE_LOGITS", variant.whole_logits)
        if variant.chunk:
            patch("chunk_tokens", lambda *_: variant.chunk)
        if not variant.float32_sums:
            patch("adds_in_float32", lambda *_: False)
        yield


def measure(variant: Variant, job: Job, vocab_size: int) -> Metrics:
    """Train a new model for some steps; return the median step and the peak memory."""
    device = torch.device(job.device)
    use_compile_cache()
    free_memory()
    with switched(variant):
        torch.manual_seed(0)
        gpt = GPT(job.model, vocab_size).to(device).train()
        gpt.bf16_residual = variant.bf16_residual
        if variant.compiled:
            gpt.compile(options=variant.options)
        settings = OptimConfig(variant.optimizer, lr=6e-4, weight_decay=0.1)  # type: ignore[arg-type]  # a Literal
        optimizer = make_optimizer(gpt, settings, compiled=variant.compiled)
        set_lr(optimizer, 1.0)
        batches = [draw(variant, job, vocab_size, device) for _ in range(BATCHES)]
        in_turn = itertools.cycle(batches)

        def step() -> Tensor:
            return update(variant, gpt, optimizer, *next(in_turn))

        start = time.perf_counter()
        step().item()
        first_step = time.perf_counter() - start
        if device.type == "cuda":  # without what compiling takes
            torch.cuda.reset_peak_memory_stats()
        times_ms, loss = time_steps(step, device)
    step_ms = statistics.median(times_ms)
    tokens = variant.batch_size * job.block_size
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "step_ms": step_ms,
        "tokens": tokens,
        "tokens_per_second": 1e3 * tokens / step_ms,
        "memory_gb": peak / 1e9,
        "first_step_seconds": first_step,
        "loss": loss,
    }


def free_memory() -> None:
    """Free the model of the last variant: `compile` puts it in a cycle of references."""
    forget_compiled()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def draw(
    variant: Variant, job: Job, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw tokens, targets and document numbers, each (B, T), or None for the last."""
    size = (variant.batch_size, job.block_size + 1)
    given = torch.randint(1, vocab_size, size)
    given[torch.rand(size) < 1 / DOCUMENT_TOKENS] = 0  # ends of documents
    tokens = given[:, :-1].to(device)
    targets = given[:, 1:].to(device)
    if not variant.documents:
        return tokens, targets, None
    targets, documents = separate(tokens, targets, 0)
    return tokens, targets, documents


def update(
    variant: Variant,
    gpt: GPT,
    optimizer: Any,
    tokens: Tensor,
    targets: Tensor,
    documents: Tensor | None,
) -> Tensor:
    """Make one update, as `accel_gpt.train.update` does; return the loss ()."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = gpt(tokens, targets, documents=documents)
    loss.backward()
    if variant.clip_in_update:
        norm = nn.utils.get_total_norm([p.grad for p in gpt.parameters() if p.grad is not None])
        optimizer.clip(norm, CLIP)
    else:
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), CLIP)
    optimizer.skip = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def time_steps(step: Callable[[], Tensor], device: torch.device) -> tuple[list[float], float]:
    """Return the milliseconds of each step after a warm-up, by the device's clock, and the loss."""
    cuda = device.type == "cuda"
    start = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        loss = step()
    loss.item()  # waits
    seconds = (time.perf_counter() - start) / WARMUP_STEPS
    steps = min(STEPS, max(LEAST_STEPS, int(SECONDS / seconds))) if cuda else LEAST_STEPS
    if not cuda:
        times_ms = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            times_ms.append(1e3 * (time.perf_counter() - start))
        return times_ms, loss.item()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    last = loss.item()  # waits
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)], last
