"""Log the root mean square of the weights: nothing of the run changes."""

import torch


def metrics(run):
    weights = torch.cat([p.flatten() for p in run.gpt.parameters()])
    return {"train/weight_rms": weights.square().mean().sqrt().item()}
