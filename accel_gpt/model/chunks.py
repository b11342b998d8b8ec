"""Head and loss together, a chunk of tokens at a time, where all logits would fill the memory.

The gradients of a chunk are computed while its logits are there and the backward pass only scales
them (the scheme of Liger kernel, Hsu et al. 2024, section 3.2): no logits outlive their chunk. To
autograd, and to a compiled model, all chunks together are one operation. In a compiled model what
turns logits into losses and slopes is compiled by itself, once for all chunks.

Shapes: N tokens, n of them in a chunk, C channels, V' rows of the head, those that pad it included.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel_gpt.cost.flops import chunk_tokens
from accel_gpt.model.loss import IGNORE


def fits_at_once(x: Tensor, weight: Tensor) -> bool:
    """Whether the logits of `x` (B, T, C) by `weight` (V', C) are no more than a chunk's."""
    return x[..., 0].numel() <= chunk_tokens(len(weight), x.device.type == "cpu")


def chunked_next_token_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """`loss.next_token_loss` of the logits of `x` (B, T, C), which are never held together."""
    total: Tensor = _loss_and_gradients(*_flat(x, weight, targets, vocab_size, softcap))[0]
    return total / (targets != IGNORE).sum().clamp(min=1)


def chunked_row_losses(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """`loss.row_losses` of the logits of `x` (B, T, C), without gradients."""
    losses: Tensor = _token_losses(*_flat(x, weight, targets, vocab_size, softcap))
    return losses.view_as(targets).sum(-1)


def _flat(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, int, float, torch.dtype, bool]:
    """Arguments of the operations; the products are computed in the type of `autocast`."""
    product, kind = x.dtype, x.device.type
    if torch.is_autocast_enabled(kind):
        product = torch.get_autocast_dtype(kind)
    compiled = torch.compiler.is_compiling()
    flat = x.flatten(0, -2), weight, targets.flatten()
    return *flat, vocab_size, softcap or 0.0, product, compiled


@torch.library.custom_op("accel_gpt::loss_and_gradients", mutates_args=())
def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    product: torch.dtype,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss () of `x` (N, C) and its gradients by `x` and by `weight` (V', C)."""
    total, dx, dw = _outputs(x, weight)
    total.zero_()
    dw.zero_()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(product)
        for part, inputs, real, aims in _chunks(x, targets, len(weight), product):
            losses, slopes = _slopes(compiled)(inputs @ table.T, aims, vocab_size, softcap)
            total += (losses * real.squeeze(1)).sum()
            dx[part] = (slopes @ table) * real
            counted = inputs * real
            if dw.dtype == product:
                dw.addmm_(slopes.T, counted)
            elif product == torch.float16:
                scale = _fp16_scale(counted)
                dw.addcmul_(slopes.T @ (counted / scale), scale)
            else:
                dw += slopes.T @ counted
            del slopes  # or it is held beside the next chunk's
    return total, dx, dw


@torch.library.custom_op("accel_gpt::token_losses", mutates_args=())
def _token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    product: torch.dtype,
    compiled: bool,
) -> Tensor:
    """The loss of each token (N,)."""
    found = []
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        table = weight.to(product)
        for _, inputs, real, aims in _chunks(x, targets, len(weight), product):
            losses = _losses(compiled)(inputs @ table.T, aims, vocab_size, softcap)
            found.append(losses * real.squeeze(1))
    return torch.cat(found)


@_loss_and_gradients.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, weight)


@_token_losses.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), dtype=_wide(weight))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype


def _backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = ctx.saved_tensors
    return by_loss * dx, (by_loss * dw).to(ctx.weight_dtype), *[None] * 5


_loss_and_gradients.register_autograd(_backward, setup_context=_save)


def _wide(weight: Tensor) -> torch.dtype:
    """At least float32, in which losses are computed and gradients summed."""
    return torch.promote_types(weight.dtype, torch.float32)


def _fp16_scale(inputs: Tensor) -> Tensor:
    """The divisor () of `inputs` (n, C), 1 or more, with which their sums over n, weighted by
    slopes of at most 1, stay below 2^15 and do not overflow float16. The loss scaler cannot prevent
    that: its scale is applied in the backward pass, after these sums.
    """
    return (len(inputs) / 2**15 * inputs.abs().amax().float()).clamp(min=1.0)


def _outputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(weight)
    return x.new_empty((), dtype=wide), torch.empty_like(x), torch.empty_like(weight, dtype=wide)


def _chunks(
    x: Tensor, targets: Tensor, rows: int, product: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Of each chunk its place, its inputs (n, C), 1 where a target counts (n, 1), targets (n,)."""
    size = chunk_tokens(rows, x.device.type == "cpu")
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        real = targets[part] != IGNORE
        yield part, x[part].to(product), real.unsqueeze(1).to(product), targets[part] * real


def _log_probabilities(
    logits: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Of the real vocabulary (n, V'), -inf for the rest, and how far each logit is from its cap."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bent = logits.div_(softcap).tanh_() if softcap else None
    if bent is not None:
        logits = bent * softcap
    logits[:, vocab_size:] = float("-inf")
    return logits.log_softmax(-1), bent


def _losses_of(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Cross entropy of each token (n,) by its logits (n, V')."""
    logs, _ = _log_probabilities(logits, vocab_size, softcap)
    return -logs.gather(1, targets.unsqueeze(1)).squeeze(1)


def _slopes_of(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """The same, and its gradient by the logits (n, V'), in their type."""
    logs, bent = _log_probabilities(logits, vocab_size, softcap)
    places = targets.unsqueeze(1)
    losses = -logs.gather(1, places).squeeze(1)
    slopes = logs.exp_()
    slopes.scatter_add_(1, places, slopes.new_full(places.shape, -1.0))
    if bent is not None:  # the derivative of cap tanh(l / cap) by l
        slopes *= 1 - bent.square_()
    return losses, slopes.to(logits.dtype)


def _losses(compiled: bool) -> Callable[..., Tensor]:
    return _compiled(_losses_of) if compiled else _losses_of


def _slopes(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    return _compiled(_slopes_of) if compiled else _slopes_of


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)
