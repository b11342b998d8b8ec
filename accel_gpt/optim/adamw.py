"""AdamW that clips the gradient and skips an update by tensors on the device.

The host waits for them only on MPS.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from accel_gpt.model.sharding import local_shard

# devices whose fused kernel ignores `found_inf` and `grad_scale`; the host reads them instead
UNGUARDED = ("mps",)
AMP = ("found_inf", "grad_scale")  # attributes that `torch.amp.GradScaler` sets
CLIP_EPS = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def undecorated(method: Any) -> Any:
    """Return a method of torch without its decorator.

    The decorator disables torch.compile for the method. To do so, it imports the compiler, which
    takes a second at start-up. These methods are never compiled here.
    """
    return getattr(method, "__wrapped__", method)


class Guard:
    """Hold what an optimizer must know before an update, as tensors on the device.

    A loss scaler sets the attributes `found_inf` and `grad_scale`, with the same meaning.
    """

    skip: Tensor | None = None  # (), float32; 1: skip the update
    divisor: Tensor | None = None  # of the gradients; (), float32

    def clip(self, norm: Tensor, limit: float) -> None:
        """Divide the gradients in the next updates so that their `norm` () is at most `limit`.

        If `limit` is 0, they are not divided.
        """
        self.divisor = None
        if limit:
            self.divisor = ((norm.float() + CLIP_EPS) / limit).clamp(min=1.0)

    def skip_or_found_inf(self) -> Tensor | None:
        """Return 1 if the update must be skipped, else 0; None if neither tensor is set."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self.skip is None:
            return found_inf
        if found_inf is None:
            return self.skip
        return torch.maximum(found_inf, self.skip)

    def divisor_and_grad_scale(self) -> Tensor | None:
        """Return what the gradients must be divided by; None if neither tensor is set.

        A loss scaler sets `grad_scale` if the optimizer must unscale the gradients.
        """
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if self.divisor is None:
            return grad_scale
        if grad_scale is None:
            return self.divisor
        return self.divisor * grad_scale


@contextlib.contextmanager
def given_to_kernel(
    optimizer: torch.optim.Optimizer, skip: Tensor | None, divisor: Tensor | None
) -> Iterator[None]:
    """Let the fused kernel of `optimizer` read `skip` and `divisor`; restore its attributes."""
    before = {name: getattr(optimizer, name) for name in AMP if hasattr(optimizer, name)}
    own: Any = optimizer
    own.found_inf = skip
    own.grad_scale = divisor
    try:
        yield
    finally:
        for name in AMP:
            delattr(optimizer, name)
        for name, value in before.items():
            setattr(optimizer, name, value)


def divide_gradients(optimizer: torch.optim.Optimizer, divisor: Tensor | float) -> None:
    """Divide the gradients of all parameters in place; under FSDP, this rank's shards."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                local_shard(p.grad).div_(divisor)


class GuardedAdamW(Guard, torch.optim.AdamW):
    """Update the parameters by fused AdamW, or skip the update if `skip` is 1.

    The fused kernels read `skip` as `found_inf`, which `torch.amp.GradScaler` sets to 1 after an
    overflow in fp16. Either of them skips the update.

    They read `divisor` as `grad_scale`, so that clipping is part of the update. They also write the
    divided gradients back.
    """

    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)
    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        update = undecorated(torch.optim.AdamW.step)
        skip = self.skip_or_found_inf()
        divisor = self.divisor_and_grad_scale()
        if skip is not None and skip.device.type in UNGUARDED and skip.item():
            return None
        if divisor is not None and divisor.device.type in UNGUARDED:
            divide_gradients(self, divisor)
            divisor = None
        with given_to_kernel(self, skip, divisor):
            return update(self, closure)
