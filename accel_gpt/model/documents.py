"""Documents within a sequence: where each ends, and an attention mask that stops there.

A document is a run of tokens up to and including the end-of-text token; a sequence may begin and
end in the middle of one. Nothing here waits for the device.

Shapes: B batch, T tokens, H query heads, K key and value heads, D head size.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from accel_gpt.model.loss import IGNORE

MIN_FLEX_HEAD_SIZE = 16
"""Channels; the least that Triton's `tl.dot`, and so FlexAttention on CUDA, supports."""


def separate(tokens: Tensor, targets: Tensor, eot_id: int) -> tuple[Tensor, Tensor]:
    """Ignore the targets that lie in the next document; number the documents.

    Returns the targets and, for each token, the number of its document, int32, from 0 in each
    sequence. All are (B, T).
    """
    ends = tokens == eot_id
    documents = ends.cumsum(-1, dtype=torch.int32) - ends.int()
    return targets.masked_fill(ends, IGNORE), documents


def positions(documents: Tensor) -> Tensor:
    """Position of each token in its document, (B, T) int64, from 0."""
    index = torch.arange(documents.shape[-1], device=documents.device)
    starts = index.masked_fill(documents == documents.roll(1, -1), 0)
    return index - starts.cummax(-1).values


def attention_mask(documents: Tensor, head_size: int, dropout: float) -> Tensor | BlockMask:
    """The mask in which each token sees itself and those before it in its document.

    A block mask for FlexAttention on CUDA; a dense mask elsewhere, and where FlexAttention does not
    work: with dropout, and for heads smaller than `MIN_FLEX_HEAD_SIZE`.
    """
    flex = documents.is_cuda and not dropout and head_size >= MIN_FLEX_HEAD_SIZE
    return block_mask(documents) if flex else dense_mask(documents)


def dense_mask(documents: Tensor) -> Tensor:
    """The mask of `documents` (B, T) for `scaled_dot_product_attention`, (B, 1, T, T) bool."""
    B, T = documents.shape
    sequence = torch.arange(B, device=documents.device).view(B, 1, 1, 1)
    index = torch.arange(T, device=documents.device)
    return _visible(documents)(sequence, sequence, index.view(T, 1), index)


def block_mask(documents: Tensor) -> BlockMask:
    """The mask of `documents` (B, T) for `attend`, as blocks."""
    B, T = documents.shape
    return create_block_mask(_visible(documents), B, None, T, T, device=documents.device)


def _visible(documents: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[sequence, query] == documents[sequence, key])

    return visible


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention of `q` (B, H, T, D) to `k` and `v` (B, K, T, D), as (B, H, T, D).

    Outside of a compiled model the kernel is compiled by itself, once for each shape.
    """
    flex = _flex if torch.compiler.is_compiling() else _compiled_flex()
    return flex(q, k, v, mask)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@functools.cache
def _compiled_flex() -> Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]:
    # fullgraph: without it, too many shapes would end in a slow kernel and a warning
    return torch.compile(_flex, dynamic=False, fullgraph=True)
