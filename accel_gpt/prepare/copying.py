"""Token shards of any format that can be opened, as a stream to be written into a data folder."""

from collections.abc import Generator

import numpy as np

from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.data.shards import Split, token_dtype
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, require
from accel_gpt.prepare.workers import Encoded, Tokenized
from accel_gpt.text.documents import SPLITS, Position

CHUNK_TOKENS = 1 << 20  # copied at once
KEPT_SHARDS = 2  # shards behind a URL that are kept: the one being read and the next


def open_source(config: PrepareConfig, split: str) -> tuple[Split, Tokenizer]:
    """A split of the folder or URL `config.path`, and its tokenizer."""
    from accel_gpt.data.sources import open_data

    assert config.path is not None
    data = DataConfig(train=config.path, tokenizer=config.tokenizer)
    opened, tokenizer = open_data(config.path, split, data)
    require(
        not opened.completions,
        f"{config.path} holds prompts and completions, which are not copied; name it as data.train",
    )
    return opened, tokenizer


def copy_shards(config: PrepareConfig, start: Position) -> Generator[Tokenized, None, None]:
    """The tokens in chunks from `start` (split, shard, token) on.

    A chunk ends where a shard of `config.shard_tokens` will be full. Raises `DataError` for an id
    that the tokenizer does not have.
    """
    for number in range(start[0], len(SPLITS)):
        split, tokenizer = open_source(config, SPLITS[number])
        sizes = np.nan_to_num(tokenizer.bytes_within(split))  # 0 where it is unknown
        eot_id = -1 if tokenizer.eot_id is None else tokenizer.eot_id
        eot_leads = split.read(0, 0, 1)[0] == eot_id  # end-of-text begins a document, as in llm.c
        first, offset = start[1:] if start[0] == number else (0, 0)
        previous = token_before(split, first, offset, eot_id)
        for shard in range(first, len(split.shards)):
            split.prefetch([shard], range(shard + 1, min(shard + KEPT_SHARDS, len(split.shards))))
            done = int(split.lengths[:shard].sum())
            while offset < split.lengths[shard]:
                room = config.shard_tokens - (done + offset) % config.shard_tokens
                length = min(int(split.lengths[shard]) - offset, room, CHUNK_TOKENS)
                tokens = split.read(shard, offset, length)
                if int(tokens.max()) >= tokenizer.vocab_size:
                    raise DataError(
                        f"{split.folder / split.shards[shard].name} holds token {tokens.max()}, "
                        f"expected less than {tokenizer.vocab_size}, the vocabulary of its "
                        "tokenizer; give the right one as data.prepare.tokenizer"
                    )
                marks = tokens if eot_leads else np.append(previous, tokens[:-1])
                documents = int(np.count_nonzero(marks == eot_id))
                offset, previous = offset + length, int(tokens[-1])
                tokens, utf8_bytes = tokens.astype(token_dtype(tokenizer.vocab_size)), sizes[tokens]
                encoded = Encoded(split.name, tokens, documents, int(utf8_bytes.sum()))
                yield Tokenized([encoded], {"position": (number, shard, offset)})
            offset = 0


def token_before(split: Split, shard: int, offset: int, eot_id: int) -> int:
    """The token before a position; end-of-text at the start of a split."""
    if offset == 0 and shard == 0:
        return eot_id
    if offset == 0:
        shard, offset = shard - 1, split.shards[shard - 1].tokens
    return int(split.read(shard, offset - 1, 1)[0])
