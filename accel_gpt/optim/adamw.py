"""AdamW that leaves out an update where the device says so."""

from typing import Any

import torch
from torch import Tensor


def plain(method: Any) -> Any:
    """A method of torch's without its decorator, which imports the compiler: a second, at start.

    The decorator keeps the compiler out of the method; nothing here compiles one.
    """
    return getattr(method, "__wrapped__", method)


class GuardedAdamW(torch.optim.AdamW):
    """AdamW (fused) that does nothing where `skip` is 1: the device decides, nobody waits for it.

    The fused kernels know this as `found_inf`, with which `torch.amp.GradScaler` tells them of an
    overflow in fp16; either is enough.
    """

    skip: Tensor | None = None  # (), float32
    state_dict = plain(torch.optim.Optimizer.state_dict)
    load_state_dict = plain(torch.optim.Optimizer.load_state_dict)
    zero_grad = plain(torch.optim.Optimizer.zero_grad)
    add_param_group = plain(torch.optim.Optimizer.add_param_group)

    def left_out(self) -> Tensor | None:
        """1 where the update must not happen, else 0; None where nobody says so."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if self.skip is None or found is None:
            return found if self.skip is None else self.skip
        return torch.maximum(found, self.skip)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        update = plain(torch.optim.AdamW.step)
        if self.skip is None:
            return update(self, closure)
        found: Tensor | None = getattr(self, "found_inf", None)
        self.found_inf = self.left_out()
        try:
            return update(self, closure)
        finally:
            del self.found_inf
            if found is not None:
                self.found_inf = found
