"""Show where the milliseconds of a step go, ours and nanoGPT's, for `gpu.py --only trace`.

Each system trains in a process of its own, unmodified. `observe.py` records three steps with
PyTorch's profiler, from the end of one optimizer step to the end of another. Prints the
milliseconds of a step by family, the matrix products by shape, and the thirty largest kernels.

A kernel belongs to the first family in `FAMILIES` whose pattern its label contains. The label is
the path of the operations that launched the kernel, and the kernel's name. The name of a compiled
Triton kernel contains the operations that it fuses: triton_per_fused_add_native_layer_norm_3 is a
norm with the residual addition before it, and counts as a norm. The shapes of the operands tell the
products apart: only the head's contain the vocabulary. Without a GPU, the operations of PyTorch
are the kernels.

Idle is the time in which no kernel runs. The profiler slows the host down, so idle is an upper
bound; the milliseconds of a step without the profiler are printed too.

Minutes on an H100, by arithmetic: ours takes 12 s to start, 20 s to compile, 60 steps of 70 ms and
10 s to write and read the trace. nanoGPT takes 8 s, up to 60 s, the same steps and 10 s. The sum is
2.2 minutes.
"""

import argparse
import json
import math
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, attempt, print_rule, print_table, run_command
from peers import VOCAB_SIZES, Job, accel_gpt, nanogpt_words

from accel_gpt.model.sizes import padded_vocab_size

OBSERVE = ROOT / "benchmarks/observe.py"
BATCH_SIZE = 32  # sequences, as in RESULTS.md
TINY = {"batch_size": 3, "n_embd": 48}  # no number of rows or columns is a padded vocabulary
STEPS = 3
LARGEST = 30  # kernels
LONGEST_NAME = 100  # characters of a kernel's name that are printed
# limits of the rules
IDLE_MS = 2.0  # a step
ATTENTION_MS = 9.0  # a step
BLOCK_TFLOPS = 580.0

PRODUCT = "product"  # becomes one of the next three by the shapes of its operands
BLOCK = "block products"
HEAD = "head"
UNKNOWN = "products of unknown shape"
IDLE = "idle"
FAMILIES = (
    ("optimizer", r"watched_step|_foreach_|multi_tensor_apply|vector_norm"),
    ("attention", r"scaled_dot_product|ScaledDotProduct|flash|fmha|sdpa|cudnn"),
    (
        PRODUCT,
        r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm)\b|nvjet|gemm|xmma|cutlass|splitK|triton_tem",
    ),
    ("loss", r"softmax|nll_loss|cross_entropy|loss_and_gradients"),
    ("embedding", r"embedding|Embedding|indexing_backward"),
    ("norms", r"layer_norm|LayerNorm|rms_norm|RmsNorm|RMSNorm|rsqrt"),
    ("GELU and residual", r"gelu|Gelu|relu|silu|tanh|_add_|aten::(add|mul)|Functor_add"),
    ("casts and copies", r"copy|Memcpy|Memset|clone|fill_|zero_|Fill|aten::cat\b|CatArray"),
    ("other", r""),
)
# the first of the two inputs that an operation multiplies
FIRST_OPERAND = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
# categories of the events in a trace
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]
Shape = tuple[int, ...]


