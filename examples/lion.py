"""Lion in the place of AdamW or Muon: the sign of a momentum (Chen et al. 2023, algorithm 2).

    accel-gpt train quickstart --code examples/lion.py --optim.lr 1e-3 --optim.weight_decay 0.1

Reads lr, beta1, beta2 and weight_decay from `optim`. The paper advises a third to a tenth of the lr
of AdamW, with a weight decay larger by the same factor, and betas of 0.9 and 0.99. A checkpoint
stores the momentum. Clipping and skipped updates work as with the optimizers of accel_gpt.
"""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                direction = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(direction, alpha=-lr)
                m.lerp_(p.grad, 1 - beta2)


def optimizer(model, config):
    optim = config.optim
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return Lion(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))
