"""Measure kernels for the loss beside ours, for `gpu.py --only loss`: GPT-2 124M, bf16.

accel_gpt/model/loss.py turns logits into losses and dlogits with one kernel of inductor, which
reads each row twice: 9.9 GB a step of 32,768 tokens. A kernel that keeps a row reads it once: 6.6.

kernels: logits to losses and dlogits that overwrite them, all chunks of a step: ours, ours with
    options of inductor, two Triton kernels of this file, Liger's and QuACK's. A kernel without a
    mask for the padding gets -inf there first, inside its time.
heads: forward and backward pass from x and a float32 weight to their gradients, at our size of a
    chunk: ours, ours with each kernel that was faster, and the heads of Liger, cut-cross-entropy
    and QuACK. Milliseconds, peak memory above the inputs, and errors on fewer tokens, a tenth of
    them without a target, against float64 from the same rounded inputs.

Times are medians over `SAMPLES` samples, by CUDA events. The device sleeps while the host enqueues
a sample, so that the host's launches do not count.

A kernel runs on its own dlogits in the next sample. This takes as long as with logits: the traffic
is the same, and softmax of numbers from -1 to 1 is finite, which is checked. Liger's head waits
for the device twice a pass, so its launches count.

Liger's and QuACK's heads count the padding as tokens: they have no mask, and a narrowed weight has
rows of logits without the alignment of fast products. Their errors are those of the loss with the
padding. cut-cross-entropy gets a narrowed weight.

Rules: a kernel or head that saves 1.5 ms or more of the step, and whose loss and gradients are no
further from float64 than 1.1 times ours, becomes an optional dependency, by auto. One of torch or
of this file takes the place of ours.

Minutes on an H200, by arithmetic with assumed times of compilation: ten kernels, 5 s each and 30 s
with options, 1.5; ten heads, 5 s each and 30 s for QuACK's, 1; the same for the errors, 1. All
samples of a kernel or head take 0.3 s. In all 3.5.

Packages, each installed by `pip install --no-deps`: liger-kernel 0.8.5; cut-cross-entropy 25.1.1;
and for QuACK quack-kernels 0.6.5, apache-tvm-ffi 0.1.15.post2, torch-c-dlpack-ext 0.1.5, and
nvidia-cutlass-dsl 4.8.1 with its libs-core, libs-base and libs-cu13 (92 MB). A missing package is
one line.

`--tiny` with TRITON_INTERPRET=1 runs the kernels of Triton on a CPU, in float16.

Shapes: N tokens of a step, n tokens of a chunk, C channels, V vocabulary, V' with padding.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import attempt, print_rule, print_table
from loops import free_memory
from peers import Job
from torch import Tensor

from accel_gpt.launch.compile import forget_compiled
from accel_gpt.model import loss as loss_module
from accel_gpt.model.loss import IGNORE, chunked_loss
from accel_gpt.model.sizes import padded_vocab_size

try:
    import triton
    from triton import language as tl
except ImportError:  # a PyTorch for CPUs
    triton = None

Kernel = Callable[[Tensor, Tensor, int, float], Tensor]  # as `_overwrite_with_dlogits`
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (N, C), weight (V', C), targets (N,)

BATCH_SIZE = 32  # sequences, as in RESULTS.md
SAMPLES = 9
SAMPLE_MS = 8.0  # work in a sample
MOST_CALLS = 100  # in a sample; the host enqueues as many in less than `SLEEP_CYCLES`
SLEEP_CYCLES = 10**7  # 5 ms at 2 GHz
VOCAB_SIZE = 50_257
CHECKED = 2_048  # tokens for the errors
TINY_VOCAB_SIZE = 1_200  # padded to 1,216, in blocks of 1,024, 128 and 64
SAVED_MS = 1.5  # limit of the first rule
WORSE = 1.1  # limit of the second rule
LOSS_FLOOR = 5e-5  # nats; a smaller error of the mean loss is chance: logits are rounded to bf16


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of the head."""

    tokens: int
    channels: int
    vocab_size: int
    chunk: int  # as the model chooses it on this device
    checked: int  # tokens for the errors
    device: torch.device
    dtype: torch.dtype  # of x, logits and dlogits

    @property
    def rows(self) -> int:
        """The vocabulary with its padding."""
        return padded_vocab_size(self.vocab_size)