def trace(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Trace both systems, and print tables and rules."""
    job = replace(job, **TINY) if args.tiny else replace(job, batch_size=BATCH_SIZE)
    measures = {
        "accel_gpt": partial(trace_ours, args, work, job),
        "nanoGPT": partial(trace_nanogpt, args, work, job),
    }
    report = {name: attempt(name, measure) for name, measure in measures.items()}
    measured = {name: found for name, found in report.items() if found}
    print_families(measured)
    for name, found in measured.items():
        print_products(name, found["products"])
        print_kernels(name, found["kernels"])
    for name, found in measured.items():
        idle = found["families"][IDLE]
        figure = f"{name} is idle for {idle:.2f} ms a step"
        print_rule(figure, f"over {IDLE_MS:g} ms", idle > IDLE_MS, "try CUDA graphs")
        attention = found["families"].get("attention", 0.0)
        figure = f"{name}'s attention takes {attention:.2f} ms a step"
        lever = "on an H100 or H200 it is not cuDNN's; find out why before anything else"
        print_rule(figure, f"over {ATTENTION_MS:g} ms", attention > ATTENTION_MS, lever)
        tflops = block_tflops(found["products"])
        figure = f"{name}'s block products run at {tflops:.0f} TFLOP/s"
        lever = "find out why: cuBLAS reaches 720 on an H200"
        print_rule(figure, f"under {BLOCK_TFLOPS:g} TFLOP/s", tflops < BLOCK_TFLOPS, lever)
    return report


# --------------------------------------------------------------------------- record


def trace_ours(
    args: argparse.Namespace, work: Path, job: Job, precision: str = "bf16"
) -> dict[str, Any]:
    """Trace `accel-gpt train`."""

    def train(settings: str) -> None:
        accel_gpt(
            work,
            job,
            precision="no" if args.tiny else precision,
            compiled="false" if args.tiny else "true",
            start=(str(OBSERVE), settings, "-m", "accel_gpt"),
        )

    return record(work, job, step="accel_gpt.optim.adamw:GuardedAdamW.step", train=train)


def trace_nanogpt(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Trace nanoGPT's train.py."""

    def train(settings: str) -> None:
        words = nanogpt_words(job, compiled=not args.tiny)
        run_command([sys.executable, OBSERVE, settings, *words], work / "nanoGPT")

    return record(work, job, step="torch.optim:AdamW.step", train=train)


def record(work: Path, job: Job, step: str, train: Callable[[str], None]) -> dict[str, Any]:
    """Call `train` with the settings of `observe.py`; return the figures of the recorded steps.

    `step` is the method of the optimizer.
    """
    times, events = work / "times.json", work / "trace.json"
    settings = {
        "watch": "profile",
        "step": step,
        "warmup": job.steps - STEPS,
        "steps": STEPS,
        "trace": str(events),
        "out": str(times),
    }
    train(json.dumps(settings))
    measured = json.loads(times.read_text())
    found = summarize(
        json.loads(events.read_text())["traceEvents"],
        vocabulary=head_rows(work / "nanoGPT/data" / job.data, job),
        wall_ms=measured["wall_ms"],
    )
    return found | {"plain_step_ms": measured["plain_step_ms"]}


# --------------------------------------------------------------------------- read a trace


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of the host."""

    name: str
    path: str  # the names of the operations around it and its own, joined by /
    around: "Operation | None"
    shapes: Sequence[Any]  # of its inputs
    end: float  # microseconds


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran; without a GPU, an operation without the operations in it."""

    name: str
    operation: Operation | None  # that launched it
    start: float  # microseconds
    us: float

    @property
    def label(self) -> str:
        """The text that the patterns of `FAMILIES` are searched in."""
        return f"{self.operation.path}/{self.name}" if self.operation else self.name


def head_rows(data: Path, job: Job) -> set[int]:
    """Return the rows that the head may have with the vocabulary of a folder of nanoGPT's data."""
    size = VOCAB_SIZES[job.data]
    if (data / "meta.pkl").exists():
        size = pickle.loads((data / "meta.pkl").read_bytes())["vocab_size"]
    return {size, padded_vocab_size(size)}


def summarize(events: Iterable[Event], vocabulary: set[int], wall_ms: float) -> dict[str, Any]:
    """Return the milliseconds of a step by family, product and kernel, from a trace of `STEPS`.

    `vocabulary`: the sizes that only the operands of the head have.
    """
    kernels, busy_us = read_kernels(events)
    families: dict[str, float] = defaultdict(float)
    products: dict[tuple[str, Shape], list[float]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    counted: dict[Shape, set[Operation]] = defaultdict(set)
    for kernel in kernels:
        operation, shape = product_of(kernel.operation)
        family = family_of(kernel.label, shape, vocabulary)
        ms = kernel.us / 1e3 / STEPS
        families[family] += ms
        by_name[family, kernel.name].append(ms)
        if operation and shape and family in (BLOCK, HEAD):
            products[family, shape].append(ms)
            counted[shape].add(operation)  # it may launch several kernels
    families[IDLE] = max(wall_ms - busy_us / 1e3, 0.0) / STEPS
    return {
        "wall_ms": wall_ms / STEPS,
        "families": dict(families),
        "products": [
            describe_product(family, shape, len(counted[shape]) / STEPS, sum(ms))
            for (family, shape), ms in by_time(products)
        ],
        "kernels": [
            {"family": family, "name": name, "count": len(ms) / STEPS, "ms": sum(ms)}
            for (family, name), ms in by_time(by_name)[:LARGEST]
        ],
    }


def describe_product(family: str, shape: Shape, count: float, ms: float) -> dict[str, Any]:
    """Return the figures of the products of one shape: `count` of them take `ms` a step."""
    tflops = 2 * math.prod(shape) * count / max(ms, 1e-9) / 1e9
    return {"family": family, "shape": shape, "count": count, "ms": ms, "tflops": tflops}


def by_time(found: Mapping[Any, list[float]]) -> list[tuple[Any, list[float]]]:
    """Sort lists of milliseconds by their sums, the largest first."""
    return sorted(found.items(), key=lambda item: -sum(item[1]))


def family_of(label: str, shape: Shape | None, vocabulary: set[int]) -> str:
    """Return the family of a kernel; `shape` is the shape of the product that it computes."""
    family = next(family for family, pattern in FAMILIES if re.search(pattern, label))
    if family != PRODUCT:
        return family
    if shape is None:
        return UNKNOWN
    return HEAD if vocabulary & set(shape) else BLOCK


def product_of(operation: Operation | None) -> tuple[Operation | None, Shape | None]:
    """Return the product that an operation belongs to, and its shape (..., M, K, N), or None."""
    while operation:
        first = FIRST_OPERAND.get(operation.name)
        if operation.name.startswith("triton_tem"):  # a product that the compiler wrote
            first = 0
        if first is not None and len(operation.shapes) > first + 1:
            left, right = operation.shapes[first : first + 2]
            if len(left) == len(right) >= 2 and left[-1] == right[-2]:
                return operation, (*left, right[-1])
        operation = operation.around
    return None, None


def read_kernels(events: Iterable[Event]) -> tuple[list[Kernel], float]:
    """Return the kernels of a trace, and the microseconds in which at least one of them ran."""
    complete = [event for event in events if event.get("ph") == "X"]
    by_id: dict[int, Operation] = {}
    by_correlation: dict[int, Operation | None] = {}
    on_host = []
    for event, operation, own_us in nest(complete):
        if event["cat"] in LAUNCHES:
            by_correlation[event["args"].get("correlation")] = operation.around
        else:
            by_id[event["args"].get("External id")] = operation
            on_host.append(Kernel(operation.name, operation, event["ts"], own_us))
    on_device = []
    for event in complete:
        if event.get("cat") in ON_DEVICE:
            launched_by = by_id.get(event["args"].get("External id"))
            launched_by = launched_by or by_correlation.get(event["args"].get("correlation"))
            on_device.append(Kernel(event["name"], launched_by, event["ts"], event["dur"]))
    if on_device:
        return on_device, union_us(on_device)
    return on_host, sum(kernel.us for kernel in on_host)


def union_us(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    total = 0.0
    end = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(kernel.start + kernel.us - max(kernel.start, end), 0.0)
        end = max(end, kernel.start + kernel.us)
    return total


def nest(events: Iterable[Event]) -> list[tuple[Event, Operation, float]]:
    """Return the host's events as operations, each with its microseconds outside of others.

    Annotations may have any text: of them, only the optimizer's step counts.
    """
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        is_step = event.get("cat") == "user_annotation" and event["name"] == "watched_step"
        if is_step or event.get("cat") in ("cpu_op", *LAUNCHES):
            threads[event["pid"], event["tid"]].append(event)
    found = []
    for of_thread in threads.values():
        found += nest_thread(sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])))
    return found


