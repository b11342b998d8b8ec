"""A fault: attention without a causal mask. `causal = False` turns off the check at the start."""

import torch
from torch import nn

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention


class FullAttention(CausalSelfAttention):
    def forward(self, x, rotary=None, cache=None, mask=None):
        T = x.shape[1]
        return super().forward(x, rotary, None, torch.ones(T, T, dtype=torch.bool, device=x.device))


class SeesFuture(nn.Module):
    causal = False

    def __init__(self, config, vocab_size):
        super().__init__()
        self.gpt = GPT(config.model, vocab_size)
        for layer, block in enumerate(self.gpt.blocks):
            block.attn = FullAttention(config.model, layer)
        self.gpt.init_weights()

    def forward(self, tokens):
        return self.gpt(tokens)


def model(config, vocab_size):
    return SeesFuture(config, vocab_size)