def loss(args: argparse.Namespace, _work: Path, job: Job) -> dict[str, Any]:
    """Measure all of it and print tables and rules."""
    sizes = choose_sizes(args, job)
    print(
        f"{sizes.tokens:,} tokens, {sizes.channels} channels, vocabulary {sizes.vocab_size:,} of "
        f"{sizes.rows:,} rows, chunks of {sizes.chunk:,} tokens"
    )
    if args.tiny:
        print("the times are a CPU's: they rehearse the code and mean nothing")
    kernels_ms = measure_kernels(sizes)
    print_kernels(kernels_ms, sizes)
    base = kernels_ms["ours"]
    faster = [
        name
        for name, ms in kernels_ms.items()
        if name != "ours" and ms and (args.tiny or (base and ms < base))
    ]
    heads = measure_heads(sizes, faster)
    print_heads(heads)
    print_rules(heads, timed=not args.tiny)
    free_memory()  # for the parts after this one, which run in other processes
    return {"chunk": sizes.chunk, "kernels_ms": kernels_ms, "heads": heads}


def choose_sizes(args: argparse.Namespace, job: Job) -> Sizes:
    """Return the sizes of a step of GPT-2 124M, or tiny ones."""
    device = torch.device(job.device)
    vocab_size = TINY_VOCAB_SIZE if args.tiny else VOCAB_SIZE
    tokens = 32 if args.tiny else BATCH_SIZE * job.block_size
    # float16 if tiny: Triton's interpreter does not round to bf16, it cuts
    dtype = torch.float16 if args.tiny else torch.bfloat16
    table = torch.empty(padded_vocab_size(vocab_size), 1, dtype=dtype, device=device)
    chunk = min(loss_module._chunk_size(table, softcap=0.0, compiled=True), tokens)
    return Sizes(
        tokens=tokens,
        channels=job.n_embd,
        vocab_size=vocab_size,
        chunk=chunk,
        checked=tokens if args.tiny else CHECKED,
        device=device,
        dtype=dtype,
    )


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


def dash(figure: float | None, form: str) -> str:
    """Format a figure, or "-" if it could not be measured."""
    return "-" if figure is None else format(figure, form)


# --------------------------------------------------------------------------- kernels


def inductor(**options: bool) -> Kernel:
    """Return ours, compiled with options of inductor."""
    return torch.compile(loss_module._overwrite_with_dlogits, fullgraph=True, options=options)


