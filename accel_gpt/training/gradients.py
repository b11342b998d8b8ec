"""Gradient accumulation: the micro-batches of a step, and their gradient over all ranks.

`Gradients` sums in float32 and all-reduces as DistributedDataParallel or FSDP do, `ExactGradients`
gives the same bits on any number of ranks (`train.reproducible`). B micro-batch, T tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import Loader
from accel_gpt.data.order import derive_seed
from accel_gpt.model.documents import separate
from accel_gpt.model.loss import IGNORE
from accel_gpt.training.state import TrainState

UNITS = 2.0**50  # fixed-point units in 1, for `ExactGradients`
Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | float]


def skip_excluded(loader: Loader, plan: Plan, state: TrainState) -> None:
    """Advance past the batches that the run excludes: `TrainState.excluded`."""
    length = plan.sequences_per_step
    while any(
        first < state.sequences + length and state.sequences < end for first, end in state.excluded
    ):
        for _ in range(plan.accumulation_steps):
            next(loader)
        state.sequences += length


def micro_batches(
    loader: Loader, accelerator: Accelerator, plan: Plan, document_end: int | None
) -> Iterator[Batch]:
    """Yield (tokens, targets, documents, weight) of each micro-step; the first three (B, T).

    `weight` scales the mean loss of the micro-batch so that the mean over micro-steps and ranks is
    the mean over all target tokens of the global batch: 1 where every sequence has as many. With
    `document_end` targets across document boundaries are ignored; the weight is then the number of
    targets over their mean number in a micro-batch. That takes one all-reduce a step; nothing waits
    for it.
    """
    loader.kept.clear()
    if document_end is None:
        for _ in range(plan.accumulation_steps):
            yield *next(loader), None, 1.0
        return
    batches = []
    for _ in range(plan.accumulation_steps):
        tokens, targets = next(loader)
        targets, documents = separate(tokens, targets, document_end)
        batches.append((tokens, targets, documents, (targets != IGNORE).sum()))
    counts = torch.stack([count for _, _, _, count in batches])
    total = accelerator.reduce(counts.sum(), "sum")
    # a mean of whole numbers: the same on any number of ranks
    mean = total / (plan.accumulation_steps * plan.world_size)
    divisor = mean + (mean == 0)  # 1 for a batch without targets
    for tokens, targets, documents, count in batches:
        yield tokens, targets, documents, count / divisor


class Gradients:
    """Accumulate in float32; DistributedDataParallel or FSDP all-reduce at the last micro-step.

    Dropout is seeded for each micro-batch by (seed, number of its first sequence): it depends
    neither on the number of ranks nor on restarts. Seeding takes 0.01 ms.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, seed: int, dropout: float
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.seed = seed
        self.dropout = dropout
        self.loss = torch.zeros((), device=accelerator.device)

    def micro_step(self, sequence: int) -> AbstractContextManager[None]:
        """Enclose forward and backward pass of the micro-batch that begins at `sequence`."""
        self.seed_dropout(sequence)
        context: AbstractContextManager[None] = self.accelerator.accumulate(self.model)
        return context

    def seed_dropout(self, sequence: int) -> None:
        """Seed the device's generator for the micro-batch that begins at `sequence`."""
        if self.dropout:
            kind = self.accelerator.device.type  # torch.manual_seed seeds all kinds, in 0.4 ms
            device = torch.default_generator if kind == "cpu" else torch.get_device_module(kind)
            device.manual_seed(derive_seed(self.seed, "dropout", sequence))

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a micro-batch's mean loss, and the loss itself, ()."""
        self.accelerator.backward(loss)
        self.loss += loss.detach()

    def finish(self) -> Tensor:
        """Return the mean loss over micro-steps and ranks; `grad` then holds the averaged gradient.

        In fp16 it is still scaled: `clip` unscales it. The loss is ().
        """
        loss: Tensor = self.loss / self.accelerator.gradient_accumulation_steps
        self.loss.zero_()
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, "mean")
        return loss

    def clip(self, limit: float) -> Tensor:
        """Clip the global gradient norm to `limit` (0: no clipping).

        Returns the norm before clipping, reduced over all ranks, ().
        """
        accelerator = self.accelerator
        parameters = self.model.parameters()
        limit = limit or float("inf")
        if accelerator.distributed_type != DistributedType.NO:
            norm: Tensor = accelerator.clip_grad_norm_(parameters, limit)
            return norm
        accelerator.unscale_gradients()
        # `accelerator.clip_grad_norm_` would import FSDP: 0.6 s of start-up
        return nn.utils.clip_grad_norm_(parameters, limit)


class ExactGradients(Gradients):
    """Sum exactly, so that the result does not depend on the order, nor on the number of ranks.

    The gradient of each micro-batch is rounded to whole units of 2^-50 and summed in float64, whose
    53 bits hold whole numbers up to 2^53 units = 8: while the magnitudes summed in an element stay
    below 8, every sum is exact, in any order. One division by the number of micro-batches and one
    rounding to float32 follow. Rounding to units costs an element at most 2^-51 a micro-batch;
    float32 itself keeps no more of gradients above 2^-27. Beyond 8 the sum is plain float64
    addition, wrong by 2^-53 each time; one float32 result in about 2^29 shows it. The losses are
    float32 and summed in float64 unrounded: exact for those above 2^-17 while their sum stays below
    2^13, as a loss of L >= 2^k is a whole number of 2^(k-23).

    The gradient of one micro-batch still depends on its size, the threads and the processor.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, seed: int, dropout: float
    ) -> None:
        super().__init__(accelerator, model, seed, dropout)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self.parameters]
        options = {"dtype": torch.float64, "device": accelerator.device}
        self.sums = torch.zeros(sum(sizes) + 1, **options)  # one buffer: one all-reduce
        *self.parts, self.loss = torch.split(self.sums, [*sizes, 1])

    @contextmanager
    def micro_step(self, sequence: int) -> Iterator[None]:
        """Enclose a micro-batch as `Gradients`; DistributedDataParallel all-reduces nothing."""
        self.seed_dropout(sequence)
        with self.accelerator.accumulate(), self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a micro-batch's mean loss, and the loss itself, ()."""
        torch.autograd.backward(loss)  # `accelerator.backward` would divide first, and round
        self.loss += loss.detach()
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if parameter.grad is not None:
                part += parameter.grad.double().mul(UNITS).round_().flatten()
                parameter.grad = None

    def finish(self) -> Tensor:
        """All-reduce the sums and round them into `grad`; returns the mean loss, ()."""
        world = self.accelerator.num_processes
        if world > 1:
            dist.all_reduce(self.sums)
        count: int = self.accelerator.gradient_accumulation_steps * world
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            mean = part / (count * UNITS)  # the product is exact, UNITS is a power of two
            parameter.grad = mean.to(parameter.dtype).view_as(parameter)
        loss = (self.loss / count).float().squeeze()
        self.sums.zero_()
        return loss


def make_gradients(config: Config, accelerator: Accelerator, model: nn.Module) -> Gradients:
    """Make the gradients of `model`, as Accelerate wrapped it: exact with `train.reproducible`."""
    kind = ExactGradients if config.train.reproducible else Gradients
    return kind(
        accelerator=accelerator, model=model, seed=config.seed, dropout=config.model.dropout
    )
