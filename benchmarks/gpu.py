"""Measure a CUDA card in its first hour: GPT-2 124M, 1,024 tokens of context, bf16, compiled.

    python benchmarks/gpu.py NANOGPT TEXT [--only kernels trace ablate speed ddp first_step
        curve] [--micro_batches 16 32 64] [--rounds 3] [--seconds 210] [--picture FILE]
        [--json FILE] [--tiny]

NANOGPT is a checkout of karpathy/nanoGPT, run unmodified in a copy. TEXT is tinyshakespeare. It
needs GPT-2's vocabulary; without a network, set TIKTOKEN_CACHE_DIR.

The minutes are those of an H200, or arithmetic where "about" stands.

kernels, half a minute (kernels.py): versions, the kernel of attention, bandwidth of a copy,
    TFLOP/s of the products of blocks and head, attention by each kernel.
trace, 1 minute (traces.py): milliseconds of a step by family of kernels, ours and nanoGPT's.
ablate, 5 minutes (ablate.py): a step with each change that is meant to make it faster, by itself
    and together.
speed, 3.5 minutes a round at 64 sequences: tokens/s, MFU and peak memory beside nanoGPT and
    transformers' Trainer. "-" stands where the card's memory is too small.
ddp, about 1.5 minutes a round: ours under DistributedDataParallel with one process, at the smallest
    micro-batch: the cost of its buckets, and of compiling around them.
first_step, about 2 minutes: seconds from the first batch to the end of the update, compiler cache
    cold and warm.
curve, 6.6 minutes with --seconds 160 (curve.py): losses over seconds of the fast recipe and of
    nanoGPT, on the Python source of this machine, and a picture.

A part that fails is named at the end, and the parts after it are measured. The report is saved
after each part. `benchmarks/disk_io.py --only checkpoint` measures saves from the card, too.

`--tiny` runs tiny models uncompiled on a CPU: it tests these files and measures nothing.

Half an hour on a card, in this order (G is `python benchmarks/gpu.py NANOGPT TEXT --json FILE`,
with another FILE each time). PYTHONPATH names this folder if accel_gpt is not installed.

1. 2 minutes: pytest -m gpu -n 4
2. 10 minutes: G --only speed --micro_batches 32 64 --rounds 2
3. 2 minutes: G --only ddp --micro_batches 32 --rounds 1
4. 4 minutes: accel-gpt train shakespeare_char --data.prepare.source TEXT with --train.compile true,
   then graphs
5. 1 minute: G --only trace, after a change
6. 5 minutes: the commands of 4 with --train.budget 2m, which no card has run yet: do both end in
   time?
Each command of 4 and 6 has its own --out_dir.
The machine needs tiktoken, its cache of GPT-2's vocabulary, matplotlib and transformers.

Rules, which kernels and trace print with their figures:

- The head's input gradient at 4,096 rows runs at 95 % of its rate at 32,768 rows or more: larger
  chunks of the loss save 1.2 ms a step. Otherwise they save more.
- Attention takes over 9 ms a step: it is not cuDNN; find out why before anything else.
- The device is idle for over 2 ms a step: try CUDA graphs.
- Block products run under 580 TFLOP/s: find out why; cuBLAS reaches 720 on an H200.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ablate import ablate
from common import (
    OURS,
    ROOT,
    Metrics,
    Subjects,
    attempt,
    flags,
    interleave,
    make_parser,
    median,
    print_table,
    run_command,
    save_report,
    start_report,
)
from curve import curve
from kernels import kernels
from peers import CHARS, GPT2, Job, accel_gpt, copy_nanogpt, nanogpt, trainer
from traces import trace

from accel_gpt.launch.devices import peak_flops
from accel_gpt.launch.machine import device_name
from accel_gpt.model.sizes import flops_per_token, mfu

JOB = Job(
    n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16, data=GPT2,
    steps=60, warmup_steps=20, window=10, device="cuda",
)  # fmt: skip
TINY_JOB = Job(
    n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4, data=CHARS,
    steps=6, warmup_steps=2, window=2, device="cpu",
)  # fmt: skip
# accel-gpt under DDP with one process: the cost of its buckets, and of compiling around them
UNDER_DDP = ("-m", "torch.distributed.run", "--nproc_per_node", "1", *OURS)


def main() -> None:
    """Measure what `--only` names."""
    parser = make_parser(__doc__, peer=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=210, help="of each training of curve")
    parser.add_argument("--picture", type=Path, help="PNG for the losses of curve")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run it on a machine with one, or with --tiny")
    job = TINY_JOB if args.tiny else JOB
    report = start_report()
    with tempfile.TemporaryDirectory() as folder:
        copy_nanogpt(args.nanogpt, args.text, Path(folder), {job.data})
        for name in args.only:
            print(f"\n{name}\n", flush=True)
            part = partial(PARTS[name], args, Path(folder), job)
            report[name] = attempt(name, part)
            save_report(args.json, report)
    failed = [name for name in args.only if report[name] is None]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def speed(args: argparse.Namespace, work: Path, job: Job) -> dict[int, Any]:
    """Compare all systems at each micro-batch."""
    report = {}
    compiled = not args.tiny  # compiling takes longer than a test may
    for batch_size in args.micro_batches:
        at = replace(job, batch_size=batch_size)
        subjects = {
            "nanoGPT": partial(nanogpt, work, at, compiled=compiled),
            "Trainer": partial(trainer, work, at, compiled=compiled, bf16=not args.tiny),
            "accel_gpt": ours(args, work, at),
        }
        report[batch_size] = compare(args, at, subjects)
    return report


def ddp(args: argparse.Namespace, work: Path, job: Job) -> dict[str, list[Metrics]]:
    """Compare ours with ours under DistributedDataParallel in one process."""
    at = replace(job, batch_size=min(args.micro_batches))
    subjects = {
        "accel_gpt": ours(args, work, at),
        "DDP, one process": ours(args, work, at, start=UNDER_DDP),
    }
    return compare(args, at, subjects)


def first_step(args: argparse.Namespace, work: Path, job: Job) -> list[float]:
    """Time the first step of `accel-gpt bench`, cold and then warm."""
    options: dict[str, object] = {
        "steps": 2,  # the fewest that bench takes
        "json": True,
        "data.train": work / "nanoGPT/data" / job.data,
        "data.tokenizer": "gpt2" if job.data == GPT2 else None,
        "data.prepare.source": None,
        "model.n_layer": job.n_layer,
        "model.n_head": job.n_head,
        "model.n_embd": job.n_embd,
        "model.block_size": job.block_size,
        "train.mixed_precision": "no" if args.tiny else "bf16",
        "train.compile": not args.tiny,
        "train.micro_batch_size": job.batch_size,
        "train.tokens_per_step": job.tokens_per_step,
        "train.max_tokens": 800 * job.tokens_per_step,
        "eval.tokens": job.tokens_per_step,
    }
    command = [sys.executable, *OURS, "bench", ROOT / "configs/gpt2_124m.yaml", *flags(options)]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled")}
    found = []
    for state in ("cold", "warm"):
        report = json.loads(run_command(command, **cache))
        found.append(report["first_step_seconds"])
        print(f"first step, {state} compiler cache: {found[-1]:.1f} s", flush=True)
    return found


PARTS: dict[str, Callable[[argparse.Namespace, Path, Job], Any]] = {
    "kernels": kernels,
    "trace": trace,
    "ablate": ablate,
    "speed": speed,
    "ddp": ddp,
    "first_step": first_step,
    "curve": curve,
}


def ours(
    args: argparse.Namespace,
    work: Path,
    job: Job,
    precision: str = "bf16",
    compiled: str = "true",
    more: Sequence[str] = (),
    start: Sequence[str] = OURS,
) -> Callable[[], Metrics]:
    """Return what measures a form of ours."""
    if args.tiny:
        precision, compiled = "no", "false"
    return partial(
        accel_gpt, work, job, precision=precision, compiled=compiled, more=more, start=start
    )


def compare(args: argparse.Namespace, job: Job, subjects: Subjects) -> dict[str, list[Metrics]]:
    """Measure the subjects in turn and print their medians, with ratios to the first."""
    safe = {name: partial(or_out_of_memory, measure) for name, measure in subjects.items()}
    found = interleave(safe, args.rounds)
    flops = flops_per_token(job.model, 50257)
    peak = peak_flops(device_name(torch.device(job.device)), "bf16")
    rows = [format_row(name, found, job, flops, peak) for name in found]
    first = next(iter(found))
    head = [f"{job.batch_size} x {job.block_size} tokens", "ms a step", "tokens/s", "MFU"]
    head += [f"tokens/s of {first}'s", "GB", f"GB of {first}'s"]
    print_table(head, rows)
    return found


def or_out_of_memory(measure: Callable[[], Metrics]) -> Metrics:
    """Measure; return infinite time and memory if the card's memory is too small."""
    try:
        return measure()
    except SystemExit as stopped:
        if "out of memory" not in str(stopped):
            raise
        return {"step_ms": float("inf"), "memory_gb": float("inf")}


def format_row(
    name: str, found: Mapping[str, list[Metrics]], job: Job, flops: float, peak: float | None
) -> list[str]:
    """Write one row: medians, and ratios to the first subject."""
    base = next(iter(found.values()))
    ms, memory = median(found[name], "step_ms"), median(found[name], "memory_gb")
    if ms == float("inf"):
        return [name, *["-"] * 6]
    rate = 1e3 * job.tokens_per_step / ms
    share = f"{mfu(rate, flops, peak):.3f}" if peak else "-"
    speedup = median(base, "step_ms") / ms
    memory_share = memory / median(base, "memory_gb")
    figures = [f"{ms:.1f}", f"{rate:,.0f}", share]
    return [name, *figures, f"{speedup:.2f}", f"{memory:.2f}", f"{memory_share:.2f}"]


if __name__ == "__main__":
    main()
