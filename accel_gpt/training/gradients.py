"""Accumulate gradients over the micro-batches of a step and over all ranks.

`Gradients` sums in float32, and DistributedDataParallel or FSDP all-reduces. `ExactGradients`, for
`train.reproducible`, gives the same bits on any number of ranks. B micro-batch size, T tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import Loader
from accel_gpt.data.order import derive_seed
from accel_gpt.model.loss import IGNORE
from accel_gpt.model.sharding import is_sharded
from accel_gpt.model.targets import TargetMask

UNITS = 2.0**50  # fixed-point units in 1, for `ExactGradients`


class Batch(NamedTuple):
    """A micro-batch. `weight` scales its mean loss, see `micro_batches`."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    documents: Tensor | None  # (B, T)
    weight: Tensor | float


def micro_batches(
    loader: Loader, accelerator: Accelerator, plan: Plan, target_mask: TargetMask
) -> Iterator[Batch]:
    """Yield the micro-batch of each micro-step.

    `weight` scales the mean loss of the micro-batch. With it, the mean over micro-steps and ranks
    is the mean over all target tokens of the global batch. The weight is 1 if every sequence has
    the same number of targets.

    If `target_mask` ignores targets, the weight is the number of targets divided by the mean
    number in a micro-batch. This takes one all-reduce a step, and nothing waits for it.
    """
    if target_mask.keeps_all:
        for _ in range(plan.accumulation_steps):
            yield Batch(*next(loader), None, 1.0)
        return
    batches = []
    for _ in range(plan.accumulation_steps):
        tokens, targets = next(loader)
        targets, documents = target_mask.apply(tokens, targets)
        batches.append((tokens, targets, documents, (targets != IGNORE).sum()))
    counts = torch.stack([count for _, _, _, count in batches])
    total = accelerator.reduce(counts.sum(), "sum")
    # `total` is a whole number, so the mean is the same on any number of ranks
    mean = total / (plan.accumulation_steps * plan.world_size)
    divisor = mean + (mean == 0)  # 1 for a batch without targets
    for tokens, targets, documents, count in batches:
        yield Batch(tokens, targets, documents, count / divisor)


class Gradients:
    """Accumulates in float32; DDP all-reduces in the last micro-step, FSDP in each one.

    The seed of dropout is derived from the run's seed and the first sequence of the micro-batch.
    For one size of micro-batch, dropout therefore does not depend on the number of ranks or on
    restarts. Seeding takes 0.01 ms.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, seed: int, draws: bool) -> None:
        self.accelerator = accelerator
        self.model = model
        self.seed = seed
        self.draws = draws  # the forward pass draws random numbers
        self.loss = torch.zeros((), device=accelerator.device)

    def micro_step(self, sequence: int) -> AbstractContextManager[None]:
        """Enclose the forward and backward pass of the micro-batch that begins at `sequence`."""
        self.seed_dropout(sequence)
        context: AbstractContextManager[None] = self.accelerator.accumulate(self.model)
        return context

    def seed_dropout(self, sequence: int) -> None:
        """Seed the device's generator for the micro-batch that begins at `sequence`."""
        if self.draws:
            kind = self.accelerator.device.type  # torch.manual_seed seeds all devices: 0.4 ms
            device = torch.default_generator if kind == "cpu" else torch.get_device_module(kind)
            device.manual_seed(derive_seed(self.seed, "dropout", sequence))

    def backward(self, loss: Tensor) -> None:
        """Accumulate the scalar `loss`, the mean of a micro-batch, and its gradient."""
        self.accelerator.backward(loss)
        self.loss += loss.detach()

    def finish(self) -> Tensor:
        """Return the scalar mean loss over micro-steps and ranks.

        Each `Parameter.grad` now holds the mean gradient. In fp16 it is scaled until `norm`.
        """
        loss: Tensor = self.loss / self.accelerator.gradient_accumulation_steps
        self.loss.zero_()
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, "mean")
        return loss

    def norm(self) -> Tensor:
        """Return the global gradient norm over all ranks, a scalar."""
        self.accelerator.unscale_gradients()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if is_sharded(norm) else norm  # sharded by FSDP


class ExactGradients(Gradients):
    """Sums exactly, so that the result depends neither on the order nor on the number of ranks.

    The gradient of each micro-batch is rounded to whole units of 2^-50 and summed in float64. The
    53 bits of float64 hold whole numbers up to 2^53 units = 8. While the magnitudes summed in an
    element stay below 8, every sum is exact in any order. The sum is then divided once by the
    number of micro-batches and rounded once to float32.

    Rounding to units changes an element by at most 2^-51 per micro-batch. For gradients above
    2^-27, float32 itself is no finer. Beyond 8, the sum is plain float64 addition with a relative
    error of 2^-53 each time. This changes about one float32 result in 2^29.

    The losses are float32 and are summed in float64 without rounding. A loss L >= 2^k is a whole
    number of 2^(k-23). The sum is exact if each loss is above 2^-17 and the sum below 2^13.

    The gradient of one micro-batch still depends on its size, the number of threads and the
    processor.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, seed: int, draws: bool) -> None:
        super().__init__(accelerator, model, seed, draws)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self.parameters]
        options = {"dtype": torch.float64, "device": accelerator.device}
        self.sums = torch.zeros(sum(sizes) + 1, **options)  # one buffer: one all-reduce
        *self.parts, self.loss = torch.split(self.sums, [*sizes, 1])

    @contextmanager
    def micro_step(self, sequence: int) -> Iterator[None]:
        """Enclose a micro-batch; DistributedDataParallel does not all-reduce."""
        self.seed_dropout(sequence)
        with self.accelerator.accumulate(), self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate the scalar `loss`, the mean of a micro-batch, and its gradient."""
        torch.autograd.backward(loss)  # `accelerator.backward` would first divide, which rounds
        self.loss += loss.detach()
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if parameter.grad is not None:
                part += parameter.grad.double().mul(UNITS).round_().flatten()
                parameter.grad = None

    def finish(self) -> Tensor:
        """All-reduce the sums and write the means to `grad`; return the scalar mean loss."""
        world = self.accelerator.num_processes
        if world > 1:
            dist.all_reduce(self.sums)
        count: int = self.accelerator.gradient_accumulation_steps * world
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            mean = part / (count * UNITS)  # the product is exact: UNITS is a power of two
            parameter.grad = mean.to(parameter.dtype).view_as(parameter)
        loss = (self.loss / count).float().squeeze()
        self.sums.zero_()
        return loss


def make_gradients(config: Config, accelerator: Accelerator, model: nn.Module) -> Gradients:
    """Make the `Gradients` of a wrapped model; `ExactGradients` with `train.reproducible`."""
    kind = ExactGradients if config.train.reproducible else Gradients
    draws = config.model.dropout > 0 or config.own.draws
    return kind(accelerator=accelerator, model=model, seed=config.seed, draws=draws)
