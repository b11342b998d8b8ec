"""The feed-forward layer of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import activates_twice


class ResidualProjection(nn.Linear):
    """A linear layer onto the residual stream; starts smaller than the others, or at zero."""


class MLP(nn.Module):
    """The feed-forward layer: GELU (tanh form or exact), squared ReLU, or a gated SiLU.

    SwiGLU: Shazeer 2020, equation 5; the first half of the rows of `up` is its gate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.squared = config.mlp == "relu2"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        self.dropout = config.dropout
        width = config.hidden_size * (2 if self.gated else 1)
        self.up = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down = ResidualProjection(config.hidden_size, config.n_embd, bias=config.bias)

    def activate(self, h: Tensor) -> Tensor:
        """The hidden channels of what `up` made."""
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            return F.silu(gate) * h
        if self.squared:  # So et al. 2021, section 3.2
            return F.relu(h).square()
        return F.gelu(h, approximate=self.approximate)

    def project(self, h: Tensor) -> Tensor:
        """What the hidden channels add to the residual stream, before dropout."""
        out: Tensor = self.down(self.activate(h))
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if torch.is_grad_enabled() and activates_twice(h.numel()) and not is_compiling():
            # computed again up to the product of `down`, whose input is what is missing
            out = checkpoint(self.project, h, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self.project(h)
        return F.dropout(out, self.dropout) if self.training and self.dropout else out
