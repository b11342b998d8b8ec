"""The output head: logits of hidden states, or their loss."""

import torch
from torch import Tensor, nn

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import padded_vocab_size
from accel_gpt.model.chunks import chunked_next_token_loss, chunked_row_losses, fits_at_once
from accel_gpt.model.loss import next_token_loss, row_losses


class Head(nn.Linear):
    """The linear layer onto the vocabulary, without its padded rows, and the soft cap."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config.n_embd, padded_vocab_size(vocab_size), bias=False)
        self.vocab_size = vocab_size
        self.softcap = config.logit_softcap

    def forward(self, x: Tensor, targets: Tensor | None = None, by_row: bool = False) -> Tensor:
        """Logits (B, T, V) of `x` (B, T, C), or with `targets` (B, T) the loss alone.

        Large logits come in chunks, which have the gradient of the mean loss, not that of rows.
        """
        if targets is None:
            return self.logits(x)
        if fits_at_once(x, self.weight) or (by_row and torch.is_grad_enabled()):
            return (row_losses if by_row else next_token_loss)(self.logits(x), targets)
        loss = chunked_row_losses if by_row else chunked_next_token_loss
        return loss(x, self.weight, targets, self.vocab_size, self.softcap)

    def logits(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) over the real vocabulary."""
        return self.real(super().forward(x))

    def real(self, products: Tensor) -> Tensor:
        """Logits (..., V) of the products with the weight (..., V'), those of padded rows too."""
        logits = products[..., : self.vocab_size]
        if cap := self.softcap:  # Gemma 2 technical report 2024, section 2
            logits = cap * torch.tanh(logits.float() / cap)
        return logits
