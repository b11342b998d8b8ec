"""`train.micro_batch_size: auto`: the largest micro-batch that fits, found before training.

On CUDA each size is tried on the device, on a CPU it is computed by `cost/`. Each rank tries by
itself, and only then do the ranks compare: none waits for one that ran out of memory. The answer is
kept in `micro_batch.json` of the run.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan, plural
from accel_gpt.errors import require
from accel_gpt.files import load_json, write_file
from accel_gpt.launcher import local_world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import device_name
from accel_gpt.training.engine import REPLICATED
from accel_gpt.training.ranks import all_gather, on_main
from accel_gpt.training.setup import open_corpus, set_up_model

ANSWER = "micro_batch.json"
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
    if config.train.micro_batch_size != "auto":
        return config, plan
    from accel_gpt.cost.memory import fitting_sizes, with_size

    kind, world = accelerator.distributed_type, accelerator.num_processes
    require(
        kind in REPLICATED,
        f"train.micro_batch_size is auto but the accelerate config asks for {kind.value}, whose "
        "share of memory a trial on one device does not show; give a number",
    )
    vocab_size = open_corpus(config).vocab_size
    path, question = Path(config.out_dir) / ANSWER, all_options(config, vocab_size, accelerator)
    size, how = on_main(lambda: earlier_answer(path, question)), f"as found before, in {path}"
    if size is None:
        fits = fits or make_fits(config, vocab_size, accelerator)
        size, how = largest(fitting_sizes(config, world)[::-1], fits), "that fit"
        if accelerator.is_main_process:
            answer = {"micro_batch_size": size, "asked": question}
            write_file(path, [json.dumps(answer, indent=1).encode()])
    config = with_size(config, size)
    plan = make_plan(config, world)
    accelerator.gradient_accumulation_steps = plan.accumulation_steps
    if accelerator.is_main_process and config.log.level == "info":
        sys.stderr.write(
            f"auto     {plural(size, 'sequence')} a process and micro-step, the most {how}\n"
        )
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
    from accel_gpt.cost.memory import Machine, needed_bytes, with_size

    if accelerator.device.type == "cuda":
        return lambda size: fits_cuda(with_size(config, size), vocab_size, accelerator)
    available = available_memory()
    machine = Machine(
        accelerator.num_processes, None, available, False, accelerator.mixed_precision, "accelerate"
    )

    def fits(size: int) -> bool:
        needed = needed_bytes(with_size(config, size), vocab_size, machine)
        return needed is not None and needed <= available

    return fits


def available_memory() -> float:
    """Bytes that this rank may use: those of the machine, divided by its ranks."""
    import psutil

    mine = psutil.Process().memory_info().rss  # the arithmetic counts what is imported
    processes = local_world_size()
    available: float = min(psutil.virtual_memory().available, group_memory()) / processes + mine
    return CPU_SHARE * available


def group_memory() -> float:
    """Bytes that control groups leave to this process, as in containers and Slurm jobs (Linux,
    version 2); infinity without a limit.
    """
    root, least = Path("/sys/fs/cgroup"), float("inf")
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return least
    for folder in (root / own, *(root / own).parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, no limit: max
            limit = int((folder / "memory.max").read_text())
            least = min(least, limit - int((folder / "memory.current").read_text()))
    return least


def fits_cuda(config: Config, vocab_size: int, accelerator: Accelerator) -> bool:
    """Whether a step and an evaluation of `config` run on this device; leaves nothing there."""
    device = accelerator.device
    # of the current device: without a launcher, `device` has no index, and is refused
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
        torch.cuda.reset_peak_memory_stats(device)


def try_step(config: Config, vocab_size: int, accelerator: Accelerator) -> None:
    """Two micro-steps, an update and an evaluation of a model of its own, without other ranks.

    Not compiled: that would take minutes a size, and a compiled step takes less.
    """
    device, size = accelerator.device, config.train.sequences
    gpt = GPT(config.model, vocab_size).to(device)
    set_up_model(gpt, replace(config.train, compile=False))
    optimizer = make_optimizer(gpt, config.optim)
    count = sum(parameter.numel() for parameter in gpt.parameters())
    buckets = torch.empty(count if accelerator.num_processes > 1 else 0, device=device)  # of DDP
    exact = torch.empty(
        count if config.train.reproducible else 0, dtype=torch.float64, device=device
    )
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
    del buckets, exact  # held until here


def all_options(config: Config, vocab_size: int, accelerator: Accelerator) -> dict[str, Any]:
    """All options and facts that the answer depends on, as JSON."""
    device, train = accelerator.device, config.train
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        import psutil

        memory = psutil.virtual_memory().total
    return {
        "model": {k: v for k, v in asdict(config.model).items() if k != "init_from"},
        "vocab_size": vocab_size,
        "device": device_name(device),
        "device_memory": memory,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "tokens_per_step": train.tokens_per_step,
        "activation_checkpointing": train.activation_checkpointing,
        "reproducible": train.reproducible,
        "optimizer": config.optim.name,
        "document_mask": config.data.document_mask,
        "async_save": config.checkpoint.async_save,
        "torch": torch.__version__,
    }


def earlier_answer(path: Path, question: dict[str, Any]) -> int | None:
    """The answer in `path`, if it was found for the same question."""
    try:
        answer = load_json(path.read_text(encoding="utf-8"))
        same = answer["asked"] == json.loads(json.dumps(question))
        size = answer["micro_batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if same and isinstance(size, int) and size > 0 else None
