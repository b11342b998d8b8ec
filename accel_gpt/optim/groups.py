"""The optimizer and its parameter groups; every group carries its own peak learning rate."""

from typing import Any

import torch
from torch import Tensor, nn

from accel_gpt.config import OptimConfig

PEAK = "peak_lr"
DECAYED = "decayed"


class GuardedAdamW(torch.optim.AdamW):
    """AdamW (fused) that does nothing where `skip` is 1: the device decides, nobody waits for it.

    The fused kernels know this as `found_inf`, with which `torch.amp.GradScaler` tells them of an
    overflow in fp16; either is enough.
    """

    skip: Tensor | None = None  # (), float32

    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        if self.skip is None:
            return super().step(closure)
        found: Tensor | None = getattr(self, "found_inf", None)
        self.found_inf = self.skip if found is None else torch.maximum(found, self.skip)
        try:
            return super().step(closure)
        finally:
            del self.found_inf
            if found is not None:
                self.found_inf = found


def make_optimizer(model: nn.Module, config: OptimConfig) -> GuardedAdamW:
    """AdamW with weight decay on matrices and embeddings and none on vectors.

    Loshchilov & Hutter 2019; the groups are those of minGPT and its descendants.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    undecayed = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, DECAYED: True}, {"params": undecayed, DECAYED: False}]
    filled = [group for group in groups if group["params"]]
    optimizer = GuardedAdamW(filled, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def configure(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Write the config into every group; also after a resume, which restores those of the past."""
    for group in optimizer.param_groups:
        group[PEAK] = config.lr
        group["weight_decay"] = config.weight_decay if group[DECAYED] else 0.0
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Give every group `fraction` of its own peak.

    Reads `param_groups` anew each time: `Accelerator.prepare` and `load_state` replace them.
    """
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
