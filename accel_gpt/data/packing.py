"""Examples, each a prompt and its completion, packed whole into sequences as they are read.

A shard of a split with `completions` holds -1 - id for a token `id` of a prompt, which is read but
is no target; an example ends with end-of-text. In one pass over a shard (next fit), a sequence
begins with an example and takes those that follow as long as they fit whole; the rest is padding.
An example that is longer than a sequence loses its end, and is left out where nothing of its
completion remains.

Shapes: N sequences, L tokens of each, block_size + 1.
"""

import functools
import sys

import numpy as np

from accel_gpt.data.shards import Ints, Split, Tokens, token_ids
from accel_gpt.errors import DataError
from accel_gpt.launcher import is_main


@functools.lru_cache(maxsize=8)
def example_starts(split: Split, length: int) -> tuple[Ints, ...]:
    """Of each shard, where the sequences of `length` tokens begin. Reads all of them.

    Raises `DataError` where no sequence has a target.
    """
    found, cut = [], False  # whether an example goes on in the next shard, where it is left out
    lost = 0
    for number, tokens in enumerate(split.lengths.tolist()):
        stored = split.read(number, 0, tokens)
        ids = token_ids(stored)
        begins = np.append(0, np.flatnonzero(ids == split.eot_id) + 1)
        ends = np.append(begins[1:], tokens)
        first, rows = int(cut), list[int]()
        while first < len(begins) and begins[first] < tokens:
            rows.append(int(begins[first]))
            fitting = np.searchsorted(ends, begins[first] + length, side="right")
            first = max(first + 1, int(fitting))
        begin = np.array(rows, np.int64)
        targets = np.append(0, np.cumsum(stored >= 0))  # up to each token
        trained = targets[np.minimum(begin + length, tokens)] > targets[begin + 1]
        found.append(begin[trained])
        lost += len(begin) - len(found[-1])
        cut = bool(begins[-1] < tokens)
    what = f"the {split.name} split of {split.folder} has {lost:,} examples whose prompt alone is "
    what += f"longer than model.block_size, {length - 1:,}"
    if lost and not any(map(len, found)):
        raise DataError(f"{what}, and no other; raise it")
    if lost and is_main():
        sys.stderr.write(f"WARNING: {what}; they are left out\n")
    return tuple(found)


def whole_examples(rows: Tokens, split: Split) -> Tokens:
    """`rows` (N, L) with padding in place of the example that does not end in its row, unless it is
    the only one there. Of a split without `completions` they stay as they are.
    """
    if not split.completions or split.eot_id is None:
        return rows
    ends = rows == split.eot_id  # not the padding, which is no target
    last = rows.shape[1] - 1 - ends[:, ::-1].argmax(axis=1)
    after = np.arange(rows.shape[1]) > last[:, None]
    return np.where(after & ends.any(axis=1, keepdims=True), ~split.eot_id, rows)
