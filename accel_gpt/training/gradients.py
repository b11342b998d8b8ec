"""The gradient of one step, summed over micro-steps and processes: the usual way, or exactly."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.data.order import derive_seed

UNITS = 2.0**50
"""Fixed-point units in 1 for `ExactGradients`."""


class Gradients:
    """Accelerate's way: sums in float32, reduced by DistributedDataParallel or FSDP.

    Dropout is seeded for each micro-batch by (seed, number of its first sequence): it does not
    depend on the number of processes, nor on restarts. Seeding takes 0.01 ms.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, seed: int, dropout: float
    ) -> None:
        self.accelerator, self.model = accelerator, model
        self.seed, self.dropout = seed, dropout
        self.loss = torch.zeros((), device=accelerator.device)

    def micro_step(self, sequence: int) -> AbstractContextManager[None]:
        """Where forward and backward of a micro-batch belong; `sequence` numbers its first one."""
        self.seed_dropout(sequence)
        context: AbstractContextManager[None] = self.accelerator.accumulate(self.model)
        return context

    def seed_dropout(self, sequence: int) -> None:
        """Seed the device's generator for the micro-batch whose first sequence is `sequence`."""
        if self.dropout:
            kind = self.accelerator.device.type  # torch.manual_seed seeds all kinds, in 0.4 ms
            device = torch.default_generator if kind == "cpu" else torch.get_device_module(kind)
            device.manual_seed(derive_seed(self.seed, "dropout", sequence))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, and the loss itself, to the step's."""
        self.accelerator.backward(loss)
        self.loss += loss.detach()

    def finish(self) -> Tensor:
        """Leave the mean gradient over all micro-batches in `grad`; the mean loss over all, ()."""
        loss: Tensor = self.loss / self.accelerator.gradient_accumulation_steps
        self.loss.zero_()
        return self.accelerator.reduce(loss, "mean") if self.accelerator.num_processes > 1 else loss

    def clip(self, limit: float) -> Tensor:
        """Shorten the gradient to a norm of `limit`, 0: any; its norm before over all, ()."""
        accelerator, parameters = self.accelerator, self.model.parameters()
        limit = limit or float("inf")
        if accelerator.distributed_type != DistributedType.NO:
            norm: Tensor = accelerator.clip_grad_norm_(parameters, limit)
            return norm
        accelerator.unscale_gradients()  # Accelerate's way would import what FSDP needs, for 0.6 s
        return nn.utils.clip_grad_norm_(parameters, limit)


class ExactGradients(Gradients):
    """Sums that do not depend on the order, and so not on the number of processes.

    The gradient of each micro-batch is rounded to whole units of 2^-50 and summed in float64, whose
    53 bits hold whole numbers up to 2^53 units = 8: as long as the magnitudes that are summed in an
    element stay below 8, every sum is exact, in whatever order. One division by the number of
    micro-batches and one rounding to float32 follow. The units cost an element at most 2^-51 a
    micro-batch; float32 itself keeps no more of gradients above 2^-27. Beyond 8 it is plain float64
    addition, wrong by 2^-53 of the sum each time; that shows in one float32 result of about 2^29.
    The losses are float32 and summed in float64 as they are: exact for those above 2^-17 while
    their sum stays below 2^13, as a loss of L >= 2^k is a whole number of 2^(k-23).

    What a micro-batch gives still depends on its size, the threads and the kind of processor.
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
        """Where forward and backward of a micro-batch belong; nothing is reduced here."""
        self.seed_dropout(sequence)
        with self.accelerator.accumulate(), self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, and the loss itself, to the step's."""
        torch.autograd.backward(loss)  # Accelerate's would divide first, and round
        self.loss += loss.detach()
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if parameter.grad is not None:
                part += in_units(parameter.grad).flatten()
                parameter.grad = None

    def finish(self) -> Tensor:
        """Leave the mean gradient over all micro-batches in `grad`; the mean loss over all, ()."""
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


def in_units(gradient: Tensor) -> Tensor:
    """`gradient` in units of 2^-50, float64, each element a whole number (or not finite)."""
    return gradient.double().mul(UNITS).round_()


def make_gradients(config: Config, accelerator: Accelerator, model: nn.Module) -> Gradients:
    """What `train.reproducible` asks for; `model` as Accelerate wrapped it."""
    kind = ExactGradients if config.train.reproducible else Gradients
    return kind(accelerator, model, config.seed, config.model.dropout)
