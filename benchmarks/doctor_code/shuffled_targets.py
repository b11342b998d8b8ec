"""A fault: the targets of a batch are shuffled, so the context says nothing about them."""

import torch


def loss(model, tokens, targets, documents):
    order = torch.randperm(targets.numel())
    return model(tokens, targets.flatten()[order].view_as(targets), documents=documents)
