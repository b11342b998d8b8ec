"""Add an embedding of each token to its values in attention.

    accel-gpt train quickstart --code examples/value_embeddings.py
    accel-gpt sample runs/quickstart --code examples/value_embeddings.py

As in modded-nanogpt (Jordan et al. 2024), where the first and the last three blocks share three
tables. Here each block has its own table, and learns how much of it to add.
Shapes: B batch, T tokens, K key and value heads, D head size.
"""

import torch
from torch import nn

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention


class ValueAttention(CausalSelfAttention):
    def __init__(self, config, layer, vocab_size):
        super().__init__(config, layer)
        self.values = nn.Embedding(vocab_size, config.kv_heads * config.head_size)
        self.share = nn.Parameter(torch.tensor([0.5]))  # FSDP shards no scalar
        self.tokens = None  # (B, T), of this forward pass

    def project(self, x, rotary):
        q, k, v = super().project(x, rotary)  # v: (B, K, T, D)
        more = self.values(self.tokens).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return q, k, v + (self.share * more).to(v.dtype)


class ValueGPT(GPT):
    def forward(self, tokens, *arguments, **options):
        for block in self.blocks:
            block.attn.tokens = tokens
        return super().forward(tokens, *arguments, **options)


def model(config, vocab_size):
    gpt = ValueGPT(config.model, vocab_size, init=False)
    for layer, block in enumerate(gpt.blocks):
        block.attn = ValueAttention(config.model, layer, vocab_size)
    return gpt
