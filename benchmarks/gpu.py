"""Measure a CUDA card in half an hour: speed, the levers that are left, and what must work.

    python benchmarks/gpu.py NANOGPT TEXT --only WORD ... [--json FILE] [--tiny]
        [--micro_batches 16 32 64] [--rounds 2]           speed
        [--sizes 350m 1558m]                              fp8, fp8_trace, regional
        [--sequences 32]                                  fp8 and fp8_trace of 1558m
        [--seconds 160] [--seeds 0] [--points FILE] [--picture FILE]      curve
        [--minutes 60] [--kill_every 600]                 kills

NANOGPT is a checkout of karpathy/nanoGPT, run unmodified in a copy. TEXT is tinyshakespeare. Unless
a part says otherwise, the model is GPT-2 124M with 1,024 tokens of context, in bf16 and compiled.

| word | minutes | what | decides |
|---|---|---|---|
| checks | 4 | `pytest -m gpu`, files of --code, budgets (checks.py) | 0 failed |
| loss | 3.5 | kernels of the loss (loss_kernels.py) | 1.5 ms: an optional dependency |
| fp8 | 3.5 and 8.5 | 350M and 1.5B in fp8 (fp8.py) | 600 TFLOP/s at 1.5B |
| fp8_trace | 2 | where a step of 1.5B in fp8 spends its time (fp8.py) | why not 600 |
| fp8_mlp | 4.5 | the MLP's forward pass in fp8 (fp8.py) | 1 % a product, the same loss |
| graphs | 2.5 | CUDA graphs over accumulation (loops.py) | 2 ms a micro-step |
| regional | 4.5 | first steps of 350M and 1.5B, compiled by blocks (here) | half |
| speed | 3.5 a round | tokens/s, MFU, memory beside nanoGPT and the Trainer (here) | README |
| small | 1.5 | fp16, 8 GB, micro-batch auto (checks.py) | it runs |
| curve | 4, 3.3 a seed | losses over seconds of the fast recipe and nanoGPT (curve.py) | README |
| kills | `--minutes` | a run with a budget, killed again and again (checks.py) | each step once |
| trace | 1 | where the milliseconds of a step go (traces.py) | what to try next |

The minutes are those of an H200: from RESULTS.md, or arithmetic in the module. Half an hour in
commands of at most ten minutes, each with its own --json FILE (G is the command above):

1. G --only loss checks
2. G --only fp8 --sizes 1558m
3. G --only fp8_mlp graphs small
4. G --only fp8 regional --sizes 350m; if time is short, without regional

On a card without figures in RESULTS.md, first: G --only trace speed --micro_batches 32 --rounds 2

A part that fails is named at the end, and the parts after it are measured. The report is saved
after each part.

The machine needs what `pip install -e .` installs, though not datasets; pytest, pytest-timeout,
pytest-xdist and hypothesis; and GPT-2's vocabulary (without a network, set TIKTOKEN_CACHE_DIR).
fp8 needs torchao, and loss the packages that its module names. If accel_gpt is not installed,
PYTHONPATH names its folder.
`benchmarks/disk_io.py --only checkpoint` measures saves from the card, too.

`--tiny` runs tiny models uncompiled on a CPU: it rehearses these files and measures nothing.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checks import checks, kills, small
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
    print_rule,
    print_table,
    run_command,
    save_report,
    start_report,
)
from curve import curve
from fp8 import SIZES, fp8, fp8_mlp, fp8_trace
from loops import graphs
from loss_kernels import loss
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
HALF = 0.5  # of the first step; limit of the rule of regional
SAME_STEP = 1.01  # of a later step
# Run accel-gpt with each block compiled by itself: the code of one serves all
BY_BLOCKS = """
import runpy
from accel_gpt.model.gpt import GPT

def compile_parts(gpt, **how):
    for part in (*gpt.blocks, gpt.head):
        part.compile(**how)

