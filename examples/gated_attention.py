"""Gate the output of attention with a sigmoid of its input.

    accel-gpt train quickstart --code examples/gated_attention.py

Qiu et al. 2025, "Gated Attention for Large Language Models": each channel of each head has a gate,
between the attention and the output projection. It adds a matrix to each block.
Shapes: B batch, T tokens, C channels, H heads, D head size.
"""

import torch
from torch import nn

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention, Matrix


class GatedAttention(CausalSelfAttention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.gate = Matrix(config.n_embd, self.proj.in_features, bias=False)
        self.out = self.proj  # after the gate, so not in the forward of the base class
        self.proj = nn.Identity()

    def forward(self, x, rotary=None, cache=None, mask=None):  # x: (B, T, C)
        heads = super().forward(x, rotary, cache, mask)  # (B, T, H D)
        return self.out(heads * torch.sigmoid(self.gate(x)))


def model(config, vocab_size):
    gpt = GPT(config.model, vocab_size, init=False)
    for layer, block in enumerate(gpt.blocks):
        block.attn = GatedAttention(config.model, layer)
    return gpt
