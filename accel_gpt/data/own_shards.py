"""Open the token ids that `shards(folder, split)` in the file of --code returns.

The arrays may be `numpy.memmap`: only what is trained on is read. Their tokenizer is
`data.tokenizer`, or the tokenizer.json in the folder.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from accel_gpt.data.foreign import (
    DataFolder,
    TokenFile,
    foreign_tokenizer,
    split_without_index,
)
from accel_gpt.data.shards import BLOCK, BLOCKS, Shard, Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.own_code import place_of

ARRAYS = "return one-dimensional arrays of token ids, which are whole numbers"


def open_own_shards(
    function: Callable[..., Any], folder: DataFolder, split: str, tokenizer: str | None
) -> tuple[Split, Tokenizer]:
    """Call `function` for a split; return the split and its tokenizer.

    Raises `UserError` unless it returns one-dimensional arrays of whole numbers, with at least one
    token.
    """
    place = place_of(function)
    returned = function(folder.path, split)
    require(
        isinstance(returned, list | tuple),
        f"{place} returned {type(returned).__name__} for the {split} split; return a list of "
        "arrays of token ids",
    )
    arrays = [
        checked_array(array, f"{place} returned for the {split} split, as array {number},")
        for number, array in enumerate(returned)
    ]
    arrays = [array for array in arrays if len(array)]
    require(
        bool(arrays),
        f"{place} returned no tokens for the {split} split of {folder.path}; return arrays for "
        "train and for val",
    )
    dtype = np.result_type(*arrays)
    if dtype.kind not in "ui":  # the common type of int64 and uint64 is float64
        dtype = np.dtype(np.int64)
    names = [f"array {number} of {place}" for number in range(len(arrays))]
    made_by = foreign_tokenizer(folder, [TokenFile(names[0], "own", dtype, 0)], tokenizer)
    content = [
        [len(array), hashlib.sha256(b"".join(sampled_tokens(array))).hexdigest()]
        for array in arrays
    ]
    opened = split_without_index(
        folder=folder.path,
        name=split,
        shards=[Shard(name, len(one)) for name, one in zip(names, arrays, strict=True)],
        dtype=dtype,
        tokenizer=made_by,
        content=content,
    )
    return replace(opened, arrays=tuple(arrays)), made_by


def checked_array(value: Any, returned: str) -> Tokens:
    """Return an array of token ids; raise `UserError` unless it is one, after `returned`."""
    try:
        array: Tokens = np.asanyarray(value)
    except ValueError:  # lists of several lengths
        raise UserError(f"{returned} a list of lists; {ARRAYS}") from None
    require(
        array.ndim == 1 and (array.dtype.kind in "ui" or not len(array)),
        f"{returned} {array.dtype} of shape {array.shape}; {ARRAYS}",
    )
    return array


def sampled_tokens(array: Tokens) -> Iterator[bytes]:
    """Yield a few blocks of an array: the first, the last, and some between."""
    last = max(len(array) - BLOCK, 0)
    for i in range(BLOCKS):
        start = last * i // (BLOCKS - 1)
        yield array[start : start + BLOCK].astype("<i8").tobytes()
