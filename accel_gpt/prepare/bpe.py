"""Make a tokenizer from text: its characters, or a byte-level BPE trained on it.

The regex `PATTERN` in `data/tokenizer_json.py` splits text before BPE merges:

- Digits form groups of at most three, from the left of a number, without other characters.
- The last space before a word or a punctuation mark belongs to it. A space before a digit is
  separate, and so are other runs of spaces, such as indentation.
- Line ends belong to the punctuation or the empty lines before them.
- Letters of all scripts are treated alike.

Text is not normalized, so decoding returns the same bytes.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from accel_gpt.console import write_err
from accel_gpt.data.tokenizer import (
    BPETokenizer,
    CharsTokenizer,
    Tokenizer,
    named_tokenizer,
)
from accel_gpt.data.tokenizer_json import BYTE_CHARS, PATTERN, bpe_content
from accel_gpt.prepare.pieces import pieces
from accel_gpt.training.display import Progress

PIECE_CHARACTERS = 65_536  # characters; small enough to use all cores
# The longest token, in bytes. Assumption: longer repeats are separator lines and binary blobs, and
# tokens for them would waste the vocabulary.
TOKEN_BYTES = 64
# Words are cut here, because training time grows with the square of a word's length. A base64 blob
# in the text would take hours.
LONG_WORDS = r"\S{1000}|\s{1000}"


def make_tokenizer(spec: str, vocab_size: int, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """Make the tokenizer `spec`: bytes, chars, bpe, gpt2, a path or a Hub id.

    chars and bpe read all of `texts()`. The memory of bpe grows with the amount of text.
    """
    if spec == "bpe":
        return train_bpe(texts(), vocab_size)
    if spec == "chars":
        found: set[str] = set()
        for text in texts():
            found.update(text)
        return CharsTokenizer("".join(sorted(found)))
    return named_tokenizer(spec, "data.prepare.tokenizer", "bytes, chars, bpe, gpt2")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens on all of `texts`.

    Ids 0 to 255 are the bytes. Merges follow in the order in which they were learned, then
    end-of-text. If the text is too small for `vocab_size` tokens, the BPE has fewer and a warning
    is printed.
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

    def short_pieces() -> Iterator[str]:
        for text in texts:
            for piece in pieces([text], PIECE_CHARACTERS):
                progress.advance(len(piece))
                yield piece

    with Progress("training the bpe", "characters") as progress:
        tokenizer.train_from_iterator(short_pieces(), trainer)
    learned = tokenizer.get_vocab()
    reached = len(learned) + 1
    if reached < vocab_size:
        write_err(
            f"WARNING: the text is too small for data.prepare.vocab_size {vocab_size:,}; the bpe "
            f"has {reached:,} tokens"
        )
    vocabulary = [*BYTE_CHARS, *sorted(learned, key=learned.__getitem__)[256:]]
    return BPETokenizer("bpe", bpe_content(vocabulary), PATTERN)
