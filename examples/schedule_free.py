"""Schedule-Free AdamW: no decay of the learning rate, and an average that is evaluated.

    accel-gpt train quickstart --code examples/schedule_free.py --optim.lr 3e-3

Defazio et al. 2024, "The Road Less Scheduled", algorithm 1. The weights of the model are y, where
the gradient is taken; z takes the steps, and x is the average of z that is evaluated:

    y = (1 - BETA) z + BETA x

A checkpoint stores y as the weights and z in the optimizer, so x follows. The rate is constant
after the warm-up. Weight decay acts at y.
"""

import torch

BETA = 0.9


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr, beta2, eps, weight_decay):
        super().__init__(params, {"lr": lr, "beta2": beta2, "eps": eps, "decay": weight_decay})
        for group in self.param_groups:
            group["step"] = 0
            group["sum"] = 0.0  # of the weights of the average

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, beta2 = group["lr"], group["beta2"]
            group["step"] += 1
            group["sum"] += lr**2  # a step in the warm-up counts less
            share = lr**2 / group["sum"]  # of z in the average
            correction = 1 - beta2 ** group["step"]
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state["z"] = y.clone()
                    state["exp_avg_sq"] = torch.zeros_like(y)
                z, square = state["z"], state["exp_avg_sq"]
                square.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                direction = y.grad / (square / correction).sqrt().add_(group["eps"])
                direction.add_(y, alpha=group["decay"])
                x = _average(y, z)
                z.sub_(direction, alpha=lr)
                x.lerp_(z, share)
                y.copy_(z.lerp(x, BETA))


def _average(y, z):
    return y.lerp(z, 1 - 1 / BETA)


def optimizer(model, config):
    optim = config.optim
    weights = [p for p in model.parameters() if p.requires_grad]
    return ScheduleFree(weights, optim.lr, optim.beta2, optim.eps, optim.weight_decay)


def lr(step, plan):
    return min(1.0, (step + 1) / max(plan.warmup_steps, 1))


def evaluated(model, optimizer):
    return {
        name: _average(p, optimizer.state[p]["z"])
        for name, p in model.named_parameters()
        if "z" in optimizer.state[p]  # not if every update was skipped
    }
