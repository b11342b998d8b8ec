"""GPT whose attention sees the last `model.extra.window` tokens only.

    accel-gpt train quickstart --code examples/sliding_window.py --model.extra.window 32
    accel-gpt sample runs/quickstart --code examples/sliding_window.py

Sliding window attention as in Mistral 7B (Jiang et al. 2023, section 2). Everything else stays a
GPT: Muon, the loss in chunks, and the KV cache. The cache keeps all keys; the window hides the old
ones.

Shapes: B batch, T tokens, S keys (cached ones included), C channels.
"""

import torch
import torch.nn.functional as F

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention, dot_product_attention


class WindowAttention(CausalSelfAttention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.window = config.extra.get("window", 64)  # tokens that a token sees, with itself

    def visible(self, first, T, S, device):
        """Return which of S keys the T queries from position `first` on see: (T, S) bool."""
        query = torch.arange(first, first + T, device=device)[:, None]
        key = torch.arange(S, device=device)
        distance = query - key
        return (distance >= 0) & (distance < self.window)

    def forward(self, x, rotary=None, cache=None, mask=None):  # x: (B, T, C)
        q, k, v = self.project(x, rotary)
        first = 0
        if cache is not None:
            first = cache.position
            k, v = cache.append(self.layer, k, v)
        visible = self.visible(first, x.shape[1], k.shape[2], x.device)
        dropout = self.dropout if self.training else 0.0
        y = dot_product_attention(q, k, v, mask=visible, dropout=dropout, causal=False)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), dropout)


def model(config, vocab_size):
    if config.data.document_mask:
        raise ValueError(
            "the window replaces the mask of documents; set data.document_mask to false"
        )
    gpt = GPT(config.model, vocab_size, init=False)
    for layer, block in enumerate(gpt.blocks):
        block.attn = WindowAttention(config.model, layer)
    return gpt