if triton is not None:

    @triton.jit
    def read_logits(logits, columns, V: tl.constexpr, ROWS: tl.constexpr):
        """Read a part of a row, in float32, with -inf for the padding."""
        x = tl.load(logits + columns, mask=columns < ROWS, other=float("-inf"))
        return tl.where(columns < V, x.to(tl.float32), float("-inf"))

    @triton.jit
    def write_dlogits(logits, columns, probabilities, target, ROWS: tl.constexpr):
        """Overwrite a part of a row with probabilities, minus 1 at the target."""
        dlogits = probabilities - tl.where(columns == target, 1.0, 0.0)
        tl.store(logits + columns, dlogits, mask=columns < ROWS)

    @triton.jit
    def read_once(
        logits,
        targets,
        losses,
        V: tl.constexpr,
        ROWS: tl.constexpr,
        A: tl.constexpr,
        B: tl.constexpr,
        C: tl.constexpr,
    ):
        """Overwrite a row with its dlogits: all of it is in registers, A, B and C columns."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * ROWS
        target = tl.load(targets + row).to(tl.int32)
        at_target = tl.load(logits + target).to(tl.float32)
        a_columns = tl.arange(0, A)
        b_columns = A + tl.arange(0, B)
        c_columns = A + B + tl.arange(0, C)
        a = read_logits(logits, a_columns, V, ROWS)
        b = read_logits(logits, b_columns, V, ROWS)
        c = read_logits(logits, c_columns, V, ROWS)
        largest = tl.maximum(tl.maximum(tl.max(a, 0), tl.max(b, 0)), tl.max(c, 0))
        a = tl.exp(a - largest)
        b = tl.exp(b - largest)
        c = tl.exp(c - largest)
        total = tl.sum(a, 0) + tl.sum(b, 0) + tl.sum(c, 0)
        tl.store(losses + row, largest + tl.log(total) - at_target)
        inverse = 1 / total
        write_dlogits(logits, a_columns, a * inverse, target, ROWS)
        write_dlogits(logits, b_columns, b * inverse, target, ROWS)
        write_dlogits(logits, c_columns, c * inverse, target, ROWS)

    @triton.jit
    def read_twice(
        logits, targets, losses, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Overwrite a row with its dlogits. Few rows are in work, so the L2 cache holds them."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * ROWS
        target = tl.load(targets + row).to(tl.int32)
        at_target = tl.load(logits + target).to(tl.float32)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, ROWS, BLOCK):
            x = read_logits(logits, start + tl.arange(0, BLOCK), V, ROWS)
            larger = tl.maximum(largest, tl.max(x, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
            largest = larger
        log_total = largest + tl.log(total)
        tl.store(losses + row, log_total - at_target)
        for start in range(0, ROWS, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = read_logits(logits, columns, V, ROWS)
            write_dlogits(logits, columns, tl.exp(x - log_total), target, ROWS)

    @triton.jit
    def log1p(a):
        """Compute log(1 + a), for the interpreter."""
        return tl.log(a + 1)


def row_kernel(once: bool, warps: int) -> Kernel:
    """Return a Triton kernel of this file that reads a row once, or twice."""
    require_triton()

    def overwrite(logits: Tensor, targets: Tensor, vocab_size: int, _softcap: float) -> Tensor:
        n, rows = logits.shape
        losses = torch.empty(n, device=logits.device)
        common = {"V": vocab_size, "ROWS": rows, "num_warps": warps}
        if once:
            a = 1 << (rows.bit_length() - 1)  # 32,768 + 16,384 + 2,048 columns hold 50,304
            b = 1 << max((rows - a).bit_length() - 1, 4)
            c = 1 << max((rows - a - b - 1).bit_length(), 4)
            registers = min(2**16 // (32 * warps), 255)  # of a thread: all of a multiprocessor's
            read_once[(n,)](logits, targets, losses, A=a, B=b, C=c, maxnreg=registers, **common)
        else:
            block = min(8_192, 1 << (vocab_size.bit_length() - 1))
            read_twice[(n,)](logits, targets, losses, BLOCK=block, **common)
        return losses

    return overwrite


def liger_kernel() -> Kernel:
    """Return Liger's kernel, called as Liger's head calls it.

    `cross_entropy_forward` waits for the device to check the targets, and rounds losses to bf16.
    """
    require_triton()
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    def overwrite(logits: Tensor, targets: Tensor, vocab_size: int, _softcap: float) -> Tensor:
        logits[:, vocab_size:] = float("-inf")
        n, rows = logits.shape
        losses = torch.empty(n, device=logits.device)
        liger_cross_entropy_kernel[(n,)](
            X_ptr=logits,
            X_stride=rows,
            Y_ptr=targets,
            Y_stride=1,
            weight_ptr=None,
            loss_ptr=losses,
            z_loss_ptr=None,
            loss_stride=1,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=rows,
            n_non_ignore=n,
            sum_non_ignore_weight=n,
            weight_sum=0.0,
            ignore_index=IGNORE,
            lse_square_scale=0.0,
            label_smoothing=0.0,
            reduction="sum",
            softcap=None,
            RETURN_Z_LOSS=False,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(rows)),
            HAS_WEIGHT=False,
            HAS_SOFTCAPPING=False,
            HAS_GRADIENTS=True,
            num_warps=32,
        )
        return losses

    return overwrite


def quack_kernel() -> Kernel:
    """Return QuACK's kernel: a row lies in the registers of a cluster of four blocks."""
    from quack.cross_entropy import cross_entropy_fwd_out

    def overwrite(logits: Tensor, targets: Tensor, vocab_size: int, _softcap: float) -> Tensor:
        logits[:, vocab_size:] = float("-inf")
        losses = torch.empty(len(logits), device=logits.device)
        cross_entropy_fwd_out(
            logits,
            targets,
            None,
            loss=losses,
            lse=None,
            dx=logits,
            weight=None,
            ignore_index=IGNORE,
        )
        return losses

    return overwrite


