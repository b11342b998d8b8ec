"""Predict the token after the next one as well, with a second head that is dropped after training.

    accel-gpt train quickstart --code examples/multi_token.py

Gloeckle et al. 2024, section 2, with two heads: each is a block on the shared trunk, and both use
one output projection. So the second head is a block beside the last one. train/second is its loss.
"""

import torch.nn.functional as F

from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import Block
from accel_gpt.model.loss import IGNORE


class Heads(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.second = Block(config, layer)
        self.x = None  # (B, T, C), the output of the second head

    def forward(self, x, rotary=None, cache=None, mask=None):
        if self.training:
            self.x = self.second(x, rotary=rotary, mask=mask)
        return super().forward(x, rotary, cache, mask)


class MultiTokenGPT(GPT):
    def forward(self, tokens, targets=None, *arguments, **options):
        out = super().forward(tokens, targets, *arguments, **options)
        if self.training and targets is not None:
            later = F.pad(targets[:, 1:], (0, 1), value=IGNORE)
            later = later.masked_fill(targets == IGNORE, IGNORE)  # none of the next document
            self.second_loss = self.head(self.norm_f(self.blocks[-1].x), later)  # for loss()
        return out

    def flops_per_token(self):  # both heads project onto the vocabulary
        return super().flops_per_token() + 6 * self.vocab_size * self.config.n_embd


def model(config, vocab_size):
    gpt = MultiTokenGPT(config.model, vocab_size, init=False)
    gpt.blocks[-1] = Heads(config.model, config.model.n_layer - 1)
    return gpt


def loss(model, tokens, targets, documents):
    first = model(tokens, targets, documents=documents)
    return first + model.second_loss, {"first": first, "second": model.second_loss}
