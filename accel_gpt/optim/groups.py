"""The optimizer and its parameter groups; every group carries its own peak learning rate."""

import torch
from torch import nn

from accel_gpt.config import OptimConfig

PEAK = "peak_lr"
DECAYED = "decayed"


def make_optimizer(model: nn.Module, config: OptimConfig, fused: bool = True) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings and none on vectors.

    Loshchilov & Hutter 2019; the groups are those of minGPT and its descendants. Under fp16 `fused`
    must be false: the fused kernel skips overflowing steps by itself, and nobody learns of it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    undecayed = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, DECAYED: True}, {"params": undecayed, DECAYED: False}]
    filled = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(filled, lr=config.lr, fused=fused)
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
