"""Compare fp8 with bf16: whole models by Accelerate's recipe, and the MLP's forward pass alone.

    fp8         GPT-2 350M and 1.5B, `train.mixed_precision` fp8 beside bf16: TFLOP/s in bf16's
                count, and the loss on held-out tokens after 100 and 200 steps
    fp8_trace   where the milliseconds of a step in fp8 go, if 1.5B stays below 600 TFLOP/s
    fp8_mlp     GPT-2 124M in a plain loop: fp8 products in the forward pass of `up` and `down`

Both train on the Python source of this machine (`corpus.py`). Accelerate's recipe of torchao leaves
out the first linear layer and the head; scales are those of whole tensors, computed at each step.

`fp8` trains 350M with 32 sequences and 1.5B with `--sequences`, default 32: 113 GB at the 2.6 GB a
sequence of RESULTS.md. Transformer Engine reaches 638 TFLOP/s at 38 (ROCm/TransformerEngine #72).

`fp8_mlp`: the weight is scaled by its largest magnitude. The activations are not: after a norm and
after GELU they are of size 1, far below 448, the largest number of e4m3fn. The backward pass is in
bf16. Same weights and batches for each form, three seeds.

Minutes on an H200, by arithmetic: 350M takes 0.16 s a step and 45 s to compile, so 1.6 a precision;
1.5B takes 0.65 s and 80 s in bf16, and 15 s to draw its weights: 4.5 in bf16 and 4 in fp8, so each
size is a command. `fp8_trace` of 1.5B: 2. `fp8_mlp`: five forms, each 25 s to compile and 3 x 150
steps of 60 ms, so 4.5.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Metrics, attempt, print_rule, print_table, read_records
from curve import DATA, Run, measure, train_config, write_corpus
from loops import BATCH_SIZE, WARMUP_STEPS, Batch, Loop, Variant, free_memory
from peers import Job
from torch import Tensor
from traces import print_families, print_kernels, print_products, trace_ours

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import Matrix
from accel_gpt.model.sizes import flops_per_token

SIZES = {  # config, and what differs from the job
    "350m": ("gpt2_350m", {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 32}),
    "1558m": ("gpt2_1558m", {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "batch_size": 2}
STEPS = 200
TINY_STEPS = 8
POINTS = 2
RATE_WARMUP_STEPS = 20
TFLOPS = 600.0  # limit of the rule
PRECISIONS = ("fp8", "bf16")  # if time runs out, the rule needs fp8 alone
STEP = "accel_gpt.optim.adamw:GuardedAdamW.step"

SEEDS = (0, 1, 2)
MLP_STEPS = 150
LAST = 50  # steps whose mean is the loss of a training
GAIN = 0.01  # of a step, for each product; limit of the rule
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
MEGABYTES = 40.0  # 17 million tokens: 200 steps of 32,768 are 6.6 million


# --------------------------------------------------------------------------- whole models


def fp8(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Train each size in both precisions; print tables and the rule."""
    write_corpus(args, work, MEGABYTES)
    report: dict[str, Any] = {}
    for size in args.sizes:
        config, _ = SIZES[size]
        at = job_of(args, job, size)
        found = {}
        for precision in PRECISIONS:
            chosen = {"fp8": "bf16", "bf16": "no"}[precision] if args.tiny else precision
            train = partial(train_size, config=config, precision=chosen)
            found[precision] = attempt(f"{size}, {precision}", partial(run_size, train, at, work))
            print(f"{size}, {precision}: {found[precision]}", flush=True)
        report[size] = found
        print_sizes(size, at, found)
    return report


def job_of(args: argparse.Namespace, job: Job, size: str) -> Job:
    """Return the model of a size, and its batch."""
    _, shape = SIZES[size]
    return replace(job, **{"batch_size": args.sequences, **shape, **(TINY if args.tiny else {})})


