"""The output head, and the loss of next-token prediction.

If the logits are large, they are computed for a chunk of tokens at a time, with their gradients.
The logits of a chunk are freed before the next chunk. The backward pass only scales the gradients.
This is fused linear cross entropy, as in Liger kernel (Hsu et al. 2024, section 3.2).

For autograd and for a compiled model, all chunks together are one operation. In a compiled model,
the function from logits to losses and gradients is compiled separately, once for all chunks.

Shapes: B batch, T tokens, N tokens of a batch, n tokens of a chunk, C channels, V vocabulary, V'
rows of the head, including the padding.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import chunk_tokens, padded_vocab_size

IGNORE = -100
"""Targets with this value do not count in the loss, as in PyTorch and transformers."""


class Head(nn.Linear):
    """Project onto the vocabulary, cut the padded rows and apply the soft cap."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config.n_embd, padded_vocab_size(vocab_size), bias=False)
        self.vocab_size = vocab_size
        self.softcap = config.logit_softcap

    def forward(
        self, x: Tensor, targets: Tensor | None = None, per_sequence: bool = False
    ) -> Tensor:
        """Compute the logits (B, T, V) of `x` (B, T, C), or their loss in nats.

        With `targets` (B, T) the result is the mean loss (); with `per_sequence` as well, it is
        the summed loss of each sequence (B,). The loss is computed in chunks if the logits exceed
        one chunk. A loss per sequence that needs gradients is never computed in chunks.
        """
        if targets is None:
            return self.logits(x)
        n_tokens = x[..., 0].numel()
        one_chunk = n_tokens <= chunk_tokens(len(self.weight), x.device.type == "cpu")
        if per_sequence:
            if one_chunk or torch.is_grad_enabled():
                return sequence_losses(self.logits(x), targets)
            return chunked_sequence_losses(
                x=x,
                weight=self.weight,
                targets=targets,
                vocab_size=self.vocab_size,
                softcap=self.softcap,
            )
        if one_chunk:
            return next_token_loss(self.logits(x), targets)
        return chunked_next_token_loss(
            x=x,
            weight=self.weight,
            targets=targets,
            vocab_size=self.vocab_size,
            softcap=self.softcap,
        )

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits (B, T, V) over the real vocabulary."""
        logits = super().forward(x)[..., : self.vocab_size]
        if self.softcap is not None:  # Gemma 2 technical report 2024, section 2
            logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross entropy (), in nats and float32, over the targets that count.

    `logits` is (B, T, V) over the real vocabulary; `targets` is (B, T). The loss is 0 if all
    targets are `IGNORE`.
    """
    flat = logits.flatten(0, -2).float()  # (N, V)
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / _count(targets)


