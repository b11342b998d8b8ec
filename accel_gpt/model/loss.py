"""The output head, and the loss of next-token prediction.

If the logits are large, they are computed for a chunk of tokens at a time, with their gradients.
The logits of a chunk are freed before the next chunk. The backward pass only scales the gradients.
This is fused linear cross entropy, as in Liger kernel (Hsu et al. 2024, section 3.2).

For autograd and for a compiled model, all chunks together are one operation. In a compiled model,
the function from logits to losses and gradients is compiled separately, once for all chunks. It is
one kernel, and the gradients overwrite the logits.

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
from accel_gpt.model.sizes import WHOLE_LOGITS, chunk_tokens, logit_work_bytes, padded_vocab_size

IGNORE = -100
"""Targets with this value do not count in the loss, as in PyTorch and transformers."""

OTHER_DEVICE_BYTES = 16e9
"""Memory of a device that is neither a CPU nor a CUDA device; assumption."""


class Head(nn.Linear):
    """Project onto the vocabulary, cut the padded rows and apply the soft cap."""

    is_head = True  # for `optim.head_lr`

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config.n_embd, padded_vocab_size(vocab_size), bias=False)
        self.vocab_size = vocab_size
        self.softcap = config.logit_softcap

    def forward(
        self, x: Tensor, targets: Tensor | None = None, per_sequence: bool = False
    ) -> Tensor:
        """Compute the logits (B, T, V) of `x` (B, T, C), or their loss in nats.

        With `targets` (B, T) the result is the mean loss (); with `per_sequence` as well, it is
        the summed loss of each sequence (B,). The loss is computed in chunks if there are more than
        `WHOLE_LOGITS` logits. A loss per sequence that needs gradients is never computed in chunks.
        """
        if targets is None:
            return self.logits(x)
        whole = targets.numel() * len(self.weight) <= WHOLE_LOGITS
        if whole or (per_sequence and torch.is_grad_enabled()):
            loss_of = sequence_losses if per_sequence else next_token_loss
            return loss_of(self.logits(x), targets)
        return chunked_loss(
            x=x,
            weight=self.weight,
            targets=targets,
            vocab_size=self.vocab_size,
            softcap=self.softcap,
            per_sequence=per_sequence,
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


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float | None,
    per_sequence: bool = False,
) -> Tensor:
    """Compute the `next_token_loss` of `x` (B, T, C) without holding all its logits.

    With `per_sequence`, computes the `sequence_losses`, without gradients.
    """
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x = x.to(dtype)  # here, so that the gradient of `x` has this dtype, too
    function = _token_losses if per_sequence else _loss_and_gradients
    result = function(
        x=x.flatten(0, -2),
        weight=weight,
        targets=targets.flatten(),
        vocab_size=vocab_size,
        softcap=softcap or 0.0,
        compiled=torch.compiler.is_compiling(),
    )
    if per_sequence:
        losses: Tensor = result
        return losses.view_as(targets).sum(-1)
    total: Tensor = result[0]
    return total / _count(targets)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None if it is not enabled there."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


@torch.library.custom_op("accel_gpt::loss_and_gradients", mutates_args=())
def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the summed loss () of `x` (N, C), and the gradients of `x` and `weight` (V', C).

    Matrix products have the dtype of `x`. `softcap` 0.0 means no cap.
    """
    total, dx, dw = _empty_results(x, weight)
    total.zero_()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(x.dtype)
        size = _chunk_size(table, softcap, compiled)
        for chunk in _chunks(x, targets, size):
            logits = chunk.inputs @ table.T  # (n, V')
            if compiled:
                overwrite = _compile(_overwrite_with_dlogits)
                losses = overwrite(logits, chunk.ids, vocab_size, softcap)
                dlogits = logits
            else:
                losses, dlogits = _losses_and_dlogits(logits, chunk.ids, vocab_size, softcap)
            del logits  # frees the memory before the products
            total += (losses * chunk.valid.squeeze(1)).sum()
            dx[chunk.tokens] = (dlogits @ table) * chunk.valid
            add_product(dw, dlogits.T, chunk.inputs * chunk.valid, first=chunk.tokens.start == 0)
            del dlogits  # frees the memory before the next chunk
    return total, dx, dw


@torch.library.custom_op("accel_gpt::token_losses", mutates_args=())
def _token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    compiled: bool,
) -> Tensor:
    """Compute the loss of each token of `x` (N, C): (N,)."""
    losses_of = _compile(_losses) if compiled else _losses
    losses = []
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(x.dtype)
        size = _chunk_size(table, softcap, compiled)
        for chunk in _chunks(x, targets, size):
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
    # not `grad_output * dx`: it would first round grad_output to the dtype of dx
    wide = torch.promote_types(dx.dtype, torch.float32)
    dx = (grad_output * dx.to(wide)).to(dx.dtype)
    dw = (grad_output * dw).to(ctx.weight_dtype)
    return dx, dw, None, None, None, None


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


