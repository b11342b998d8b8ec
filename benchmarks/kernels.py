"""Measure what the kernels of a step can do on this device, for `gpu.py --only kernels`.

Prints versions, the kernel that attention uses, the bandwidth of a copy, TFLOP/s of the matrix
products, and attention by each of PyTorch's kernels. Each rule at the end names the decision that
its figure serves.

All times are medians over `SAMPLES` samples, by CUDA events. The device sleeps while the host
enqueues a sample, so that the host's launches do not count. The operands of a product rotate
through buffers of `ROTATED_BYTES` in all, so that none is in the L2 cache.

Minutes on an H100, by arithmetic: 60 products and 14 passes of attention, each with 9 samples of
5 ms of sleep and about 10 ms of work, take 10 s. Drawing the operands and loading the libraries
takes as long again. In all 1 minute at most.

Shapes: B sequences, H heads, T tokens, D head size, C channels, V rows of the head.
"""

import argparse
import math
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import attempt, print_rule, print_table
from peers import VOCAB_SIZES, Job
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

ROWS = (4_096, 8_192, 16_384, 32_768)
TINY_ROWS = (32, 64)
PRODUCTS = ("forward", "input gradient", "weight gradient")
BLOCK = ("qkv", "proj", "up", "down")
BATCH_SIZE = 32  # sequences, as in RESULTS.md
SAMPLES = 9
SAMPLE_MS = 8.0  # work in a sample
MOST_CALLS = 100  # in a sample; the host enqueues as many in less than `SLEEP_CYCLES`
SLEEP_CYCLES = 10**7  # 5 ms at 2 GHz
ROTATED_BYTES = 256 * 2**20  # five times the L2 cache of an H100
COPIED_BYTES = 2**30

# kernel of `scaled_dot_product_attention`, and what the names of its kernels or operations contain
BACKENDS = (
    ("cudnn", r"cudnn"),
    ("efficient", r"fmha_cutlass|efficient_attention"),
    ("flash", r"flash"),
    ("math", r"softmax|attention_math"),
)
FORCED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

# limits of the rules
SAME_RATE = 0.95  # of a rate
ATTENTION_MS = 9.0  # a step
BLOCK_TFLOPS = 580.0


def kernels(args: argparse.Namespace, _work: Path, job: Job) -> dict[str, Any]:
    """Measure all of it and print tables and rules."""
    device = torch.device(job.device)
    rows = TINY_ROWS if args.tiny else ROWS
    report: dict[str, Any] = {"versions": versions(), "products": []}
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    shape = attention_shape(args, job)
    report["attention_backend"] = attempt("attention", lambda: chosen_backend(shape, device))
    B, H, T, D = shape
    print(f"attention of ({B}, {H}, {T}, {D}), bf16, causal: {report['attention_backend']}")
    copied = 2**20 if args.tiny else COPIED_BYTES
    report["copy_tb_per_second"] = attempt("copy", lambda: copy_bandwidth(copied, device))
    print(f"copy on the device: {dash(report['copy_tb_per_second'], '.4g')} TB/s, read and written")
    for product in all_products(job, rows):
        figures = attempt(product.name, partial(product.measure, device))
        described = {"name": product.name, **vars(product)}
        report["products"].append({**described, **(figures or {"ms": None, "tflops": None})})
    print_products(report["products"], rows)
    report["attention"] = measure_attention(shape, device)
    print_attention(report["attention"], shape)
    report["rules"] = print_rules(report, job, rows)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other parts run in processes of their own
    return report


def versions() -> dict[str, str]:
    """Return the versions of PyTorch, its libraries and the driver, and the limits of the card."""
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    found["cuDNN"] = str(torch.backends.cudnn.version())
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "-"
    query = "driver_version,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found["driver, power limit, largest clock"] = done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        found["driver"] = "-"
    return found


def dash(figure: float | None, form: str) -> str:
    """Format a figure, or "-" if it could not be measured."""
    return "-" if figure is None else format(figure, form)


# --------------------------------------------------------------------------- time