def sequence_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the summed cross entropy of each sequence (B,), in nats and float32."""
    flat = logits.flatten(0, -2).float()  # (N, V)
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets).sum(-1)


def _count(targets: Tensor) -> Tensor:
    """Count the targets that are not `IGNORE`: (), at least 1."""
    return (targets != IGNORE).sum().clamp(min=1)


# --------------------------------------------------------------------------- chunk by chunk


def chunked_next_token_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """Compute the `next_token_loss` of `x` (B, T, C) without holding all its logits."""
    total: Tensor
    total, _, _ = _loss_and_gradients(
        x=x.flatten(0, -2),
        weight=weight,
        targets=targets.flatten(),
        vocab_size=vocab_size,
        softcap=softcap or 0.0,
        dtype=_product_dtype(x),
        compiled=torch.compiler.is_compiling(),
    )
    return total / _count(targets)


def chunked_sequence_losses(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """Compute the `sequence_losses` of `x` (B, T, C) in chunks, without gradients."""
    losses: Tensor = _token_losses(
        x=x.flatten(0, -2),
        weight=weight,
        targets=targets.flatten(),
        vocab_size=vocab_size,
        softcap=softcap or 0.0,
        dtype=_product_dtype(x),
        compiled=torch.compiler.is_compiling(),
    )
    return losses.view_as(targets).sum(-1)


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with `x`: the dtype of autocast, if it is enabled."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


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
    """Compute the summed loss () of `x` (N, C), and the gradients of `x` and `weight` (V', C).

    `softcap` 0.0 means no cap.
    """
    total, dx, dw = _empty_results(x, weight)
    total.zero_()
    dw.zero_()
    losses_and_dlogits = _compile(_losses_and_dlogits) if compiled else _losses_and_dlogits
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(dtype)
        for chunk in _chunks(x=x, targets=targets, head_rows=len(weight), dtype=dtype):
            losses, dlogits = losses_and_dlogits(
                logits=chunk.inputs @ table.T,  # (n, V'), freed at the return
                targets=chunk.ids,
                vocab_size=vocab_size,
                softcap=softcap,
            )
            total += (losses * chunk.valid.squeeze(1)).sum()
            dx[chunk.tokens] = (dlogits @ table) * chunk.valid
            inputs = chunk.inputs * chunk.valid
            if dw.dtype == dtype:
                dw.addmm_(dlogits.T, inputs)
            elif dtype == torch.float16:
                scale = _fp16_scale(inputs)
                dw.addcmul_(dlogits.T @ (inputs / scale), scale)
            else:
                dw += dlogits.T @ inputs
            del dlogits  # frees the memory before the next chunk
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
    """Compute the loss of each token of `x` (N, C): (N,)."""
    losses_of = _compile(_losses) if compiled else _losses
    losses = []
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(dtype)
        for chunk in _chunks(x=x, targets=targets, head_rows=len(weight), dtype=dtype):
            chunk_losses = losses_of(
                logits=chunk.inputs @ table.T,  # (n, V'), freed at the return
                targets=chunk.ids,
                vocab_size=vocab_size,
                softcap=softcap,
            )
            losses.append(chunk_losses * chunk.valid.squeeze(1))
    return torch.cat(losses)


@_loss_and_gradients.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(x, weight)


@_token_losses.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), dtype=torch.promote_types(weight.dtype, torch.float32))


def _save_gradients(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, dx, dw = output
    ctx.save_for_backward(dx, dw)
    _, weight, *_ = inputs
    ctx.weight_dtype = weight.dtype


def _scale_gradients(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of `_loss_and_gradients`, from the gradient of the loss."""
    dx, dw = ctx.saved_tensors
    dx = grad_output * dx
    dw = (grad_output * dw).to(ctx.weight_dtype)
    return dx, dw, None, None, None, None, None


_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _empty_results(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the loss () and the gradients of `x` and `weight`.

    The loss and the gradient of `weight` are sums over chunks, so they are at least float32.
    """
    sum_dtype = torch.promote_types(weight.dtype, torch.float32)
    total = x.new_empty((), dtype=sum_dtype)
    dx = torch.empty_like(x)
    dw = torch.empty_like(weight, dtype=sum_dtype)
    return total, dx, dw


@dataclass(frozen=True)
class Chunk:
    """Hold the inputs and targets of consecutive tokens."""

    tokens: slice  # of the N tokens
    inputs: Tensor  # (n, C)
    valid: Tensor  # (n, 1), 1 where the target counts, else 0
    ids: Tensor  # (n,) targets, 0 where a target does not count


def _chunks(x: Tensor, targets: Tensor, head_rows: int, dtype: torch.dtype) -> Iterator[Chunk]:
    """Yield the chunks of `x` (N, C) and `targets` (N,) for a head of `head_rows` rows."""
    size = chunk_tokens(head_rows, x.device.type == "cpu")
    for start in range(0, len(x), size):
        chunk = slice(start, start + size)
        valid = targets[chunk] != IGNORE
        yield Chunk(
            tokens=chunk,
            inputs=x[chunk].to(dtype),
            valid=valid.unsqueeze(1).to(dtype),
            ids=targets[chunk] * valid,
        )


def _fp16_scale(inputs: Tensor) -> Tensor:
    """Compute a divisor () of `inputs` (n, C), at least 1, that prevents an overflow in float16.

    The gradient of the weight sums the products of inputs and dlogits over n tokens. A dlogit is at
    most 1 in size, so divided inputs keep the sums below 2^15. The loss scaler cannot prevent this
    overflow: the backward pass applies its scale after these sums.
    """
    largest = inputs.abs().amax().float()
    return (len(inputs) / 2**15 * largest).clamp(min=1.0)


def _log_probabilities(
    logits: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probabilities (n, V') of `logits` (n, V'), -inf for the padding.

    With a soft cap, also returns tanh(logit / cap) (n, V'). Overwrites `logits` if it is float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tanh = None
    if softcap:
        tanh = logits.div_(softcap).tanh_()
        logits = tanh * softcap
    logits[:, vocab_size:] = float("-inf")
    return logits.log_softmax(-1), tanh


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Compute the cross entropy of each token (n,) from its logits (n, V')."""
    log_probabilities, _ = _log_probabilities(logits, vocab_size, softcap)
    return -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)


def _losses_and_dlogits(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each token (n,), and the gradient of the logits (n, V').

    The gradient has the dtype of `logits`.
    """
    log_probabilities, tanh = _log_probabilities(logits, vocab_size, softcap)
    index = targets.unsqueeze(1)  # (n, 1)
    losses = -log_probabilities.gather(1, index).squeeze(1)
    # the gradient of cross entropy: probabilities minus 1 at the target
    if torch.compiler.is_compiling():  # fuses to one kernel; a scatter would write float32 first
        columns = torch.arange(log_probabilities.shape[1], device=log_probabilities.device)
        is_target = columns == index
        dlogits = log_probabilities.exp() - is_target.to(log_probabilities.dtype)
    else:
        dlogits = log_probabilities.exp_()
        dlogits.scatter_add_(1, index, dlogits.new_full(index.shape, -1.0))
    if tanh is not None:  # the derivative of cap tanh(l / cap) with respect to l
        dlogits *= 1 - tanh.square_()
    return losses, dlogits.to(logits.dtype)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)
