"""Find the largest micro-batch that fits, for `train.micro_batch_size: auto`, before training.

On CUDA, each size is tried on the device. On a CPU, a size fits up to `CPU_TOKENS` tokens. No rank
calls a collective during a trial, so none waits for a rank that ran out of memory.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import convert_model_to_fp8_ao

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import fitting_sizes, make_plan, with_size
from accel_gpt.console import print_line
from accel_gpt.data.corpus import vocabulary_of
from accel_gpt.errors import require
from accel_gpt.launch.accelerator import (
    build_optimizer,
    compute_as_prepared,
    fp8_filter,
    set_up_model,
)
from accel_gpt.launch.context import Context
from accel_gpt.launch.ranks import all_gather
from accel_gpt.launch.unsupported import REPLICATED
from accel_gpt.model.make import make_model
from accel_gpt.training.losses import make_loss

CUDA_SHARE = 0.94  # of the device; the rest is for NCCL and fragmentation; assumption
CPU_TOKENS = 8192  # assumption: on a CPU, larger micro-batches only take more memory
Fits = Callable[[int], bool]  # whether a micro-batch of this size fits on this rank


def choose_micro_batch_size(
    config: Config, accelerator: Accelerator, earlier: object, fits: Fits | None = None
) -> int:
    """Return the size `earlier` if it fits, else the largest that does; a collective.

    `fits` overrides `make_fits()`. Raises `UserError` on all ranks if not even one sequence fits.
    """
    kind = accelerator.distributed_type
    require(
        kind in REPLICATED,
        f"train.micro_batch_size is auto but the accelerate config sets {kind.value}: a trial on "
        "one device does not show the memory of a shard; set a number",
    )
    sizes = sorted(fitting_sizes(config, accelerator.num_processes))
    if fits is None:
        fits = make_fits(config, vocabulary_of(config), accelerator)
    if isinstance(earlier, int) and earlier in sizes and all(all_gather(fits(earlier))):
        return earlier
    return largest_fitting(sizes, fits)


def largest_fitting(sizes: Sequence[int], fits: Fits) -> int:
    """Return the largest of `sizes`, ascending, that fits on all ranks; a collective.

    Bisects: if a size fits, all smaller sizes are assumed to fit.
    """
    fitting = -1  # index of the largest size known to fit
    too_large = len(sizes)  # index of the smallest size known not to fit
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if all(all_gather(fits(sizes[middle]))):
            fitting = middle
        else:
            too_large = middle
    require(
        fitting >= 0,
        "train.micro_batch_size is auto but not even 1 sequence fits in memory; lower "
        "model.block_size, or set train.activation_checkpointing to blocks",
    )
    return sizes[fitting]


def make_fits(config: Config, vocab_size: int, accelerator: Accelerator) -> Fits:
    """Return the function that decides whether a size fits: on CUDA, it tries a step."""
    if accelerator.device.type == "cuda":
        return lambda size: fits_cuda(with_size(config, size), vocab_size, accelerator)
    return lambda size: size == 1 or size * config.model.block_size <= CPU_TOKENS


def fits_cuda(config: Config, vocab_size: int, accelerator: Accelerator) -> bool:
    """Return whether a step and an evaluation of `config` fit on this device; free their memory."""
    # without a device argument: it must have an index, and `accelerator.device` may have none
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
    """Make two micro-steps, an update and an evaluation of a new model, on this rank only.

    The moments of the optimizer are allocated first, as in every step of a run but its first.

    The model is not compiled, since compiling takes minutes for each size. This is an upper bound
    of the memory of a compiled step:

    - A compiled forward pass saves less for the backward pass: 0.4 to 0.97 of the bytes for small
      models (PyTorch 2.13 on a CPU, bf16; presets gpt2, llama and fast, with and without dropout
      and activation checkpointing).
    - A chunk of the loss takes `CHUNK_SHARE` of the memory or less, compiled or not. It has a power
      of two of tokens, so a compiled chunk can take up to 1.4 % of the device more. `CUDA_SHARE`
      leaves 6 %.
    - A compiled backward pass returns the gradients of all weights at once, beside their sums over
      micro-steps. The trial allocates them.
    """
    device = accelerator.device
    batch_size = config.train.micro_batch_sequences
    compiles = config.train.compile is not False
    config = replace(config, train=replace(config.train, compile=False))
    # `model()` of --code makes its model on the CPU, as in a run: it may use NumPy
    gpt = make_model(config, vocab_size, "cpu" if config.own.model else device).to(device)
    set_up_model(gpt, config.train)
    optimizer = build_optimizer(gpt, config)
    fp8 = accelerator.ao_recipe_handler
    if fp8 is not None:  # it casts through float32, and so takes more memory than bf16
        convert_model_to_fp8_ao(gpt, config=fp8.config, module_filter_func=fp8_filter(gpt))
    compute_as_prepared(gpt, accelerator)  # so that a loss of --code runs without autocast
    plan = make_plan(config, accelerator.num_processes)
    compute_loss = make_loss(Context(config, plan, accelerator, log=print_line))
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    ddp = accelerator.num_processes > 1
    buckets = torch.empty(parameters if ddp else 0, device=device)
    exact = config.train.reproducible  # `ExactGradients` holds a float64 sum of each gradient
    sums = torch.empty(parameters if exact else 0, dtype=torch.float64, device=device)
    tokens = torch.zeros((batch_size, config.model.block_size), dtype=torch.long, device=device)
    documents = torch.zeros_like(tokens) if config.data.document_mask else None
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the moments
    optimizer.zero_grad()
    for _ in range(2):
        torch.autograd.backward(compute_loss(gpt, tokens, tokens, documents, 0))
    if compiles and not config.train.reproducible:
        torch.empty(parameters, device=device)  # freed at once
    gradients = [parameter.grad for parameter in gpt.parameters() if parameter.grad is not None]
    optimizer.clip(torch.nn.utils.get_total_norm(gradients), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    gpt.eval()
    # the evaluated weights, and the trained ones meanwhile
    averages = torch.empty(2 * parameters if config.own.evaluated else 0, device=device)
    with torch.no_grad():
        gpt(tokens, tokens, documents=documents, per_sequence=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del buckets, sums, averages  # must be allocated during the whole trial
