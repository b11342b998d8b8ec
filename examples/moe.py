"""A mixture of experts in the place of each block's MLP, with a loss that balances the experts.

    accel-gpt train quickstart --code examples/moe.py --model.extra.experts 4 --model.extra.top_k 2
    accel-gpt sample runs/quickstart --code examples/moe.py

A router sends each token to the top_k of the experts that it finds likeliest, and adds their
outputs (Shazeer et al. 2017; normalized as in Mixtral, Jiang et al. 2024). The balance is equation
4 of Switch Transformers, Fedus et al. 2021: 1 if all experts get equally many tokens. It is logged
as train/balance, and train/cross_entropy is the loss without it.

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
        self.top_k = config.extra.get("top_k", 2)
        self.router = nn.Linear(config.n_embd, config.extra.get("experts", 4), bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(self.router.out_features))
        self.balance = None  # of the last forward pass, for the loss

    def route(self, x):
        """Return all probabilities (N, E), the chosen experts (N, k) and their gates (N, k)."""
        probabilities = self.router(x).float().softmax(-1)
        gates, chosen = probabilities.topk(self.top_k)
        return probabilities, chosen, gates / gates.sum(-1, keepdim=True)

    def forward(self, x):  # (B, T, C)
        flat = x.flatten(0, 1)  # (N, C)
        probabilities, chosen, gates = self.route(flat)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            weighted = gates[token, slot, None] * expert(flat[token])
            out = out.index_add(0, token, weighted)
        E = len(self.experts)
        share = F.one_hot(chosen, E).float().mean((0, 1))  # of the tokens, for each expert (E,)
        self.balance = E * (share * probabilities.mean(0)).sum()
        return out.view_as(x).to(x.dtype)


class MoEGPT(GPT):
    def flops_per_token(self):
        """Count the chosen experts only."""
        idle = 0
        for module in self.modules():
            if isinstance(module, MoE):
                weights = sum(p.numel() for p in module.experts[0].parameters() if p.ndim > 1)
                idle += weights * (len(module.experts) - module.top_k)
        return super().flops_per_token() - 6 * idle


def model(config, vocab_size):
    gpt = MoEGPT(config.model, vocab_size, init=False)
    for block in gpt.blocks:
        block.mlp = MoE(config.model)
    return gpt


def loss(model, tokens, targets, documents):
    cross_entropy = model(tokens, targets, documents=documents)
    balances = [module.balance for module in model.modules() if isinstance(module, MoE)]
    balance = torch.stack(balances).mean()
    total = cross_entropy + BALANCE * balance
    return total, {"cross_entropy": cross_entropy, "balance": balance}