def call_ms(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median milliseconds of a call. `calls` do the same with other buffers."""
    sample = sample_cuda if device.type == "cuda" else sample_cpu
    warm_up = max(len(calls), 3)
    sample(calls, warm_up)
    once = sample(calls, warm_up)
    count = min(max(math.ceil(SAMPLE_MS / max(once, 1e-4)), 1), MOST_CALLS)
    return statistics.median(sample(calls, count) for _ in range(SAMPLES))


def sample_cuda(calls: Sequence[Callable[[], object]], count: int) -> float:
    """Return the milliseconds of a call on the device, over `count` calls in a row."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for number in range(count):
        calls[number % len(calls)]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def sample_cpu(calls: Sequence[Callable[[], object]], count: int) -> float:
    """Return the milliseconds of a call on a CPU, over `count` calls in a row."""
    start = time.perf_counter()
    for number in range(count):
        calls[number % len(calls)]()
    return 1e3 * (time.perf_counter() - start) / count


def copy_bandwidth(copied: int, device: torch.device) -> float:
    """Return TB/s of a copy of `copied` bytes on the device: bytes read and bytes written."""
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = call_ms([lambda: target.copy_(source)], device)
    return 2 * copied / ms / 1e9


# --------------------------------------------------------------------------- products


@dataclass(frozen=True)
class Product:
    """One of the three products of a linear layer, in bf16."""

    matrix: str
    product: str
    rows: int  # tokens
    inputs: int  # of the layer
    outputs: int  # of the layer
    float32: bool = False  # the result; the operands are bf16

    @property
    def name(self) -> str:
        """The layer and the product."""
        form = ", float32" if self.float32 else ""
        return f"{self.matrix} {self.product}{form}"

    @property
    def flops(self) -> int:
        """The FLOPs of the product."""
        return 2 * self.rows * self.inputs * self.outputs

    def measure(self, device: torch.device) -> dict[str, float]:
        """Return milliseconds and TFLOP/s."""
        calls = [self.draw(device) for _ in range(self.sets)]
        ms = call_ms(calls, device)
        return {"ms": ms, "tflops": self.flops / ms / 1e9}

    @property
    def sets(self) -> int:
        """The sets of operands and results that rotate."""
        numbers = self.rows * self.inputs + self.rows * self.outputs + self.inputs * self.outputs
        return min(max(math.ceil(ROTATED_BYTES / (2 * numbers)), 1), 32)

    def draw(self, device: torch.device) -> Callable[[], object]:
        """Draw operands; return what computes their product."""
        x, weight, dy = (
            (self.rows, self.inputs),
            (self.outputs, self.inputs),
            (self.rows, self.outputs),
        )
        shapes = {
            "forward": (x, weight),
            "input gradient": (dy, weight),
            "weight gradient": (dy, x),
        }[self.product]
        left, right = (torch.randn(s, dtype=torch.bfloat16, device=device) for s in shapes)
        if self.product == "forward":
            right = right.T
        elif self.product == "weight gradient":
            left = left.T
        if self.float32:
            return lambda: torch.mm(left, right, out_dtype=torch.float32)
        result = torch.empty(len(left), right.shape[1], dtype=torch.bfloat16, device=device)
        return lambda: torch.mm(left, right, out=result)


def all_products(job: Job, rows: Iterable[int]) -> list[Product]:
    """List the products of the block's matrices and of the head, at each number of rows."""
    C = job.n_embd
    V = VOCAB_SIZES[job.data]
    layers = {
        "qkv": (C, 3 * C),
        "proj": (C, C),
        "up": (C, 4 * C),
        "down": (4 * C, C),
        "head": (C, V),
    }
    found = []
    for matrix, (inputs, outputs) in layers.items():
        for product in PRODUCTS:
            forms = [False, True] if (matrix, product) == ("head", "weight gradient") else [False]
            for float32 in forms:
                for count in rows:
                    found.append(Product(matrix, product, count, inputs, outputs, float32))
    return found


def print_products(products: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
    """Print TFLOP/s: a row for each product, a column for each number of rows."""
    lines: dict[str, list[str]] = {}
    for found in products:
        lines.setdefault(found["name"], []).append(dash(found["tflops"], ".4g"))
    head = ["TFLOP/s", *(f"{count:,} rows" for count in rows)]
    print_table(head, [[name, *figures] for name, figures in lines.items()])


# --------------------------------------------------------------------------- attention


def attention_shape(args: argparse.Namespace, job: Job) -> tuple[int, int, int, int]:
    """Return (B, H, T, D) of attention in a step."""
    batch_size = 2 if args.tiny else BATCH_SIZE
    return batch_size, job.n_head, job.block_size, job.n_embd // job.n_head


def draw_attention(shape: Sequence[int], device: torch.device) -> list[Tensor]:
    """Draw queries, keys and values (B, H, T, D) as views of one tensor, as a model has them."""
    B, H, T, D = shape
    fused = torch.randn(B, T, 3, H, D, dtype=torch.bfloat16, device=device)
    return [part.transpose(1, 2).detach().requires_grad_() for part in fused.unbind(2)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention, by the kernel that PyTorch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chosen_backend(shape: Sequence[int], device: torch.device) -> str:
    """Return the kernel that PyTorch chooses, by the names of the kernels that run."""
    cuda = device.type == "cuda"
    q, k, v = draw_attention(shape, device)
    attend(q, k, v)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        attend(q, k, v)
        if cuda:
            torch.cuda.synchronize()
    return backend_of([event.key for event in profiler.key_averages()])


def backend_of(names: Sequence[str]) -> str:
    """Return the first of `BACKENDS` that the names of kernels or operations show."""
    for backend, pattern in BACKENDS:
        if any(re.search(pattern, name) for name in names):
            return backend
    return f"unknown: {', '.join(names)[:200]}"


def measure_attention(shape: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of each kernel, also with half as many heads of twice the size."""
    B, H, T, D = shape
    found: dict[str, Any] = {}
    for size in dict.fromkeys((D, 2 * D)):
        with_size = (B, H * D // size, T, size)
        for backend in FORCED:
            what = f"{backend} attention, D={size}"
            measure = partial(attention_ms, backend, with_size, device)
            found.setdefault(str(size), {})[backend] = attempt(what, measure)
    return found


def attention_ms(backend: str, shape: Sequence[int], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a forward and of a backward pass by one kernel."""
    q, k, v = draw_attention(shape, device)
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(FORCED[backend]):
        y = attend(q, k, v)
        dy = torch.randn_like(y)
        forward = call_ms([lambda: attend(q, k, v)], device)
        backward = call_ms(
            [lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)], device
        )
    return {"forward_ms": forward, "backward_ms": backward}


def print_attention(found: dict[str, Any], shape: Sequence[int]) -> None:
    """Print milliseconds and TFLOP/s of each kernel and head size."""
    B, H, T, D = shape
    forward_flops = 2 * B * H * T * T * D  # two products, half of each masked
    rows = []
    for size, backends in found.items():
        for backend, ms in backends.items():
            cells = ["-"] * 4
            if ms:
                forward, backward = ms["forward_ms"], ms["backward_ms"]
                cells = [f"{forward:.3f}", f"{forward_flops / forward / 1e9:.4g}"]
                # five products in the backward pass: the logits are computed again
                cells += [f"{backward:.3f}", f"{2.5 * forward_flops / backward / 1e9:.4g}"]
            rows.append([f"{backend}, D={size}", *cells])
    print_table(["attention", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s"], rows)


# --------------------------------------------------------------------------- rules


def print_rules(report: dict[str, Any], job: Job, rows: Sequence[int]) -> dict[str, float]:
    """Print each figure that decides something, with the decision; return the figures."""
    found = chunk_rule(report, rows[0], rows[-1])
    return found | attention_rule(report, job) | block_rule(report, rows[-1])


def chunk_rule(report: dict[str, Any], few: int, many: int) -> dict[str, float]:
    """Print the rate of the head's input gradient at `few` rows, over its rate at `many`."""
    ms = {
        product["rows"]: product["ms"]
        for product in report["products"]
        if (product["matrix"], product["product"]) == ("head", "input gradient")
    }
    if not ms[few] or not ms[many]:
        return {}
    chunks = many // few
    rate = ms[many] / (chunks * ms[few])
    saved = chunks * ms[few] - ms[many]
    print_rule(
        f"head's input gradient at {few:,} rows: {rate:.3f} of its rate at {many:,} rows",
        f"{SAME_RATE} and more",
        rate >= SAME_RATE,
        f"larger chunks of the loss save 1.2 ms a step; below, {saved:.2f} ms more",
    )
    return {"head_input_gradient_rate": rate, "head_input_gradient_saved_ms": saved}


def attention_rule(report: dict[str, Any], job: Job) -> dict[str, float]:
    """Print the milliseconds of a step that attention takes by the chosen kernel."""
    backend = report["attention_backend"]
    head_size = str(job.n_embd // job.n_head)
    ms = report["attention"][head_size].get(backend)
    if not ms:
        return {}
    total = job.n_layer * (ms["forward_ms"] + ms["backward_ms"])
    print_rule(
        f"attention of {job.n_layer} layers by {backend}: {total:.2f} ms a step",
        f"over {ATTENTION_MS:g} ms",
        total > ATTENTION_MS,
        "it is not cuDNN; find out why before anything else",
    )
    return {"attention_ms": total}


def block_rule(report: dict[str, Any], rows: int) -> dict[str, float]:
    """Print TFLOP/s of a block's products at `rows` rows."""
    chosen = [p for p in report["products"] if p["matrix"] in BLOCK and p["rows"] == rows]
    if not all(p["ms"] for p in chosen):
        return {}
    flops = sum(2 * p["rows"] * p["inputs"] * p["outputs"] for p in chosen)
    tflops = flops / sum(p["ms"] for p in chosen) / 1e9
    print_rule(
        f"products of a block at {rows:,} rows: {tflops:.0f} TFLOP/s",
        f"under {BLOCK_TFLOPS:g} TFLOP/s",
        tflops < BLOCK_TFLOPS,
        "find out why: cuBLAS reaches 720 on an H200",
    )
    return {"block_tflops": tflops}
