"""Schedule-Free AdamW: no decay of the learning rate, and an average that is evaluated.

    accel-gpt train quickstart --code examples/schedule_free.py --optim.lr 3e-3

Defazio et al. 2024, "The Road Less Scheduled", algorithm 1. The gradient is taken at the weights y
= (1 - BETA) z + BETA x, where z takes the steps and x is their average, which is evaluated. A
checkpoint stores y as the weights and z in the optimizer, so x follows. The rate is constant after
the warm-up. Weight decay acts at y, on matrices and embeddings.
"""

import torch

BETA = 0.9


class ScheduleFree(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            rate = group["lr"] * (1 - group["beta2"] ** group["step"]) ** 0.5
            group["sum"] += rate**2  # so a step in the warm-up counts less
            share = rate**2 / group["sum"]  # of z in the average
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state |= {"z": y.clone(), "exp_avg_sq": torch.zeros_like(y)}
                z, square = state["z"], state["exp_avg_sq"]
                x = _average(y, z)
                square.lerp_(y.grad.square(), 1 - group["beta2"])
                z.addcdiv_(y.grad, square.sqrt() + group["eps"], value=-rate)
                z.sub_(y, alpha=rate * group["weight_decay"])
                x.lerp_(z, share)
                y.copy_(z.lerp(x, BETA))


def _average(y, z):
    return y.lerp(z, 1 - 1 / BETA)


def optimizer(model, config):
    optim = config.optim
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": optim.lr, "beta2": optim.beta2, "eps": optim.eps, "step": 0, "sum": 0.0}
    return ScheduleFree(groups, options)


def lr(step, plan):
    return min(1.0, (step + 1) / max(plan.warmup_steps, 1))


def evaluated(model, optimizer):
    return {
        name: _average(p, optimizer.state[p]["z"])
        for name, p in model.named_parameters()
        if "z" in optimizer.state[p]  # not if every update was skipped
    }
