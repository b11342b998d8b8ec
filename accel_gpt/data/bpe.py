"""Byte-level BPE: train it, and tell from a tokenizer.json whether it is one of ours.

The file is Hugging Face's format; the ranks read back from it drive tiktoken, which is faster.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from accel_gpt.errors import UserError

EOT = "<|endoftext|>"

# What may become one token, in order of preference. The scheme is cl100k's, written anew.
PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one leading non-letter: " the", "_name", ".py"
        r"\p{N}{1,3}",  # digits in groups of at most three
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends after it: "):\n"
        r"\s*[\r\n]+",  # empty lines and the indentation of empty lines
        r"\s+(?!\S)",  # a run of spaces, the last one left to the word that follows
        r"\s+",  # the space that is left before a digit or at a lone tab
    )
)

# Assumption: enough text to settle the merges, and a few GB of memory at most.
TRAIN_CHARACTERS = 1_000_000_000
PIECE_CHARACTERS = 65_536
# Assumption: longer repeats are rulers and binary blobs, on which a vocabulary would be wasted.
TOKEN_BYTES = 64


def train(texts: Iterable[str], vocab_size: int) -> str:
    """The text of a tokenizer.json with `vocab_size` tokens, learned from the first
    `TRAIN_CHARACTERS` of `texts`.

    Ids: 0..255 the bytes, then merges in the order they were learned, end-of-text last.
    Raises `UserError` when the text has too few different words to reach `vocab_size`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    untrained = json.loads(describe([], [])) | {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(untrained | {"added_tokens": []}))
    assert isinstance(tokenizer.model, BPE)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        max_token_length=TOKEN_BYTES,
        show_progress=False,
        initial_alphabet=ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(training_pieces(texts), trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[256:]
    if len(learned) + 257 < vocab_size:
        raise UserError(
            f"data.prepare.vocab_size is {vocab_size}, but the text is too small for it: only "
            f"{len(learned) + 257} tokens were reached; give more text or set vocab_size to at "
            f"most {len(learned) + 257}"
        )
    vocabulary = [byte_chars()[b] for b in range(256)] + [token for token, _ in learned]
    return describe(vocabulary, all_merges(vocabulary))


def training_pieces(texts: Iterable[str]) -> Iterator[str]:
    """The first `TRAIN_CHARACTERS` of `texts` in pieces small enough to spread over the cores."""
    left = TRAIN_CHARACTERS
    for text in texts:
        for piece in pieces(clean(text), PIECE_CHARACTERS):
            yield from short_words(piece[:left])
            left -= len(piece)
            if left <= 0:
                return


def short_words(text: str) -> list[str]:
    """`text` cut within words and runs of spaces of 1000 characters: the trainer's time grows with
    the square of their length, and a blob of base64 in the text would stop it for hours.
    """
    if max(map(len, text.split()), default=0) < 1000 and not re.search(r"\s{1000}", text):
        return [text]
    return re.split(r"(\S{1000}|\s{1000})", text)


def describe(vocabulary: list[str], merges: list[list[str]]) -> str:
    """tokenizer.json for a vocabulary (tokens in byte-level spelling, without end-of-text)."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end_of_text(len(vocabulary))],
            "normalizer": None,
            "pre_tokenizer": pre_tokenizer(),
            "post_processor": None,
            "decoder": byte_level(),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,  # a word that is a token is that token, as in tiktoken
                "vocab": {token: rank for rank, token in enumerate(vocabulary)},
                "merges": merges,
            },
        },
        ensure_ascii=False,
    )


def end_of_text(token_id: int) -> dict[str, Any]:
    """The entry of `EOT` in added_tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": EOT, **flags, "special": True}


def byte_level() -> dict[str, Any]:
    """Bytes spelled as printable characters, without a regex of its own."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def pre_tokenizer() -> dict[str, Any]:
    """Split by `PATTERN`, then bytes as characters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, byte_level()]}


def all_merges(vocabulary: list[str]) -> list[list[str]]:
    """Every split (left, right) of each token into two tokens, by rank of token, left and right.

    tiktoken merges any neighbours whose concatenation is a token, Hugging Face only listed pairs;
    with all pairs listed in this order both do the same.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    merges: list[list[str]] = []
    for token in islice(vocabulary, 256, None):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in rank and b in rank]
        merges.extend([a, b] for a, b in sorted(known, key=lambda ab: (rank[ab[0]], rank[ab[1]])))
    return merges


def ranks(text: str) -> dict[bytes, int] | None:
    """Token bytes -> id of a tokenizer.json that `describe` wrote, None for any other file."""
    try:
        content = json.loads(text)
        vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        if json.loads(describe(vocabulary, all_merges(vocabulary))) != content:
            return None
        to_byte = {char: byte for byte, char in enumerate(byte_chars())}
        found = {bytes(to_byte[c] for c in token): i for i, token in enumerate(vocabulary)}
    except (ValueError, KeyError, TypeError):
        return None
    singles = [bytes([b]) for b in range(256)]
    return found if list(found)[:256] == singles else None


def byte_chars() -> list[str]:
    """The character by which the byte-level scheme spells each byte (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    spelled = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [spelled[b] for b in range(256)]


def clean(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of `size` characters or a little more, cut only where a line end stands
    between two non-spaces: no token of `PATTERN` or of GPT-2's reaches over such a place.
    """
    start = 0
    while len(text) - start > size:
        cut = text.find("\n", start + size) + 1
        while cut and cut < len(text) and (text[cut - 2].isspace() or text[cut].isspace()):
            cut = text.find("\n", cut) + 1
        if not cut or cut == len(text):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]
