"""The loss of next-token prediction, and the output head that computes it.

Logits that would fill the memory are computed a chunk of tokens at a time, with their gradients,
which the backward pass only scales: no logits outlive their chunk (fused linear cross entropy, as
in Liger kernel, Hsu et al. 2024, section 3.2). To autograd, and to a compiled model, all chunks
together are one operation; in a compiled model the function from logits to losses and gradients is
compiled by itself, once for all chunks.

Shapes: B batch, T tokens, N tokens of a batch, n of them in a chunk, C channels, V vocabulary, V'
rows of the head, padding included.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import chunk_tokens, padded_vocab_size

IGNORE = -100
"""Target that does not count; PyTorch's and transformers' value."""


class Head(nn.Linear):
    """The linear layer onto the vocabulary, without its padded rows, and the soft cap."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config.n_embd, padded_vocab_size(vocab_size), bias=False)
        self.vocab_size = vocab_size
        self.softcap = config.logit_softcap

    def forward(
        self, x: Tensor, targets: Tensor | None = None, per_sequence: bool = False
    ) -> Tensor:
        """Logits (B, T, V) of `x` (B, T, C); with `targets` (B, T) their mean loss () or,
        `per_sequence`, the summed loss of each sequence (B,), which has no gradient in chunks.
        """
        if targets is None:
            return self.logits(x)
        at_once = x[..., 0].numel() <= chunk_tokens(len(self.weight), x.device.type == "cpu")
        if at_once or (per_sequence and torch.is_grad_enabled()):
            return (sequence_losses if per_sequence else next_token_loss)(self.logits(x), targets)
        loss = chunked_sequence_losses if per_sequence else chunked_next_token_loss
        return loss(x, self.weight, targets, self.vocab_size, self.softcap)

    def logits(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) over the real vocabulary."""
        logits = super().forward(x)[..., : self.vocab_size]
        if cap := self.softcap:  # Gemma 2 technical report 2024, section 2
            logits = cap * torch.tanh(logits.float() / cap)
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, in float32, over the targets that are not `IGNORE`.

    `logits` is (B, T, V) over the real vocabulary, `targets` (B, T). Nothing but `IGNORE` in
    `targets` gives 0.
    """
    flat = logits.flatten(0, -2).float()  # (B * T, V)
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)


def sequence_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, in float32, summed over the targets of each sequence: (B,)."""
    flat = logits.flatten(0, -2).float()  # (B * T, V)
    each = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")
    return each.view_as(targets).sum(-1)


# --------------------------------------------------------------------------- chunk by chunk


def chunked_next_token_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """`next_token_loss` of the logits of `x` (B, T, C), which are never held together."""
    total: Tensor = _loss_and_gradients(*_flatten(x, weight, targets, vocab_size, softcap))[0]
    return total / (targets != IGNORE).sum().clamp(min=1)


def chunked_sequence_losses(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """`sequence_losses` of the logits of `x` (B, T, C), without gradients."""
    losses: Tensor = _token_losses(*_flatten(x, weight, targets, vocab_size, softcap))
    return losses.view_as(targets).sum(-1)


def _flatten(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, int, float, torch.dtype, bool]:
    """Arguments of the custom operations; `dtype` of the matrix products is that of autocast."""
    dtype, device = x.dtype, x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    flat = x.flatten(0, -2), weight, targets.flatten()
    return *flat, vocab_size, softcap or 0.0, dtype, torch.compiler.is_compiling()


@torch.library.custom_op("accel_gpt::loss_and_gradients", mutates_args=())
def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    dtype: torch.dtype,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss () of `x` (N, C) and its gradients by `x` and by `weight` (V', C)."""
    total, dx, dw = _empty_results(x, weight)
    total.zero_()
    dw.zero_()
    losses_and_dlogits = _compile(_losses_and_dlogits) if compiled else _losses_and_dlogits
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(dtype)
        for chunk, inputs, valid, ids in _chunks(x, targets, len(weight), dtype):
            losses, dlogits = losses_and_dlogits(inputs @ table.T, ids, vocab_size, softcap)
            total += (losses * valid.squeeze(1)).sum()
            dx[chunk] = (dlogits @ table) * valid
            inputs = inputs * valid
            if dw.dtype == dtype:
                dw.addmm_(dlogits.T, inputs)
            elif dtype == torch.float16:
                scale = _fp16_scale(inputs)
                dw.addcmul_(dlogits.T @ (inputs / scale), scale)
            else:
                dw += dlogits.T @ inputs
            del dlogits  # or it is held beside the next chunk's
    return total, dx, dw