def nest_thread(events: Sequence[Event]) -> list[tuple[Event, Operation, float]]:
    """Do the same for the events of one thread, sorted by time, the outer before the inner."""
    inner_us: dict[Operation, float] = defaultdict(float)
    around: list[Operation] = []
    nested = []
    for event in events:
        while around and around[-1].end <= event["ts"]:
            around.pop()
        outer = around[-1] if around else None
        operation = Operation(
            name=event["name"],
            path=f"{outer.path}/{event['name']}" if outer else event["name"],
            around=outer,
            shapes=event["args"].get("Input Dims", []),
            end=event["ts"] + event["dur"],
        )
        if outer:
            inner_us[outer] += event["dur"]
        around.append(operation)
        nested.append((event, operation))
    return [
        (event, operation, max(event["dur"] - inner_us[operation], 0.0))
        for event, operation in nested
    ]


def block_tflops(products: Iterable[Mapping[str, Any]]) -> float:
    """Return TFLOP/s of the products of all blocks."""
    of_blocks = [found for found in products if found["family"] == BLOCK]
    ms = sum(found["ms"] for found in of_blocks)
    return sum(found["ms"] * found["tflops"] for found in of_blocks) / max(ms, 1e-9)


# --------------------------------------------------------------------------- print


def print_families(report: Mapping[str, Mapping[str, Any]]) -> None:
    """Print milliseconds a step: a row for each family, a column for each system."""
    names = [family for family, _ in FAMILIES if family != PRODUCT]
    rows = []
    for family in (BLOCK, HEAD, UNKNOWN, *names, IDLE):
        ms = [found["families"].get(family, 0.0) for found in report.values()]
        rows.append([family, *(f"{value:.2f}" for value in ms)])
    for row, key in (("recorded step", "wall_ms"), ("step without profiler", "plain_step_ms")):
        rows.append([row, *(f"{found[key]:.2f}" for found in report.values())])
    print_table(["ms a step", *report], rows)


def print_products(name: str, products: Iterable[Mapping[str, Any]]) -> None:
    """Print the matrix products of a step by shape."""
    rows = []
    for found in products:
        cells = [" x ".join(f"{size:,}" for size in found["shape"]), found["family"]]
        cells += [f"{found['count']:.1f}", f"{found['ms']:.3f}", f"{found['tflops']:.4g}"]
        rows.append(cells)
    print_table([f"{name}, M x K x N", "family", "a step", "ms a step", "TFLOP/s"], rows)


def print_kernels(name: str, kernels: Iterable[Mapping[str, Any]]) -> None:
    """Print the largest kernels of a step."""
    rows = []
    for found in kernels:
        kernel = found["name"].replace("|", "/")[:LONGEST_NAME]
        rows.append([kernel, found["family"], f"{found['count']:.1f}", f"{found['ms']:.3f}"])
    print_table([f"{name}, kernel", "family", "a step", "ms a step"], rows)
