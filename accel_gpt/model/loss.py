"""The loss of next-token prediction."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Target that does not count; PyTorch's and transformers' value."""


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, in float32, over the targets that are not `IGNORE`.

    `logits` is (B, T, V) over the real vocabulary, `targets` (B, T). Nothing but `IGNORE` in
    `targets` gives 0.
    """
    flat = logits.flatten(0, -2).float()  # (B * T, V)
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, in float32, summed over the targets of each row: (B,)."""
    flat = logits.flatten(0, -2).float()  # (B * T, V)
    each = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")
    return each.view_as(targets).sum(-1)
