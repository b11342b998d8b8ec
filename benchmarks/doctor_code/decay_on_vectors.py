"""A fault: strong weight decay on every parameter, the scales of the norms too."""

import torch


def optimizer(model, config):
    optim = config.optim
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(model.parameters(), lr=optim.lr, betas=betas, weight_decay=1.0)