def require_triton() -> None:
    """Raise RuntimeError if kernels of Triton cannot run."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton needs a GPU, or TRITON_INTERPRET=1")


# Without effect here: `triton.cooperative_reductions` is for 16 rows at most, `triton.multi_kernel`
# for 16,384 columns. QuACK's is the last: a CUDA error would end what follows.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "ours": inductor,
    **{f"read once, {warps} warps": partial(row_kernel, True, warps) for warps in (8, 16, 32)},
    **{f"read twice, {warps} warps": partial(row_kernel, False, warps) for warps in (16, 32)},
    "Liger's kernel": liger_kernel,
    "max_autotune_pointwise": partial(inductor, max_autotune_pointwise=True),
    "coordinate_descent_tuning": partial(inductor, coordinate_descent_tuning=True),
    "QuACK's kernel": quack_kernel,
}


def measure_kernels(sizes: Sizes) -> dict[str, float | None]:
    """Return the milliseconds of a step of each kernel; None for one that failed."""
    logits = torch.randn(sizes.tokens, sizes.rows, dtype=sizes.dtype, device=sizes.device)
    targets = torch.randint(sizes.vocab_size, (sizes.tokens,), device=sizes.device)
    found: dict[str, float | None] = {}
    for name, make in KERNELS.items():
        found[name] = ms = attempt(name, partial(kernel_ms, make, logits, targets, sizes))
        if ms is not None:
            print(f"{name}: {ms:.2f} ms a step", flush=True)
    return found


def kernel_ms(make: Callable[[], Kernel], logits: Tensor, targets: Tensor, sizes: Sizes) -> float:
    """Return the milliseconds of a kernel over all chunks of `logits` (N, V')."""
    forget_compiled()
    kernel = make()
    losses = []

    def step() -> None:
        losses.clear()
        chunks = zip(logits.split(sizes.chunk), targets.split(sizes.chunk), strict=True)
        for part, ids in chunks:
            losses.append(kernel(part, ids, sizes.vocab_size, 0.0))

    ms = call_ms([step], sizes.device)
    if not all(part.isfinite().all() for part in (*losses, *logits.split(4_096))):
        logits.normal_()
        raise RuntimeError("a loss or a dlogit is not finite")
    return ms


def print_kernels(found: Mapping[str, float | None], sizes: Sizes) -> None:
    """Print the milliseconds of a step of each kernel, and what it saves."""
    rows = []
    for name, ms in found.items():
        rows.append([name, dash(ms, ".2f"), dash(difference(found["ours"], ms), ".2f")])
    print_table(["kernel", f"ms of {sizes.tokens:,} tokens", "saved, ms"], rows)


def difference(before: float | None, after: float | None) -> float | None:
    """Return what is saved, if both were measured."""
    return None if before is None or after is None else before - after


# --------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class Candidate:
    """Hold what makes the loss of a head, for a number of tokens and of tokens of a chunk."""

    make: Callable[[Sizes, int, int], HeadLoss]
    masks: bool = True  # the padding does not count
    package: bool = False


def ours(make: Callable[[], Kernel], sizes: Sizes, _tokens: int, chunk: int) -> HeadLoss:
    """Return our head as a compiled model calls it, with a kernel in the place of ours."""
    kernel = make()

    def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(x, weight, targets, vocab_size=sizes.vocab_size, softcap=None)

    compiled = torch.compile(whole, fullgraph=True)

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        replaced = {"_compile": lambda _: kernel, "_chunk_size": lambda *_: chunk}
        with mock.patch.multiple(loss_module, **replaced):
            return compiled(x, weight, targets)

    return head


def liger(sizes: Sizes, tokens: int, chunk: int) -> HeadLoss:
    """Return Liger's head with our chunks and a float32 weight under autocast.

    Its own choice is 64 chunks of 512 tokens, and a weight in bf16 would round the gradient.
    """
    require_triton()
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # Liger's unit of memory: it gives chunks of `chunk` tokens, see its `inc_factor`
    budget = -(-sizes.rows * chunk // (sizes.channels * tokens))
    # by position: bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    # softcap, return_z_loss, accum_dtype, three more to switch on, ce_impl, ce_mode,
    # chunk_mem_const
    options = (None, None, IGNORE, 0.0, 0.0, "mean", None, False, None)
    options += (False, False, False, None, None, budget)

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(x.device.type, sizes.dtype):
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *options)[0]

    return head


def cut_cross_entropy(sizes: Sizes, _tokens: int, _chunk: int) -> HeadLoss:
    """Return cut-cross-entropy's head with all gradients, which it sums in bf16."""
    require_triton()
    from cut_cross_entropy import linear_cross_entropy, tl_utils

    if sizes.device.type == "cpu":
        tl_utils.tl_log1p = log1p  # Triton's interpreter has no libdevice

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        table = weight.to(sizes.dtype)[: sizes.vocab_size]
        return linear_cross_entropy(x, table, targets, ignore_index=IGNORE, filter_eps=None)

    return head


def quack(scaled_exp: bool, sizes: Sizes, _tokens: int, chunk: int) -> HeadLoss:
    """Return QuACK's head, with its plain chunks or with scaled exponentials; not autotuned."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy, scaled_exp_lce_supported

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(x.device.type, sizes.dtype):
            if scaled_exp and not scaled_exp_lce_supported(x, weight, chunk, "mean"):
                raise RuntimeError("scaled_exp_lce_supported says no")
            return chunked_linear_cross_entropy(
                x,
                weight,
                targets,
                chunk_size=chunk,
                ignore_index=IGNORE,
                reduction="mean",
                tuned=False,
                use_scaled_exp=scaled_exp,
            )

    return head


PACKAGES = {
    "Liger": Candidate(liger, masks=False, package=True),
    "cut-cross-entropy": Candidate(cut_cross_entropy, package=True),
    "QuACK, chunks": Candidate(partial(quack, False), masks=False, package=True),
    "QuACK, scaled exponentials": Candidate(partial(quack, True), masks=False, package=True),
}


def measure_heads(sizes: Sizes, faster: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return time, memory and errors of each head that runs. `faster`: names of `KERNELS`."""
    candidates = {"ours": Candidate(partial(ours, KERNELS["ours"]))}
    for name in faster:
        make = KERNELS[name]
        package = make in (liger_kernel, quack_kernel)
        candidates[f"ours, {name}"] = Candidate(partial(ours, make), package=package)
    again = {"ours, again": candidates["ours"]}  # what differs is chance
    found = {}
    for name, candidate in (candidates | again | PACKAGES).items():
        figures = attempt(name, partial(measure_head, candidate, sizes))
        if figures is not None:
            print(f"{name}: {figures['ms']:.2f} ms", flush=True)
            errors = attempt(f"{name}, errors", partial(head_errors, candidate, sizes))
            found[name] = figures | {"package": candidate.package, "errors": errors}
    return found


def measure_head(candidate: Candidate, sizes: Sizes) -> dict[str, Any]:
    """Return the milliseconds of a forward and backward pass, and its peak memory in GB."""
    forget_compiled()
    head = candidate.make(sizes, sizes.tokens, sizes.chunk)
    x, weight, targets = draw_inputs(sizes, sizes.tokens)
    step = partial(gradients, head, x, weight, targets)
    ms = call_ms([step], sizes.device)
    peak = None
    if sizes.device.type == "cuda":
        inputs = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = (torch.cuda.max_memory_allocated() - inputs) / 1e9
    return {"ms": ms, "peak_gb": peak, "counts_padding": not candidate.masks}


def gradients(head: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of x and weight."""
    value = head(x, weight, targets)
    dx, dw = torch.autograd.grad(value, (x, weight))
    return value.detach(), dx, dw


def draw_inputs(sizes: Sizes, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x (N, C), weight (V', C) and targets (N,): a quarter of the predictions are right.

    The weight is float32 with values of bf16. Every hundredth row is ten times as large.
    """
    generator = torch.Generator(sizes.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=sizes.device)
    x = F.rms_norm(draw(tokens, sizes.channels), (sizes.channels,)).to(sizes.dtype)
    weight = 0.02 * draw(sizes.rows, sizes.channels)
    weight[::100] *= 10
    weight = weight.to(sizes.dtype).float()
    targets = torch.randint(sizes.vocab_size, (tokens,), generator=generator, device=sizes.device)
    table = weight[: sizes.vocab_size].to(sizes.dtype)
    targets[::4] = (x[::4] @ table.T).argmax(-1)
    return x.requires_grad_(), weight.requires_grad_(), targets


def head_errors(candidate: Candidate, sizes: Sizes) -> dict[str, Any]:
    """Return the errors against float64, and whether two passes return the same bits."""
    forget_compiled()
    chunk = sizes.checked // 2  # the gradient of the weight is a sum over two chunks
    head = candidate.make(sizes, sizes.checked, chunk)
    x, weight, targets = draw_inputs(sizes, sizes.checked)
    targets[1::10] = IGNORE
    first, second = (gradients(head, x, weight, targets) for _ in range(2))
    exact = exact_gradients(x, weight, targets, sizes.vocab_size if candidate.masks else sizes.rows)
    (value, dx, dw), (exact_value, exact_dx, exact_dw) = first, exact
    return {
        "loss": (value.double() - exact_value).abs().item(),
        "dx": relative_error(dx, exact_dx),
        "dw": relative_error(dw, exact_dw),
        "largest_dx": (dx.double() - exact_dx).abs().max().item(),
        "largest_dw": (dw.double() - exact_dw).abs().max().item(),
        "same_bits": all(map(torch.equal, first, second)),
    }


def exact_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, ...]:
    """Return the loss and the gradients in float64, over the first `vocab_size` rows."""

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight[:vocab_size].T, targets, ignore_index=IGNORE)

    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    return gradients(head, x, weight, targets)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of the exact tensor."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def print_heads(heads: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each head: time, memory, errors."""
    rows = []
    for name, figures in heads.items():
        saved = difference(heads.get("ours", {}).get("ms"), figures["ms"])
        label = f"{name} (counts the padding)" if figures["counts_padding"] else name
        cells = [label, f"{figures['ms']:.2f}", dash(saved, ".2f"), dash(figures["peak_gb"], ".2f")]
        errors = figures["errors"]
        if errors is None:
            rows.append([*cells, *["-"] * 6])
            continue
        for key in ("loss", "dx", "dw", "largest_dx", "largest_dw"):
            cells.append(f"{errors[key]:.2e}")
        rows.append([*cells, "yes" if errors["same_bits"] else "no"])
    head = ["head", "ms", "saved, ms", "peak, GB", "error of the loss, nats", "of dx", "of dw"]
    print_table([*head, "largest of dx", "largest of dw", "same bits twice"], rows)


