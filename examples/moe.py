"""A mixture of experts in the place of each block's MLP, with a loss that balances the experts.

    accel-gpt train quickstart --code examples/moe.py --model.extra.experts 4 --model.extra.top_k 2

A router sends each token to its top_k likeliest experts, and adds their outputs (Shazeer et al.
2017; normalized as in Mixtral, Jiang et al. 2024). train/balance is equation 4 of Switch
Transformers, Fedus et al. 2021: 1 if all experts get equally many tokens.
Shapes: B batch, T tokens, N = B T, C channels, E experts, k chosen experts.
"""

import torch
import torch.nn.functional as F
from torch import nn

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import MLP

BALANCE = 0.01  # weight of the balance in the loss; Switch Transformers, section 2.2


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.extra["top_k"]
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.extra["experts"]))
        self.router = nn.Linear(config.n_embd, len(self.experts), bias=False)
        self.balance = None  # of the last forward pass, for the loss

    def forward(self, x):  # (B, T, C)
        flat = x.flatten(0, 1)  # (N, C)
        probabilities = self.router(flat).float().softmax(-1)  # (N, E)
        gates, chosen = probabilities.topk(self.top_k)  # (N, k)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, gates[token, slot, None] * expert(flat[token]))
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))  # of the tokens (E,)
        self.balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        return out.view_as(x).to(x.dtype)


class MoEGPT(GPT):
    def flops_per_token(self):  # of the chosen experts
        idle = [block.mlp.experts[block.mlp.top_k :] for block in self.blocks]
        weights = [p for experts in idle for p in experts.parameters() if p.ndim > 1]
        return super().flops_per_token() - 6 * sum(p.numel() for p in weights)


def model(config, vocab_size):
    gpt = MoEGPT(config.model, vocab_size, init=False)
    for block in gpt.blocks:
        block.mlp = MoE(config.model)
    return gpt


def loss(model, tokens, targets, documents):
    cross_entropy = model(tokens, targets, documents=documents)
    balance = torch.stack([block.mlp.balance for block in model.blocks]).mean()
    return cross_entropy + BALANCE * balance, {"cross_entropy": cross_entropy, "balance": balance}
