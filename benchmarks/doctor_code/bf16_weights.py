"""A fault: the weights are bfloat16, so an update below 1/256 of a weight is lost in rounding."""

import torch

from accel_gpt.model.gpt import GPT


def model(config, vocab_size):
    return GPT(config.model, vocab_size, init=False).to(torch.bfloat16)
