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
from accel_gpt.launch.ranks import all_gather
from accel_gpt.own_code import OwnCode
from accel_gpt.training.metrics import Record, checked_record

ComputeLoss = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]


def cross_entropy(
    model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None
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

    def __init__(self, own: OwnCode, micro_steps: int) -> None:
        assert own.loss is not None
        self.function = own.loss
        self.place = own.place("loss")
        self.parts: deque[Mapping[str, Tensor]] = deque(maxlen=micro_steps)
        self.names: list[str] | None = None  # of the parts, the same from the first step on

    def __call__(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Return the loss (); raise `UserError` unless it is a scalar that has a gradient."""
        returned = self.function(Called(model), tokens, targets, documents)
        pair = isinstance(returned, tuple) and len(returned) == 2
        loss: Tensor = returned[0] if pair else returned
        parts: Any = returned[1] if pair else {}
        require(
            isinstance(loss, Tensor),
            f"{self.place} returned {type(loss).__name__}; return the loss, a tensor without "
            "dimensions, or (loss, {name: scalar})",
        )
        self.check_scalar("the loss", loss)
        require(
            loss.requires_grad or not torch.is_grad_enabled(),
            f"{self.place} returned a loss without a gradient; compute it from model(tokens)",
        )
        require(
            isinstance(parts, Mapping),
            f"{self.place} returned {type(parts).__name__} beside the loss; return the loss, or "
            "(loss, {name: scalar})",
        )
        for name, part in parts.items():
            self.check_scalar(repr(name), part)
        self.parts.append({name: part.detach() for name, part in parts.items()})
        return loss

    def check_scalar(self, name: str, value: object) -> None:
        """Raise `UserError` unless `value` is a tensor of one real number without dimensions."""
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        require(
            found == (),
            f"{self.place}: {name} must be a tensor without dimensions, but is {found}; take a "
            "mean",
        )
        assert isinstance(value, Tensor)
        require(
            not value.is_complex(),
            f"{self.place}: {name} is a complex number; return a real one",
        )

    def metrics(self, accelerator: Accelerator) -> Record:
        """Return the parts of the last step; a collective at the first call, or if it has parts.

        Raises `UserError` unless all micro-batches, steps and ranks have the same parts.
        """
        if self.names is None:
            self.names = sorted(self.parts[-1])
            first, *others = all_gather(self.names)
            for other in others:
                require(
                    other == first,
                    f"{self.place} returned the parts {first} on rank 0, but {other} on another; "
                    "return the same names on all ranks",
                )
        names = self.names
        for parts in self.parts:
            differing = sorted(parts.keys() ^ set(names))
            require(
                not differing,
                f"{self.place} returned the part {differing[:1]} for some micro-batches only; "
                "return the same names each time",
            )
        if not names:
            return {}
        rows = [torch.stack([parts[name].float() for name in names]) for parts in self.parts]
        means = torch.stack(rows).mean(0)
        if accelerator.num_processes > 1:
            means = accelerator.reduce(means, "mean")
        found = {f"train/{name}": value for name, value in zip(names, means.tolist(), strict=True)}
        return checked_record(found, self.place)


def make_loss(own: OwnCode, micro_steps: int) -> ComputeLoss:
    """Return the function that computes the loss of a micro-batch.

    `micro_steps`: the number of micro-batches of a step on this rank.
    """
    return cross_entropy if own.loss is None else OwnLoss(own, micro_steps)
