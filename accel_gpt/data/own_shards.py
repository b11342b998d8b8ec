"""Open the token ids that `shards(folder, split)` in the file of --code returns.

The arrays may be `numpy.memmap`: only what is trained on is read. Their tokenizer is
`data.tokenizer`, or the tokenizer.json in the folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accel_gpt.data.foreign import BLOCK, BLOCKS, DataFolder, TokenFile, foreign_tokenizer
from accel_gpt.data.shards import NoSplit, Shard, Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError


def open_own_shards(
    function: Callable[..., Any], folder: DataFolder, split: str, tokenizer: str | None
) -> tuple[Split, Tokenizer]:
    """Call `function` for a split; return the split and its tokenizer.

    Raises `DataError` unless it returns one-dimensional arrays of whole numbers, with at least one
    token.
    """
    returned = function(folder.path, split)
    if not isinstance(returned, list | tuple):
        raise DataError(
            f"shards() returned {type(returned).__name__} for the {split} split; return a list of "
            "arrays of token ids"
        )
    arrays = [np.asanyarray(array) for array in returned]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise DataError(
                f"array {number} that shards() returned for the {split} split holds {array.dtype} "
                f"of shape {array.shape}; return one-dimensional arrays of token ids"
            )
    arrays = [array for array in arrays if len(array)]
    if not arrays:
        raise NoSplit(
            f"shards() returned no tokens for the {split} split of {folder.path}; return arrays "
            "for train and for val"
        )
    dtype = np.result_type(*arrays)
    names = [f"array {number}" for number in range(len(arrays))]
    made_by = foreign_tokenizer(folder, [TokenFile(names[0], "own", dtype, 0)], tokenizer)
    content = [
        [len(array), hashlib.sha256(b"".join(sampled_tokens(array))).hexdigest()]
        for array in arrays
    ]
    identity = json.dumps([made_by.fingerprint, content])
    opened = Split(
        folder=folder.path,
        name=split,
        shards=tuple(Shard(name, len(one)) for name, one in zip(names, arrays, strict=True)),
        dtype=dtype,
        vocab_size=made_by.vocab_size,
        eot_id=made_by.eot_id,
        tokenizer_kind=made_by.kind,
        tokenizer_fingerprint=made_by.fingerprint,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        arrays=tuple(arrays),
    )
    return opened, made_by


def sampled_tokens(array: Tokens) -> Iterator[bytes]:
    """Yield a few blocks of an array: the first, the last, and some between."""
    last = max(len(array) - BLOCK, 0)
    for i in range(BLOCKS):
        start = last * i // (BLOCKS - 1)
        yield array[start : start + BLOCK].astype("<i8").tobytes()
