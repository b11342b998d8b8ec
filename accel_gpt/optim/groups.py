"""The optimizer and its parameter groups; every group carries its own peak learning rate."""

import torch
from torch import nn

from accel_gpt.config import OptimConfig

PEAK = "peak_lr"


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW, fused, with weight decay on matrices and embeddings and none on vectors.

    Loshchilov & Hutter 2019; the groups are those of minGPT and its descendants.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    undecayed = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, PEAK: config.lr},
        {"params": undecayed, "weight_decay": 0.0, PEAK: config.lr},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Give every group `fraction` of its own peak.

    Reads `param_groups` anew each time: `Accelerator.prepare` and `load_state` replace them.
    """
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