@torch.library.custom_op("accel_gpt::token_losses", mutates_args=())
def _token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    dtype: torch.dtype,
    compiled: bool,
) -> Tensor:
    """The loss of each token (N,)."""
    losses_of = _compile(_losses) if compiled else _losses
    losses = []
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(dtype)
        for _, inputs, valid, ids in _chunks(x, targets, len(weight), dtype):
            losses.append(losses_of(inputs @ table.T, ids, vocab_size, softcap) * valid.squeeze(1))
    return torch.cat(losses)


@_loss_and_gradients.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(x, weight)


@_token_losses.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), dtype=torch.promote_types(weight.dtype, torch.float32))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = ctx.saved_tensors
    return grad_output * dx, (grad_output * dw).to(ctx.weight_dtype), *[None] * 5


_loss_and_gradients.register_autograd(_backward, setup_context=_save)


def _empty_results(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and weight gradient are summed in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return x.new_empty((), dtype=wide), torch.empty_like(x), torch.empty_like(weight, dtype=wide)


def _chunks(
    x: Tensor, targets: Tensor, rows: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For each chunk: its slice, inputs (n, C), 1 where a target is valid (n, 1), target ids."""
    size = chunk_tokens(rows, x.device.type == "cpu")
    for start in range(0, len(x), size):
        chunk = slice(start, start + size)
        valid = targets[chunk] != IGNORE
        yield chunk, x[chunk].to(dtype), valid.unsqueeze(1).to(dtype), targets[chunk] * valid


def _fp16_scale(inputs: Tensor) -> Tensor:
    """A divisor () of `inputs` (n, C), 1 or more, that keeps the products with dlogits (at most 1
    in size), summed over n, below 2^15, within float16. The loss scaler cannot prevent an overflow
    here: its scale is applied in the backward pass, after these sums.
    """
    return (len(inputs) / 2**15 * inputs.abs().amax().float()).clamp(min=1.0)


def _log_probabilities(
    logits: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (n, V'), -inf for the padding, and tanh(logit / cap) with a soft cap."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tanh = logits.div_(softcap).tanh_() if softcap else None
    if tanh is not None:
        logits = tanh * softcap
    logits[:, vocab_size:] = float("-inf")
    return logits.log_softmax(-1), tanh


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Cross entropy of each token (n,) from its logits (n, V')."""
    logs, _ = _log_probabilities(logits, vocab_size, softcap)
    return -logs.gather(1, targets.unsqueeze(1)).squeeze(1)


def _losses_and_dlogits(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each token, and its gradient by the logits (n, V'), in their type."""
    logs, tanh = _log_probabilities(logits, vocab_size, softcap)
    index = targets.unsqueeze(1)
    losses = -logs.gather(1, index).squeeze(1)
    if torch.compiler.is_compiling():  # one kernel; for a scatter the chunk is written in float32
        is_target = torch.arange(logs.shape[1], device=logs.device) == index
        dlogits = logs.exp() - is_target.to(logs.dtype)
    else:
        dlogits = logs.exp_()
        dlogits.scatter_add_(1, index, dlogits.new_full(index.shape, -1.0))
    if tanh is not None:  # the derivative of cap tanh(l / cap) by l
        dlogits *= 1 - tanh.square_()
    return losses, dlogits.to(logits.dtype)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)
