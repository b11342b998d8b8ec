"""AdamW that leaves out an update where the device says so."""

from typing import Any

import torch
from torch import Tensor


class GuardedAdamW(torch.optim.AdamW):
    """AdamW (fused) that does nothing where `skip` is 1: the device decides, nobody waits for it.

    The fused kernels know this as `found_inf`, with which `torch.amp.GradScaler` tells them of an
    overflow in fp16; either is enough.
    """

    skip: Tensor | None = None  # (), float32

    def left_out(self) -> Tensor | None:
        """1 where the update must not happen, else 0; None where nobody says so."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if self.skip is None or found is None:
            return found if self.skip is None else self.skip
        return torch.maximum(found, self.skip)

    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        if self.skip is None:
            return super().step(closure)
        found: Tensor | None = getattr(self, "found_inf", None)
        self.found_inf = self.left_out()
        try:
            return super().step(closure)
        finally:
            del self.found_inf
            if found is not None:
                self.found_inf = found