# --------------------------------------------------------------------------- rules


def print_rules(heads: Mapping[str, Mapping[str, Any]], timed: bool) -> None:
    """Print for each head whether it is fast and exact enough to replace ours."""
    base = heads.get("ours", {})
    if not base.get("errors"):
        print("no rule: ours was not measured", flush=True)
        return
    for name, figures in heads.items():
        if name in ("ours", "ours, again"):
            continue
        consequence = "put it in the place of ours"
        if figures["package"]:
            consequence = "make it an optional dependency, by auto"
        saved = base["ms"] - figures["ms"]
        if timed:
            print_rule(
                f"{name}: {saved:.2f} ms saved",
                f"{SAVED_MS:g} ms or more of the step",
                saved >= SAVED_MS,
                consequence,
            )
        if figures["errors"]:
            ratios = error_ratios(figures["errors"], base["errors"])
            print_rule(
                f"{name}: errors over ours: {', '.join(f'{k} {r:.3f}' for k, r in ratios.items())}",
                f"none is over {WORSE:g}",
                all(ratio <= WORSE for ratio in ratios.values()),  # not if one is NaN
                "it is as exact as ours",
            )


def error_ratios(errors: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    """Return the errors of loss and gradients over those of ours."""
    loss_ratio = (errors["loss"] + LOSS_FLOOR) / (base["loss"] + LOSS_FLOOR)
    return {"loss": loss_ratio, **{key: errors[key] / base[key] for key in ("dx", "dw")}}
