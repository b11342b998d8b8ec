"""A fault: Adagrad (Duchi et al. 2011) whose sums are beside `state`, so no checkpoint holds them.

After a resume, the first updates are as large as those of step 1, but without the warm-up.
"""

import torch


class ForgetfulAdagrad(torch.optim.Optimizer):
    def __init__(self, groups, defaults):
        super().__init__(groups, defaults)
        self.sums = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                squares = self.sums.setdefault(p, torch.zeros_like(p))
                squares.add_(p.grad.square())
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(p.grad, squares.sqrt() + 1e-8, value=-group["lr"])


def optimizer(model, config):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return ForgetfulAdagrad(groups, {"lr": config.optim.lr})
