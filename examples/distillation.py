"""Learn the probabilities of a teacher, another run with the same tokenizer.

    accel-gpt train quickstart --code examples/distillation.py --model.extra.teacher runs/large

Hinton et al. 2015, with a temperature of 1: the loss is the Kullback-Leibler divergence from the
teacher, its mean over the targets. Evaluation stays cross entropy. No checkpoint holds the teacher.
"""

import functools

import torch
import torch.nn.functional as F

import accel_gpt
from accel_gpt.model.loss import IGNORE


@functools.cache
def _teacher(path, device):
    teacher, _ = accel_gpt.load(path, device=device)  # in evaluation mode
    return teacher


def loss(model, tokens, targets, documents, config):
    teacher = _teacher(config.model.extra["teacher"], tokens.device)
    with torch.no_grad():
        wanted = teacher(tokens, documents=documents).float().log_softmax(-1)  # (B, T, V)
    found = model(tokens, documents=documents).float().log_softmax(-1)
    divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)  # (B, T)
    counts = targets != IGNORE
    return (divergence * counts).sum() / counts.sum().clamp(min=1)
