"""Compute the training loss of a micro-batch: cross entropy, or the `loss()` of --code.

Shapes: B batch, T tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.errors import require
from accel_gpt.launch.context import Context
from accel_gpt.launch.ranks import all_gather
from accel_gpt.own_code import OwnFunction, unexpected
from accel_gpt.training.metrics import Record, checked_record

ComputeLoss = Callable[[nn.Module, Tensor, Tensor, Tensor | None, int], Tensor]


def cross_entropy(
    model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None, step: int
) -> Tensor:
    """Compute the mean cross entropy (), in nats, of `tokens` and `targets` (B, T)."""
    loss: Tensor = model(tokens, targets, documents=documents)
    return loss


class Called:
    """The model as `loss()` gets it: a call goes through DDP, an attribute is read behind it."""

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.wrapped, "module", self.wrapped), name)


class OwnLoss:
    """Calls `loss()` of the file of --code, and keeps the parts that it names.

    A part is logged as train/NAME: its mean over the micro-batches and ranks of the last step.
    """

    def __init__(self, context: Context, function: OwnFunction) -> None:
        self.context = context
        self.function = function
        self.place = function.place
        micro_steps = context.plan.accumulation_steps
        self.parts: deque[Mapping[str, Tensor]] = deque(maxlen=micro_steps)
        self.names: list[str] | None = None  # of the parts, the same from the first step on

    def __call__(
        self,
        model: nn.Module,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        step: int,
    ) -> Tensor:
        """Return the loss (); raise `UserError` unless it is a scalar that has a gradient."""
        plan = self.context.plan.at(step)
        if self.parts.maxlen != plan.accumulation_steps:  # another stage
            self.parts = deque(maxlen=plan.accumulation_steps)
        returned = self.function(
            model=Called(model),
            tokens=tokens,
            targets=targets,
            documents=documents,
            step=step,
            config=self.context.config,
            plan=plan,
        )
        pair = isinstance(returned, tuple) and len(returned) == 2
        loss, parts = returned if pair else (returned, {})
        has_gradient = getattr(loss, "requires_grad", False) or not torch.is_grad_enabled()
        if not isinstance(loss, Tensor) or not is_scalar(loss) or not has_gradient:
            expected = "a real scalar tensor with a gradient, or (loss, {name: scalar tensor})"
            raise unexpected(self.place, loss, expected)
        if not isinstance(parts, Mapping):
            raise unexpected(self.place, parts, "{name: real scalar tensor} beside the loss")
        for name, part in parts.items():
            if not is_scalar(part):
                raise unexpected(f"{self.place}: {name}", part, "a real scalar tensor or a number")
        tensors = {name: torch.as_tensor(parts[name], device=loss.device) for name in parts}
        self.parts.append({name: tensor.detach() for name, tensor in tensors.items()})
        scalar: Tensor = loss
        return scalar

    def metrics(self, accelerator: Accelerator) -> Record:
        """Return the parts of the last step; a collective at the first call, or if it has parts.

        Raises `UserError` unless all micro-batches, steps and ranks have the same parts.
        """
        names = sorted(self.parts[0])
        everywhere = [sorted(parts) for parts in self.parts]
        if self.names is None:
            self.names = names
            everywhere += all_gather(names)
        for others in [self.names, *everywhere]:
            require(
                others == names,
                f"{self.place} returned the parts {names} and {others}; return the same names in "
                "each micro-batch, on all ranks",
            )
        if not names:
            return {}
        rows = [torch.stack([parts[name].float() for name in names]) for parts in self.parts]
        means = torch.stack(rows).mean(0)
        if accelerator.num_processes > 1:
            means = accelerator.reduce(means, "mean")
        record = {f"train/{name}": value for name, value in zip(names, means.tolist(), strict=True)}
        return checked_record(record, self.place)


def is_scalar(value: object) -> bool:
    """Return whether `value` is a real number, or a tensor of one without dimensions."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float)


def make_loss(context: Context) -> ComputeLoss:
    """Return the function that computes the loss of a micro-batch; it also gets the step."""
    function = context.config.own.loss
    return cross_entropy if function is None else OwnLoss(context, function)
