"""Train on smoothed labels: sound by itself, but another run than one on plain cross entropy."""

import torch.nn.functional as F

SMOOTHING = 0.3


def loss(model, tokens, targets, documents):
    logits = model(tokens, documents=documents).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=SMOOTHING)