def train_size(run: Run, work: Path, settings: dict[str, Any], config: str, precision: str) -> None:
    """Train a config of ours with a batch of one micro-batch."""
    own: dict[str, object] = {"schedule.warmup_steps": min(RATE_WARMUP_STEPS, run.steps)}
    if run.job.device == "cpu":
        own |= {f"model.{key}": TINY[key] for key in ("n_layer", "n_head", "n_embd")}
    train_config(run, work, settings, config, precision, STEP, own)


def run_size(train: Callable[..., None], job: Job, work: Path) -> dict[str, Any]:
    """Train; return the milliseconds of a step, the losses on held-out tokens and the memory."""
    steps = TINY_STEPS if job.device == "cpu" else STEPS
    run = Run(job, "fp8", steps, job.batch_size, accumulation=1, seconds=600.0)
    found = measure(train, run, work, POINTS)
    records = read_records(work / "ours")
    memory = max((one.get("perf/memory_gb", 0.0) for one in records), default=0.0)
    seconds = found["points"][-1][0]
    return {"step_ms": 1e3 * seconds / steps, "points": found["points"], "memory_gb": memory}


def tflops(job: Job, found: dict[str, Any]) -> float:
    """Return TFLOP/s in bf16's count: 6 N + 12 L C T for each token, whatever the precision."""
    tokens_per_second = 1e3 * job.tokens_per_step / found["step_ms"]
    return tokens_per_second * flops_per_token(job.model, 50257) / 1e12


def print_sizes(size: str, job: Job, found: dict[str, Any]) -> None:
    """Print a row for each precision, and the rule."""
    rows = []
    for precision, one in found.items():
        if one:
            losses = [f"{loss:.4f}" for _, _, loss in one["points"]]
            rate = 1e3 * job.tokens_per_step / one["step_ms"]
            cells = [f"{one['step_ms']:.1f}", f"{rate:,.0f}", f"{tflops(job, one):.1f}"]
            rows.append([precision, *cells, f"{one['memory_gb']:.1f}", ", ".join(losses)])
    head = [f"{size}, {job.batch_size} x {job.block_size:,} tokens", "ms a step", "tokens/s"]
    print_table([*head, "TFLOP/s", "GB", "loss at each point"], rows)
    fast, plain = found["fp8"], found["bf16"]
    if not fast:
        return
    figure = f"{size} in fp8: {tflops(job, fast):.0f} TFLOP/s"
    if plain:
        apart = fast["points"][-1][2] - plain["points"][-1][2]
        figure += f", {plain['step_ms'] / fast['step_ms']:.2f} x bf16, loss {apart:+.4f}"
    if size == "1558m":
        reached = tflops(job, fast) >= TFLOPS
        print_rule(figure, f"{TFLOPS:g} TFLOP/s and more", reached, "README names it")
    else:
        print(figure)