def _chunk_size(table: Tensor, softcap: float, compiled: bool) -> int:
    """Return the number of tokens in a chunk, for a head `table` (V', C)."""
    device = table.device
    device_bytes: float | None = OTHER_DEVICE_BYTES
    if device.type == "cpu":
        device_bytes = None
    elif device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    work_bytes = logit_work_bytes(table.element_size(), capped=softcap != 0, compiled=compiled)
    return chunk_tokens(len(table), work_bytes, device_bytes)


def _chunks(x: Tensor, targets: Tensor, size: int) -> Iterator[Chunk]:
    """Yield the chunks of `x` (N, C) and `targets` (N,), of `size` tokens."""
    for start in range(0, len(x), size):
        chunk = slice(start, start + size)
        valid = targets[chunk] != IGNORE
        yield Chunk(
            tokens=chunk,
            inputs=x[chunk],
            valid=valid.unsqueeze(1).to(x.dtype),
            ids=targets[chunk] * valid,
        )


# --------------------------------------------------------------------------- gradient of the head


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add the product of `left` (V', n) and `right` (n, C) to `total` (V', C).

    The first product overwrites `total`. `total` is float32 if the product is in half precision.
    Most GPUs then accumulate the product in float32 and add it without rounding. On other devices,
    the product is rounded to half precision first.
    """
    beta = 0 if first else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif adds_in_float32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        if first:
            total.zero_()
        if left.dtype == torch.float16:
            scale = _fp16_scale(right)
            total.addcmul_(left @ (right / scale), scale)
        else:
            total += left @ right


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of `dtype` can be added to a float32 tensor on a device.

    Tries it: it depends on the device, and PyTorch 2.13 has no function that tells.
    """
    matrix = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.full((16, 16), torch.nan, device=device)
    try:
        for beta in (0, 1):
            torch.addmm(total, matrix, matrix, out_dtype=total.dtype, beta=beta, out=total)
    except torch.OutOfMemoryError:  # in a trial of `micro_batch_size: auto`: says nothing
        raise
    except RuntimeError:  # includes NotImplementedError
        return False
    return bool((total == 2 * 16).all())


def _fp16_scale(inputs: Tensor) -> Tensor:
    """Compute a divisor () of `inputs` (n, C), at least 1, that prevents an overflow in float16.

    The gradient of the weight sums the products of inputs and dlogits over n tokens. A dlogit is at
    most 1 in size, so divided inputs keep the sums below 2^15. The loss scaler cannot prevent this
    overflow: the backward pass applies its scale after these sums.
    """
    largest = inputs.abs().amax().float()
    return (len(inputs) / 2**15 * largest).clamp(min=1.0)


# --------------------------------------------------------------------------- gradient of the logits


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
    dlogits = log_probabilities.exp_()
    dlogits.scatter_add_(1, index, dlogits.new_full(index.shape, -1.0))
    if tanh is not None:  # the derivative of cap tanh(l / cap) with respect to l
        dlogits *= 1 - tanh.square_()
    return losses, dlogits.to(logits.dtype)


def _overwrite_with_dlogits(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Tensor:
    """Overwrite logits (n, V') with their gradient; return the cross entropy of each token (n,).

    Computes what `_losses_and_dlogits` computes, in a form that torch.compile fuses to one kernel.
    To this end, nothing is read or written by index: the target is found by comparing columns.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tanh = None
    if softcap:
        tanh = (wide / softcap).tanh()
        wide = tanh * softcap
    columns = torch.arange(wide.shape[1], device=wide.device)
    wide = torch.where(columns < vocab_size, wide, float("-inf"))
    is_target = columns == targets.unsqueeze(1)  # (n, V')
    largest = wide.amax(-1, keepdim=True)
    log_total = largest + (wide - largest).exp().sum(-1, keepdim=True).log()  # (n, 1)
    losses = log_total.squeeze(1) - torch.where(is_target, wide, 0.0).sum(-1)
    dlogits = (wide - log_total).exp() - is_target.to(wide.dtype)
    if tanh is not None:
        dlogits = dlogits * (1 - tanh.square())
    logits.copy_(dlogits)
    return losses


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # not dynamic=False: each number of tokens would be compiled anew, and the ninth is an error
    return torch.compile(function, fullgraph=True)
