"""`train.micro_batch_size: auto`: the largest micro-batch that fits, found before training.

On CUDA each size is tried on the device, on a CPU it is computed by `cost/`. Each rank tries by
itself, and only then do the ranks compare: none waits for one that ran out of memory. The answer is
kept in `config.yaml` of the run, and a resume keeps it where it still fits.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan, plural
from accel_gpt.cost.memory import Machine, fitting_sizes, footprint, with_size
from accel_gpt.data.corpus import open_corpus
from accel_gpt.errors import require
from accel_gpt.launcher import local_world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import REPLICATED, set_up_model
from accel_gpt.training.precision import earlier_choice
from accel_gpt.training.ranks import all_gather, on_main

CUDA_SHARE = 0.94  # of the device for the trial; the rest for NCCL and holes: assumption
CPU_SHARE = 0.8  # of the memory that is available, for the system and its cache: assumption
Fits = Callable[[int], bool]


def resolve_auto_micro_batch(
    config: Config, plan: Plan, accelerator: Accelerator, fits: Fits | None = None
) -> tuple[Config, Plan]:
    """`config` and `plan` with the micro-batch size that was found in place of auto; a collective.

    `fits` returns whether so many sequences fit this rank, without the others. Raises `UserError`
    on all ranks where not even one does.
    """
    kind, world = accelerator.distributed_type, accelerator.num_processes
    require(
        kind in REPLICATED,
        f"train.micro_batch_size is auto but the accelerate config asks for {kind.value}, whose "
        "share of memory a trial on one device does not show; give a number",
    )
    sizes = fitting_sizes(config, world)[::-1]
    fits = fits or make_fits(config, open_corpus(config).vocab_size, accelerator)
    size, where = on_main(lambda: earlier_choice(config, "train.micro_batch_size")) or (0, "")
    how = f"as in {where}"
    if size not in sizes or not all(all_gather(fits(size))):
        size, how = largest(sizes, fits), "the most that fit"
    config = with_size(config, size)
    plan = make_plan(config, world)
    accelerator.gradient_accumulation_steps = plan.accumulation_steps
    if accelerator.is_main_process and config.log.level == "info":
        sys.stderr.write(f"auto     {plural(size, 'sequence')} a process and micro-step, {how}\n")
    return config, plan


def largest(sizes: Sequence[int], fits: Fits) -> int:
    """The largest of `sizes`, ascending, that fits all ranks; a collective.

    By bisection: what fits is taken to fit with fewer sequences, too.
    """
    low, high = -1, len(sizes)  # the last known to fit, the first known not to
    while high - low > 1:
        middle = (low + high) // 2
        if all(all_gather(fits(sizes[middle]))):
            low = middle
        else:
            high = middle
    require(
        low >= 0,
        "train.micro_batch_size is auto but not even 1 sequence fits the memory; lower "
        "model.block_size, or set train.activation_checkpointing to blocks",
    )
    return sizes[low]


def make_fits(config: Config, vocab_size: int, accelerator: Accelerator) -> Fits:
    """Whether so many sequences fit this rank: tried on CUDA, computed on a CPU."""
    if accelerator.device.type == "cuda":
        return lambda size: fits_cuda(with_size(config, size), vocab_size, accelerator)
    world, precision = accelerator.num_processes, accelerator.mixed_precision
    available = available_memory()
    machine = Machine(world, None, available, False, precision, "accelerate")

    def fits(size: int) -> bool:
        return footprint(with_size(config, size), vocab_size, machine).total <= available

    return fits


def available_memory() -> float:
    """Bytes that this rank may use: those that the machine has, and that control groups leave, as
    in containers and Slurm jobs (Linux, version 2), divided by the machine's ranks.
    """
    least: float = psutil.virtual_memory().available
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        for folder in (root / own, *(root / own).parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, no limit: max
                limit = int((folder / "memory.max").read_text())
                least = min(least, limit - int((folder / "memory.current").read_text()))
    mine = psutil.Process().memory_info().rss  # the arithmetic counts what is imported
    available: float = CPU_SHARE * (least / local_world_size() + mine)
    return available


def fits_cuda(config: Config, vocab_size: int, accelerator: Accelerator) -> bool:
    """Whether a step and an evaluation of `config` run on this device; leaves nothing there."""
    # of the current device: without a launcher, the accelerator's has no index, and is refused
    torch.cuda.set_per_process_memory_fraction(CUDA_SHARE)
    try:
        try_step(config, vocab_size, accelerator)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()  # the error held the tensors of the trial
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats(accelerator.device)


def try_step(config: Config, vocab_size: int, accelerator: Accelerator) -> None:
    """Two micro-steps, an update and an evaluation of a model of its own, without other ranks.

    Not compiled: that would take minutes a size, and a compiled step takes less.
    """
    device, size = accelerator.device, config.train.sequences
    gpt = GPT.allocate(config.model, vocab_size, device)
    set_up_model(gpt, replace(config.train, compile=False))
    optimizer = make_optimizer(gpt, config.optim)
    count = sum(parameter.numel() for parameter in gpt.parameters())
    buckets = torch.empty(count if accelerator.num_processes > 1 else 0, device=device)  # of DDP
    exact = count if config.train.reproducible else 0
    sums = torch.empty(exact, dtype=torch.float64, device=device)  # of `ExactGradients`
    tokens = torch.zeros((size, config.model.block_size), dtype=torch.long, device=device)
    documents = torch.zeros_like(tokens) if config.data.document_mask else None
    for _ in range(2):
        with accelerator.autocast():
            loss = gpt(tokens, tokens, documents=documents)
        loss.float().backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    gpt.eval()
    with torch.no_grad(), accelerator.autocast():
        gpt(tokens, tokens, documents=documents, per_sequence=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del buckets, sums  # held until here
