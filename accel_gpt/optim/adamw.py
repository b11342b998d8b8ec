"""AdamW that skips an update where a tensor on the device says so, without waiting for it."""

from typing import Any

import torch
from torch import Tensor

UNGUARDED = ("mps",)  # devices whose fused kernel updates regardless, so the host looks


def undecorated(method: Any) -> Any:
    """A method of torch without its decorator, which keeps the compiler out of the method but
    imports it: a second at start-up. Nothing here compiles these methods.
    """
    return getattr(method, "__wrapped__", method)


class GuardedAdamW(torch.optim.AdamW):
    """Fused AdamW that skips the update where `skip` is 1.

    The fused kernels take this as `found_inf`, which `torch.amp.GradScaler` sets for an overflow in
    fp16; either skips the update.
    """

    skip: Tensor | None = None  # (), float32
    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)
    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)

    def skip_or_found_inf(self) -> Tensor | None:
        """1 where the update is skipped, else 0; None where neither is set."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if self.skip is None or found is None:
            return found if self.skip is None else self.skip
        return torch.maximum(found, self.skip)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        update = undecorated(torch.optim.AdamW.step)
        skip = self.skip_or_found_inf()
        if skip is None:
            return update(self, closure)
        if skip.device.type in UNGUARDED and skip.item():
            return None
        found: Tensor | None = getattr(self, "found_inf", None)
        self.found_inf = skip
        try:
            return update(self, closure)
        finally:
            del self.found_inf
            if found is not None:
                self.found_inf = found
