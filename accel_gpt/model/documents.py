"""Separate the documents within a sequence: targets, positions and attention masks.

A document is a run of tokens that ends with the end-of-text token. A sequence may begin and end in
the middle of a document. Nothing here waits for the device.

Shapes: B batch, T tokens, H query heads, K key and value heads, D head size.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_gpt.model.loss import IGNORE

# imported by the functions that need it: from torch 2.14 on it imports sympy, which takes 0.7 s
if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MIN_FLEX_HEAD_SIZE = 16
"""Channels of the smallest head that Triton's `tl.dot` supports, and so FlexAttention on CUDA."""


def separate(tokens: Tensor, targets: Tensor, eot_id: int) -> tuple[Tensor, Tensor]:
    """Ignore the targets that lie in the next document, and number the documents.

    Returns the targets and the document number of each token, both (B, T). Document numbers are
    int32 and start at 0 in each sequence.
    """
    is_end = tokens == eot_id
    ends_so_far = is_end.cumsum(-1, dtype=torch.int32)
    documents = ends_so_far - is_end.int()  # an end belongs to the document that it ends
    targets = targets.masked_fill(is_end, IGNORE)
    return targets, documents


def positions(documents: Tensor) -> Tensor:
    """Compute the position of each token in its document, (B, T) int64, from 0."""
    index = torch.arange(documents.shape[-1], device=documents.device)  # (T,)
    # `roll` compares token 0 with the last token; the result does not matter, as its index is 0
    follows_its_document = documents == documents.roll(1, -1)
    starts = index.masked_fill(follows_its_document, 0)  # (B, T)
    return index - starts.cummax(-1).values


def attention_mask(documents: Tensor, head_size: int, dropout: float) -> "Tensor | BlockMask":
    """Build the mask in which a token sees itself and the earlier tokens of its document.

    On CUDA this is a block mask for FlexAttention. FlexAttention supports neither dropout nor heads
    smaller than `MIN_FLEX_HEAD_SIZE`. For these, and on other devices, this is a dense mask.
    """
    flex_works = documents.is_cuda and dropout == 0 and head_size >= MIN_FLEX_HEAD_SIZE
    if flex_works:
        return block_mask(documents)
    return dense_mask(documents)


def dense_mask(documents: Tensor) -> Tensor:
    """Build the mask for `scaled_dot_product_attention`: (B, 1, T, T) bool, true where visible."""
    index = torch.arange(documents.shape[1], device=documents.device)
    same_document = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
    return same_document & (index <= index[:, None])


def block_mask(documents: Tensor) -> "BlockMask":
    """Build the FlexAttention mask for `attend`."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, T = documents.shape

    def is_visible(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = documents[sequence, query] == documents[sequence, key]
        return (key <= query) & same_document

    return create_block_mask(
        is_visible,
        B=B,
        H=None,  # the same for all heads
        Q_LEN=T,
        KV_LEN=T,
        device=documents.device,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask") -> Tensor:
    """Compute FlexAttention of `q` (B, H, T, D) to `k` and `v` (B, K, T, D): (B, H, T, D).

    Outside a compiled model, the kernel is compiled separately, once for each shape.
    """
    if torch.compiler.is_compiling():
        return _flex_attention(q, k, v, mask)
    return _compiled_flex_attention()(q, k, v, mask)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask") -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    return out


@functools.cache
def _compiled_flex_attention() -> "Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]":
    # with fullgraph, too many shapes raise an error instead of falling back to a slow kernel
    return torch.compile(_flex_attention, dynamic=False, fullgraph=True)
