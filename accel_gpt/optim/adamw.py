"""AdamW that skips an update if a flag on the device is 1. The host waits for it only on MPS."""

from typing import Any

import torch
from torch import Tensor

UNGUARDED = ("mps",)  # devices whose fused kernel ignores `found_inf`; the host reads it instead


def undecorated(method: Any) -> Any:
    """Return a method of torch without its decorator.

    The decorator disables torch.compile for the method. To do so, it imports the compiler, which
    takes a second at start-up. These methods are never compiled here.
    """
    return getattr(method, "__wrapped__", method)


class GuardedAdamW(torch.optim.AdamW):
    """Update the parameters by fused AdamW, or skip the update if `skip` is 1.

    The fused kernels read `skip` as `found_inf`, which `torch.amp.GradScaler` sets to 1 after an
    overflow in fp16. Either of them skips the update.
    """

    skip: Tensor | None = None  # (), float32
    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)
    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)

    def skip_or_found_inf(self) -> Tensor | None:
        """Return 1 if the update must be skipped, else 0; None if neither tensor is set."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self.skip is None:
            return found_inf
        if found_inf is None:
            return self.skip
        return torch.maximum(found_inf, self.skip)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        update = undecorated(torch.optim.AdamW.step)
        skip = self.skip_or_found_inf()
        if skip is None:
            return update(self, closure)
        if skip.device.type in UNGUARDED and skip.item():
            return None
        set_by_scaler: Tensor | None = getattr(self, "found_inf", None)
        self.found_inf = skip
        try:
            return update(self, closure)
        finally:
            del self.found_inf
            if set_by_scaler is not None:
                self.found_inf = set_by_scaler
