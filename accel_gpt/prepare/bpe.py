"""Tokenizers made from text: its characters, or a byte-level BPE trained on it.

The BPE keeps digits in groups of at most three, from the left of a number, and no token holds a
digit beside anything else. The last space before a word or a sign belongs to it, one before a digit
stands alone; other spaces form tokens of their own, as indentation does; line ends go with the
punctuation or the empty lines before them. Letters of every script count alike, and text is not
normalized: decoding gives the same bytes.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator

from accel_gpt.console import Progress, ticking
from accel_gpt.data.tokenizer import (
    CharsTokenizer,
    Tokenizer,
    named_tokenizer,
    rank_tokenizer,
    to_json,
)
from accel_gpt.data.tokenizer_json import BYTE_CHARS, bpe_content
from accel_gpt.errors import require
from accel_gpt.prepare.pieces import pieces

PIECE_CHARACTERS = 65_536  # of text, small enough to spread over the cores
# Assumption: longer repeats are rulers and binary blobs, on which a vocabulary would be wasted.
TOKEN_BYTES = 64
# The time of the trainer grows with the square of the length of a word: a blob of base64 in the
# text would stop it for hours.
LONG_WORDS = r"\S{1000}|\s{1000}"


def make_tokenizer(spec: str, vocab_size: int, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """Make the tokenizer bytes, chars, bpe (of `vocab_size`), gpt2 or of a path.

    chars and bpe read all of `texts()`, on whose amount the memory of bpe depends.
    """
    if spec == "bpe":
        return train_bpe(texts(), vocab_size)
    if spec == "chars":
        found: set[str] = set()
        for text in texts():
            found.update(text)
        require(bool(found), "the text is empty; there are no characters for a chars tokenizer")
        return CharsTokenizer("".join(sorted(found)))
    return named_tokenizer(spec, "data.prepare.tokenizer", "bytes, chars, bpe, gpt2")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, or as many as there are, on all of `texts`.

    Ids: 0..255 the bytes, then merges in the order they were learned, end-of-text last. Fewer than
    `vocab_size` where the text has too few different words, with a warning.
    """
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.trainers import BpeTrainer

    untrained = bpe_content([]) | {"added_tokens": []}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(untrained))
    long_words = Split(tokenizers.Regex(LONG_WORDS), "isolated")
    tokenizer.pre_tokenizer = Sequence([long_words, tokenizer.pre_tokenizer])
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        max_token_length=TOKEN_BYTES,
        show_progress=False,
        initial_alphabet=ByteLevel.alphabet(),
    )
    progress = Progress("training the bpe", "characters")

    def short_pieces() -> Iterator[str]:
        for text in texts:
            for piece in pieces([text], PIECE_CHARACTERS):
                progress.done += len(piece)
                yield piece

    with ticking(progress):
        tokenizer.train_from_iterator(short_pieces(), trainer)
    learned = tokenizer.get_vocab()
    reached = len(learned) + 1
    if reached < vocab_size:
        sys.stderr.write(
            f"WARNING: the text is small: its bpe has {reached:,} tokens, fewer than the "
            f"{vocab_size:,} of data.prepare.vocab_size\n"
        )
    vocabulary = [*BYTE_CHARS, *sorted(learned, key=learned.__getitem__)[256:]]
    return rank_tokenizer("bpe", vocabulary, to_json(bpe_content(vocabulary)))
