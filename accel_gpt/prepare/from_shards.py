"""Shards of any place that we can read, as a stream to be written into a folder of ours."""

from collections.abc import Iterator

import numpy as np

from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.data.shards import Split, Tokens, token_dtype
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError
from accel_gpt.prepare.workers import Encoded
from accel_gpt.text.documents import Position

SPLITS = ("train", "val")
CHUNK_TOKENS = 1 << 20  # copied at once
AHEAD = 2  # shards of a remote place that are kept: the one read and the next


def open_source(config: PrepareConfig, split: str) -> tuple[Split, Tokenizer]:
    """A split of the place that `config.path` names, and its tokenizer."""
    from accel_gpt.data.sources import open_data

    assert config.path is not None
    return open_data(config.path, split, DataConfig(train=config.path, tokenizer=config.tokenizer))


def describe_place(config: PrepareConfig) -> str:
    """Fingerprint of the tokens of both splits."""
    return " ".join(open_source(config, split)[0].fingerprint for split in SPLITS)


def place_tokenizer(config: PrepareConfig) -> Tokenizer:
    """The tokenizer that made the tokens."""
    return open_source(config, SPLITS[0])[1]


def copied(config: PrepareConfig, start: Position) -> Iterator[Encoded]:
    """The tokens in chunks, from (split, shard, token) on.

    Raises `DataError` for an id that the tokenizer does not have.
    """
    for number in range(start[0], len(SPLITS)):
        split, tokenizer = open_source(config, SPLITS[number])
        sizes = np.nan_to_num(tokenizer.bytes_within(split))  # 0: nobody knows
        dtype = token_dtype(tokenizer.vocab_size)
        begins = start if start[0] == number else (number, 0, 0)
        eot_id = -1 if tokenizer.eot_id is None else tokenizer.eot_id
        leads = split.read(0, 0, 1)[0] == eot_id  # end-of-text begins documents, as in llm.c
        before = token_before(split, begins)
        for shard, offset, tokens in chunks(split, begins, config.shard_tokens):
            if int(tokens.max()) >= tokenizer.vocab_size:
                raise DataError(
                    f"{split.folder / split.shards[shard].name} holds token {tokens.max()}, "
                    f"expected less than {tokenizer.vocab_size}, the vocabulary of its tokenizer; "
                    "give the right one as data.prepare.tokenizer"
                )
            marks = (
                tokens
                if leads
                else np.concatenate([[eot_id if before is None else before], tokens[:-1]])
            )
            documents = int(np.count_nonzero(marks == eot_id))
            before = int(tokens[-1])
            after = (number, shard, offset + len(tokens))
            size = int(sizes[tokens].sum())
            yield Encoded(SPLITS[number], tokens.astype(dtype), documents, size, after)


def token_before(split: Split, begins: Position) -> int | None:
    """The token right before a place; None at the start of a split."""
    _, shard, offset = begins
    if offset == 0:
        if shard == 0:
            return None
        shard, offset = shard - 1, split.shards[shard - 1].tokens
    return int(split.read(shard, offset - 1, 1)[0])


def chunks(split: Split, begins: Position, shard_tokens: int) -> Iterator[tuple[int, int, Tokens]]:
    """(shard, offset, tokens), cut also where a shard of `shard_tokens` will be full."""
    _, first, offset = begins
    for shard in range(first, len(split.shards)):
        split.prefetch([shard], range(shard + 1, min(shard + AHEAD, len(split.shards))))
        done = int(split.lengths[:shard].sum())
        while offset < split.lengths[shard]:
            room = shard_tokens - (done + offset) % shard_tokens
            length = min(int(split.lengths[shard]) - offset, room, CHUNK_TOKENS)
            yield shard, offset, split.read(shard, offset, length)
            offset += length
        offset = 0