GPT.compile = compile_parts
runpy.run_module("accel_gpt", run_name="__main__", alter_sys=True)
"""


def main() -> None:
    """Measure what `--only` names."""
    parser = make_parser(__doc__, peer=True)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=160)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--points", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill_every", type=float, default=600, help="seconds")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run it on a machine with one, or with --tiny")
    if not args.tiny and not args.only:
        parser.error("name what to measure by --only; all of it takes hours")
    words = args.only or [*PARTS]
    job = TINY_JOB if args.tiny else JOB
    report = start_report()
    with tempfile.TemporaryDirectory() as folder:
        copy_nanogpt(args.nanogpt, args.text, Path(folder), {job.data})
        for name in words:
            print(f"\n{name}\n", flush=True)
            began = time.monotonic()
            report[name] = attempt(name, partial(PARTS[name], args, Path(folder), job))
            print(f"{name} took {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
            save_report(args.json, report)
    failed = [name for name in words if not has_figures(report[name])]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def has_figures(found: Any) -> bool:
    """Return whether a part has measured anything."""
    if isinstance(found, dict):
        return any(map(has_figures, found.values()))
    return found is not None


def speed(args: argparse.Namespace, work: Path, job: Job) -> dict[int, Any]:
    """Compare all systems at each micro-batch."""
    report = {}
    compiled = not args.tiny  # compiling takes longer than a test may
    for batch_size in args.micro_batches:
        at = replace(job, batch_size=batch_size)
        subjects = {
            "nanoGPT": partial(nanogpt, work, at, compiled=compiled),
            "Trainer": partial(trainer, work, at, compiled=compiled, bf16=not args.tiny),
            "accel_gpt": partial(
                accel_gpt,
                work,
                at,
                precision="no" if args.tiny else "bf16",
                compiled="false" if args.tiny else "true",
            ),
        }
        report[batch_size] = compare(args, at, subjects)
    best = {
        name: min(median(found[name], "step_ms") / size for size, found in report.items())
        for name in subjects
    }  # milliseconds of a sequence
    ratio = min(best["nanoGPT"], best["Trainer"]) / best["accel_gpt"]
    print_rule(
        f"each at its best micro-batch, accel_gpt is {ratio:.2f} x the faster of the others",
        "1 and more",
        ratio >= 1,
        "README names the card and the figure; below, `trace` says where the time goes",
    )
    return report


def regional(args: argparse.Namespace, _work: Path, job: Job) -> dict[str, Any]:
    """Time the first step of large models with an empty compiler cache, whole and by blocks."""
    report: dict[str, Any] = {}
    rows = []
    for size in args.sizes:
        config, _ = SIZES[size]
        found = {}
        for form, start in {"whole": OURS, "by blocks": ("-c", BY_BLOCKS)}.items():
            measure = partial(first_steps, args, job, config, start)
            found[form] = attempt(f"{size}, {form}", measure)
            print(f"{size}, {form}: {found[form]}", flush=True)
            if found[form]:
                seconds, ms = found[form]["first_step_seconds"], found[form]["step_ms"]
                rows.append([f"{size}, {form}", f"{seconds:.1f}", f"{ms:.1f}"])
        report[size] = found
    print_table(["compiled", "first step, s", "ms a step"], rows)
    pairs = [(one["whole"], one["by blocks"]) for one in report.values() if all(one.values())]
    shorter = [
        blocks["first_step_seconds"] <= HALF * whole["first_step_seconds"]
        and blocks["step_ms"] <= SAME_STEP * whole["step_ms"]
        for whole, blocks in pairs
    ]
    print_rule(
        f"{sum(shorter)} of {len(args.sizes)} sizes gain",
        f"all need {HALF} of the first step's seconds and {SAME_STEP} of a later step's, or less",
        len(shorter) == len(args.sizes) and all(shorter),
        "train.compile compiles by blocks",
    )
    return report


def first_steps(
    args: argparse.Namespace, job: Job, config: str, start: Sequence[str]
) -> dict[str, float]:
    """Return the seconds of the first step of `accel-gpt bench`, and the milliseconds of others."""
    batch_size = 1 if args.tiny else 8
    options: dict[str, object] = {
        "steps": 2 if args.tiny else 8,
        "json": True,
        "model.block_size": job.block_size,
        "train.mixed_precision": "no" if args.tiny else "bf16",
        "train.compile": True,
        "train.micro_batch_size": batch_size,
        "train.tokens_per_step": batch_size * job.block_size,
        "train.max_tokens": None,
        "train.max_steps": 1000,
    }
    if args.tiny:  # narrow, but with as many layers, since they decide the time
        options |= {"model.n_head": 2, "model.n_embd": 32}
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, *start, "bench", ROOT / f"configs/{config}.yaml"]
        report = json.loads(run_command([*command, *flags(options)], **caches))
    return {key: report[key] for key in ("first_step_seconds", "step_ms")}


def compare(args: argparse.Namespace, job: Job, subjects: Subjects) -> dict[str, list[Metrics]]:
    """Measure the subjects in turn and print their medians, with ratios to the first."""
    safe = {name: partial(or_infinite, name, measure) for name, measure in subjects.items()}
    found = interleave(safe, args.rounds)
    flops = flops_per_token(job.model, 50257)
    peak = peak_flops(device_name(torch.device(job.device)), "bf16")
    rows = [format_row(name, found, job, flops, peak) for name in found]
    first = next(iter(found))
    head = [f"{job.batch_size} x {job.block_size} tokens", "ms a step", "tokens/s", "MFU"]
    head += [f"tokens/s of {first}'s", "GB", f"GB of {first}'s"]
    print_table(head, rows)
    return found


def or_infinite(name: str, measure: Callable[[], Metrics]) -> Metrics:
    """Measure; return infinite time and memory if it fails, as where the memory is too small."""
    return attempt(name, measure) or {"step_ms": float("inf"), "memory_gb": float("inf")}


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


PARTS: dict[str, Callable[[argparse.Namespace, Path, Job], Any]] = {
    "checks": checks,
    "loss": loss,
    "fp8": fp8,
    "fp8_trace": fp8_trace,
    "fp8_mlp": fp8_mlp,
    "graphs": graphs,
    "regional": regional,
    "speed": speed,
    "small": small,
    "curve": curve,
    "kills": kills,
    "trace": trace,
}

if __name__ == "__main__":
    main()
