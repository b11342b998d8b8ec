"""Evaluate, sample and export an exponential moving average (EMA) of the weights.

    accel-gpt train quickstart --code examples/ema.py
    accel-gpt evaluate runs/quickstart --weights trained

After each update, the average becomes DECAY times itself plus 1 - DECAY times the weights (Polyak
& Juditsky 1992). The first updates average over fewer steps. The optimizer is that of the config,
AdamW or Muon: its state also holds the average, so each checkpoint does.
"""

import torch

from accel_gpt.optim.groups import make_optimizer

DECAY = 0.99


@torch.no_grad()
def _average(optimizer, *_):
    for group in optimizer.param_groups:
        group["averaged"] = group.get("averaged", 0) + 1
        decay = min(DECAY, group["averaged"] / (group["averaged"] + 9))
        for p in group["params"]:
            state = optimizer.state[p]
            if "average" not in state:
                state["average"] = p.clone()
            state["average"].lerp_(p, 1 - decay)


def optimizer(model, config):
    made = make_optimizer(model, config.optim)
    made.register_step_post_hook(_average)
    return made


def evaluated(model, optimizer):
    return {
        name: optimizer.state[p]["average"]
        for name, p in model.named_parameters()
        if "average" in optimizer.state[p]  # not if every update was skipped
    }
