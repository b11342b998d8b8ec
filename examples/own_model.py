"""A language model without attention: a gated linear recurrence in the place of GPT.

    accel-gpt train quickstart --code examples/own_model.py --out_dir runs/own_model
    accel-gpt sample runs/own_model --code examples/own_model.py

Each channel keeps a state h_t = a_t h_(t-1) + (1 - a_t) v_t, whose decay a depends on the input
(Gu & Dao 2023, Mamba; Feng et al. 2024, "Were RNNs All We Needed?", minGRU).
Shapes: B batch, T tokens, C channels, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from accel_gpt.model.layers import MLP, Matrix  # Matrix: a linear layer that Muon takes too


def scan(a, b):
    """Compute h_t = a_t h_(t-1) + b_t for all t, with h_(-1) = 0; a, b and h are (B, T, C).

    In log2(T) rounds (Hillis & Steele 1986): after each round, b_t holds twice as many terms.
    """
    shift, T = 1, b.shape[1]
    while shift < T:
        earlier_a = F.pad(a, (0, 0, shift, 0), value=1.0)[:, :T]
        earlier_b = F.pad(b, (0, 0, shift, 0))[:, :T]
        b = b + a * earlier_b
        a = a * earlier_a
        shift *= 2
    return b


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.norm_1 = nn.RMSNorm(C)
        self.decay_value_gate = Matrix(C, 3 * C, bias=True, muon_rows=(C, C, C))
        self.proj = Matrix(C, C, bias=False)
        self.norm_2 = nn.RMSNorm(C)
        self.mlp = MLP(config)

    def forward(self, x):  # (B, T, C)
        decay, value, gate = self.decay_value_gate(self.norm_1(x)).chunk(3, dim=-1)
        a = torch.sigmoid(decay.float() + 2)  # at first, a state lasts about eight tokens
        h = scan(a, (1 - a) * value)
        x = x + self.proj(h * F.silu(gate))
        return x + self.mlp(self.norm_2(x))


class GatedRecurrence(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        C = config.n_embd
        self.embedding = nn.Embedding(vocab_size, C)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(C)
        self.head = nn.Linear(C, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.weight)  # the first loss is log(V)

    def forward(self, tokens):  # (B, T)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # (B, T, V)


def model(config, vocab_size):
    return GatedRecurrence(config.model, vocab_size)
