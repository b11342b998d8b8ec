"""Byte-level BPE: train it, and tell from a tokenizer.json whether it is one of ours.

The file is Hugging Face's format; the ranks read back from it drive tiktoken, which is faster.

Digits: a number is parted, from its left, into groups of at most three, and no token holds more
than three digits or a digit beside anything else. White space: the last space before a word or a
sign belongs to it, one before a digit stands alone; other spaces form tokens of their own, as
indentation does; line ends go with the punctuation or the empty lines before them.
Letters of every script count alike, and text is not normalized: decoding gives the same bytes.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from accel_gpt.errors import DataError, UserError

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

PIECE_CHARACTERS = 65_536
# Assumption: longer repeats are rulers and binary blobs, on which a vocabulary would be wasted.
TOKEN_BYTES = 64
LONGEST = 1 << 28  # characters that cannot be cut; assumption: longer is no text

# No token of `PATTERN` or of GPT-2's reaches from a non-space over a space, or from one line end
# to a non-space: a text may be cut after such a line end and before such a space. Nor does one
# reach from a letter to what is none: text without spaces, as Chinese, is cut before its
# punctuation and its white space. These letters and signs are such in any version of Unicode.
LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)


def train(texts: Iterable[str], vocab_size: int) -> str:
    """The text of a tokenizer.json with `vocab_size` tokens, learned from all of `texts`: their
    amount, on which the memory depends, is for the caller to limit.

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
    """`texts` in pieces small enough to spread over the cores."""
    for text in texts:
        for piece in pieces(clean(text), PIECE_CHARACTERS):
            yield from short_words(piece)


def short_words(text: str) -> list[str]:
    """`text` cut within words and runs of spaces of 1000 characters: the trainer's time grows with
    the square of their length, and a blob of base64 in the text would stop it for hours.
    """
    blocks = (text[i : i + 500] for i in range(0, len(text) - 499, 500))
    if all(" " in block and not block.isspace() for block in blocks):  # nearly always, and fast
        return [text]
    return re.split(r"(\S{1000}|\s{1000})", text)


def describe(vocabulary: list[str], merges: list[list[str]]) -> str:
    """tokenizer.json for a vocabulary (tokens in byte-level spelling, without end-of-text)."""
    return json.dumps(layout(vocabulary, merges), ensure_ascii=False)


def layout(vocabulary: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """The same as the object that the file holds."""
    return {
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
    }


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


def ranks(content: Any) -> dict[bytes, int] | None:
    """Token bytes -> id of a tokenizer.json that `describe` wrote, None for any other file."""
    try:
        if content["pre_tokenizer"] != pre_tokenizer():  # large files of others: seconds saved
            return None
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
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [chars[b] for b in range(256)]


def clean(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of `size` to twice `size` characters, where it can be cut;
    their tokens are those of the whole (see `find_cut`).
    """
    return stream_pieces((text,), size)


def stream_pieces(chunks: Iterable[str], size: int, where: object = None) -> Iterator[str]:
    """The `pieces` of a text that comes in chunks, however it is cut into them.

    With `where`, the name of the text, `DataError` for `LONGEST` characters that cannot be cut.
    """
    held: list[str] = []
    length, enough = 0, size
    for chunk in chain(chunks, (None,)):
        if chunk is not None:
            held.append(chunk)
            length += len(chunk)
            if length <= enough:
                continue
        text, start = "".join(held), 0
        while len(text) - start > size and (cut := find_cut(text, start, size)):
            yield text[start:cut]
            start = cut
        held = [text[start:]]
        length = len(held[0])
        enough = 2 * length if length > size else size  # or searching would take quadratic time
        if where is not None and length > LONGEST:
            raise DataError(
                f"{where} has {length:,} characters without a line end or a space between words; "
                f"text is cut there, so expected at most {LONGEST:,}: put line ends into it"
            )
    yield "".join(held)


def find_cut(text: str, start: int, size: int) -> int:
    """Where the piece that begins at `start` ends; 0 when `text` does not reach that far.

    It is after the first line end between two non-spaces in the second `size` characters; if there
    is none, then at the next such line end or other `CUT`.
    """
    begin, end = start + size - 1, start + 2 * size
    found = LINE.search(text, begin, end) or CUT.search(text, end - 1)
    return found.end() + bool(LINE.match(text, found.end() - 1)) if found else 0
