"""Open the token ids that `shards(folder, split)` in the file of --code returns.

The arrays may be `numpy.memmap`: only what is trained on is read. Their tokenizer is
`data.tokenizer`, or the tokenizer.json in the folder.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from accel_gpt.data.foreign import DataFolder, foreign_tokenizer, split_without_index
from accel_gpt.data.shards import BLOCK, BLOCKS, Shard, Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.own_code import place_of


def open_own_shards(
    function: Callable[..., Any], folder: DataFolder, split: str, tokenizer: str | None
) -> tuple[Split, Tokenizer]:
    """Call `function` for a split; return the split and its tokenizer.

    Raises `UserError` unless it returns one-dimensional arrays of whole numbers, with at least one
    token.
    """
    place = place_of(function)
    arrays = token_arrays(function(folder.path, split))
    require(
        bool(arrays),
        f"{place} returned no token ids for the {split} split of {folder.path}; return a list of "
        "one-dimensional arrays of whole numbers, for train and for val",
    )
    dtype = np.result_type(*arrays)
    if dtype.kind not in "ui":  # the common type of int64 and uint64 is float64
        dtype = np.dtype(np.int64)
    names = [f"array {number} of {place}" for number in range(len(arrays))]
    made_by = foreign_tokenizer(folder, [None], tokenizer)
    content = [[len(array), sampled_tokens(array)] for array in arrays]
    opened = split_without_index(
        folder=folder.path,
        name=split,
        shards=[Shard(name, len(one)) for name, one in zip(names, arrays, strict=True)],
        dtype=dtype,
        tokenizer=made_by,
        content=content,
    )
    return replace(opened, arrays=tuple(arrays)), made_by


def token_arrays(returned: Any) -> list[Tokens]:
    """Return the arrays that are not empty; none if one of them holds no token ids."""
    try:
        arrays: list[Tokens] = [np.asanyarray(value) for value in returned]
    except (TypeError, ValueError):  # not a list of arrays; lists of several lengths
        return []
    if not all(array.ndim == 1 for array in arrays):
        return []
    arrays = [array for array in arrays if len(array)]
    return arrays if all(array.dtype.kind in "ui" for array in arrays) else []


def sampled_tokens(array: Tokens) -> str:
    """Return the SHA-256 (hex) of a few blocks: the first, the last, and some between."""
    hasher = hashlib.sha256()
    last = max(len(array) - BLOCK, 0)
    for i in range(BLOCKS):
        start = last * i // (BLOCKS - 1)
        hasher.update(array[start : start + BLOCK].astype("<i8").tobytes())
    return hasher.hexdigest()