def fp8_trace(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Profile a step of each size in fp8, and print where its milliseconds go."""
    report = {}
    for size in args.sizes:
        measure = partial(trace_ours, args, work, job_of(args, job, size), precision="fp8")
        found = attempt(f"{size}, trace", measure)
        report[size] = found
        if found:
            print_families({size: found})
            print_products(size, found["products"])
            print_kernels(size, found["kernels"])
    return report


# --------------------------------------------------------------------------- the MLP's forward pass


class Fp8Product(torch.autograd.Function):
    """Multiply `x` (N, C) in bf16 by `weight` (H, C) in float32, both as e4m3fn: (N, H) in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = LARGEST / weight.abs().amax().float()
        x8 = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        weight8 = (weight * scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return torch._scaled_mm(
            x8,
            weight8.t(),
            scale_a=torch.ones((), device=x.device),
            scale_b=scale.reciprocal(),
            out_dtype=x.dtype,
            use_fast_accum=True,
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        return dy @ weight.to(x.dtype), (dy.t() @ x).to(weight.dtype)


class Fp8Matrix(Matrix):
    """A linear layer without bias whose forward product is in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).flatten(0, -2)
        return Fp8Product.apply(rows, self.weight).unflatten(0, x.shape[:-1])


def use_fp8(gpt: GPT, names: Sequence[str]) -> None:
    """Let the named layers of each MLP multiply in fp8."""
    for block in gpt.blocks:
        for name in names:
            getattr(block.mlp, name).__class__ = Fp8Matrix


FORMS = {"bf16": (), "up": ("up",), "down": ("down",), "both": ("up", "down"), "bf16, again": ()}


def fp8_mlp(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Train each form with each seed; print the table and the rules."""
    write_corpus(args, work, MEGABYTES)
    job = replace(job, batch_size=2 if args.tiny else BATCH_SIZE)
    tokens = np.memmap(work / "nanoGPT/data" / DATA / "train.bin", dtype=np.uint16, mode="r")
    found = {}
    for name, layers in FORMS.items():
        change = partial(use_fp8, names=layers)
        variant = Variant(name, job.batch_size, compiled=not args.tiny, change=change)
        found[name] = attempt(name, partial(train_seeds, args, variant, job, tokens))
        free_memory()
    print_forms(found)
    return found


def train_seeds(
    args: argparse.Namespace, variant: Variant, job: Job, tokens: np.ndarray
) -> dict[str, Any]:
    """Train one compiled model from the weights of each seed; return times and last losses."""
    steps = TINY_STEPS if args.tiny else MLP_STEPS
    loop = Loop(variant, job, seed=SEEDS[0])
    step_ms, losses = [], []
    for seed in SEEDS:
        loop.start_again(seed)
        # on the device before the clock starts: a copy would wait for it
        batches = list(islice(read_batches(tokens, job, seed), WARMUP_STEPS + steps))
        times, found = loop.time_steps(iter(batches), steps)
        step_ms.append(statistics.median(times))
        losses.append(statistics.fmean(found[-LAST:]))
        print(f"{variant.name}, seed {seed}: {step_ms[-1]:.2f} ms, {losses[-1]:.4f}", flush=True)
    return {"step_ms": step_ms, "losses": losses}


def read_batches(tokens: np.ndarray, job: Job, seed: int) -> Iterator[Batch]:
    """Yield batches of sequences in an order that depends on the seed alone."""
    order = np.random.default_rng(seed)
    count = (len(tokens) - 1) // job.block_size
    while True:
        starts = job.block_size * order.integers(count, size=job.batch_size)
        rows = np.stack([tokens[start : start + job.block_size + 1] for start in starts])
        batch = torch.from_numpy(rows.astype(np.int64)).to(job.device)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def print_forms(found: dict[str, Metrics | None]) -> None:
    """Print times and losses, the differences paired by seed, and a rule for each form."""
    base = found["bf16"]
    if not base:
        return
    rows = []
    for name, one in found.items():
        if not one:
            continue
        ms, base_ms = statistics.median(one["step_ms"]), statistics.median(base["step_ms"])
        apart = [ours - theirs for ours, theirs in zip(one["losses"], base["losses"], strict=True)]
        losses = ", ".join(f"{loss:.4f}" for loss in one["losses"])
        rows.append([name, f"{ms:.2f}", f"{base_ms / ms:.4f}", losses, f"{max(apart):+.4f}"])
        if FORMS[name]:
            mean = statistics.fmean(apart)
            noise = 2 * statistics.stdev(apart) / len(apart) ** 0.5
            gain = 1 - ms / base_ms
            wanted = GAIN * len(FORMS[name])
            print_rule(
                f"{name}: {100 * gain:.2f} % less time, loss {mean:+.4f} +- {noise:.4f}",
                f"{100 * wanted:.0f} % and more, and the loss within two standard errors",
                gain >= wanted and abs(mean) <= noise,
                "add an option; otherwise the MLP stays in bf16",
            )
    print_table(["fp8 in", "ms a step", "speed", "losses", "largest difference"], rows)
