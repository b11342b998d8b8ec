"""Read and write the files of a tokenizer.

- tokenizer.json in the format of Hugging Face `tokenizers`, written for the kinds bytes, chars and
  bpe, and for gpt2;
- tokenizer_config.json and chat_template.jinja in the same folder.

`content` is parsed JSON. Tokens are in the byte-level spelling, with one character for each byte.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.errors import DataError, UserError
from accel_gpt.json_files import read_json_object

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
HUB_FILES = (FILE, CONFIG, TEMPLATE)
EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Keys of tokenizer_config.json that are taken along. Others may name Python code, or files on the
# machine that wrote it, or change the tokens of a text.
TAKEN_ALONG = (
    "eos_token",
    "pad_token",
    "unk_token",
    "chat_template",
    "model_max_length",
    "model_input_names",
    "padding_side",
    "truncation_side",
)
# Keys of tokenizer.json that do not change the ids of `Tokenizer.encode()`. transformers may change
# them when it saves a file.
BESIDE_THE_POINT = ("post_processor", "truncation", "padding")
# The normalizer that spells each space as U+2581, as in SentencePiece
SPACE_MARK = MappingProxyType({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
# The character that spells each byte (GPT-2's encoder.py): the Latin-1 character if it is
# printable, else the next unused character from code 256 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHER_BYTES = tuple(byte for byte in range(256) if byte not in PRINTABLE)
BYTE_CHARS = tuple(chr(b if b in PRINTABLE else 256 + OTHER_BYTES.index(b)) for b in range(256))

# How the kind bpe splits text into words; no token spans two words. This is the pattern of Llama 3,
# which llama.cpp supports as "llama-bpe".
PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # the ending of a contraction: "'s"
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one leading non-letter: " the", "_name", ".py"
        r"\p{N}{1,3}",  # digits in groups of at most three
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends after it: "):\n"
        r"\s*[\r\n]+",  # empty lines and the indentation of empty lines
        r"\s+(?!\S)",  # white space, except its last character before a word
        r"\s+",  # any other white space, such as one space before a digit
    )
)
# SHA-256 of the JSON of openai-community/gpt2's [tokens by id without end-of-text, merges by rank]
GPT2_SUM = "e1bf1d7abcc7e361ff81bef4019332b6b745a38a09133324388925dd4ba005e0"


# --------------------------------------------------------------------------- reading


def read_config(where: Path) -> dict[str, Any]:
    """Read tokenizer_config.json and chat_template.jinja from the folder of `where`, if any.

    Keeps the keys `TAKEN_ALONG`, and of a token its text. Raises `DataError` if a file is damaged.
    """
    config: dict[str, Any] = {}
    path = where.with_name(CONFIG)
    if path.is_file():
        content = read_json_object(path, DataError)
        for key in TAKEN_ALONG:
            value = content.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if value is not None:
                config[key] = value
    template = where.with_name(TEMPLATE)
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


def as_trained(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that gives a text by default the ids that it has in training.

    A template is left out, because it adds tokens or changes the text, and so are truncation,
    padding and dropout.
    """
    changes: dict[str, Any] = {key: None for key in BESIDE_THE_POINT if content.get(key)}
    if (content.get("post_processor") or {}).get("type") == "ByteLevel":
        del changes["post_processor"]  # it changes only the positions of tokens in the text
    model = content.get("model")
    if isinstance(model, dict) and model.get("dropout"):  # encodes a text differently each time
        changes["model"] = {key: value for key, value in model.items() if key != "dropout"}
    return content | changes


def find_eot(
    content: Mapping[str, Any], ids: Mapping[str, int], where: Path, config: Mapping[str, Any]
) -> str:
    """Return the token that ends a document, one of `ids`.

    It is the eos_token of the settings `config`, else the special token with one of `EOT_NAMES`.
    Raises `UserError` if there is no such token.
    """
    special = [token["content"] for token in content.get("added_tokens", ()) if token["special"]]
    named = config.get("eos_token") or next((t for t in EOT_NAMES if t in special), None)
    if isinstance(named, str) and named in ids:
        return named
    raise UserError(
        f"{where} has no end-of-text token {named or 'of a known name'}; set eos_token in "
        f"{where.with_name(CONFIG)} to the token that ends a document; the special tokens are "
        f"{', '.join(special[:10]) or 'none'}"
    )


# --------------------------------------------------------------------------- writing


def bpe_content(vocabulary: list[str]) -> dict[str, Any]:
    """Return the tokenizer.json of the kind bpe.

    `vocabulary`: tokens by id, the 256 bytes first, without end-of-text.
    """
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, byte_level()]
    content = byte_level_content(vocabulary, all_merges(vocabulary))
    return content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def bytes_content() -> dict[str, Any]:
    """Return the tokenizer.json of the kind bytes: a BPE without merges."""
    return byte_level_content([*BYTE_CHARS], [])


def gpt2_content(vocab: dict[str, int], merges: str) -> dict[str, Any]:
    """Return the tokenizer.json of GPT-2.

    `vocab`: the ids of vocab.json (encoder.json), with end-of-text. `merges`: the text of
    merges.txt (vocab.bpe), a pair a line after the first line.
    """
    pairs = [line.split(" ") for line in merges.splitlines() if not line.startswith("#version")]
    content = byte_level_content(tokens_by_id(vocab), pairs)
    return content | {"pre_tokenizer": byte_level() | {"use_regex": True}}


def chars_content(chars: str) -> dict[str, Any]:
    """Return the tokenizer.json of the kind chars: each character is a word.

    The unknown token is not in the vocabulary. An unknown character is therefore an error ("Missing
    [UNK] token"), as in `CharsTokenizer`.
    """
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    vocabulary = {char: i for i, char in enumerate(chars)}
    return byte_level_content([], []) | {
        "added_tokens": [],
        "pre_tokenizer": every | {"invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": ""},
    }


def byte_level_content(vocabulary: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE that does not split text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocabulary), "content": EOT, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level(),
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
            "ignore_merges": True,  # a word that is a token needs no merges, as in tiktoken
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": merges,
        },
    }


def byte_level() -> dict[str, Any]:
    """Return the pre-tokenizer that spells bytes as printable characters and does not split."""
    settings = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "ByteLevel", **settings}


def all_merges(vocabulary: list[str]) -> list[list[str]]:
    """List every split (left, right) of each token into two tokens, sorted by their ranks.

    tiktoken merges any neighbours whose concatenation is a token. Hugging Face merges only listed
    pairs. With all pairs in this order both give the same ids.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    merges: list[list[str]] = []
    for token in vocabulary[256:]:
        splits = ([token[:i], token[i:]] for i in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
        merges += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


# --------------------------------------------------------------------------- recognizing


def kind_of(content: dict[str, Any]) -> str:
    """Return the kind of a tokenizer.json that this package writes, gpt2, or hf for any other."""
    core = content | dict.fromkeys(BESIDE_THE_POINT)
    try:
        after = content.get("post_processor") or {"type": "ByteLevel"}
        is_template = after["type"] == "TemplateProcessing"
        if after["type"] != "ByteLevel" and (not is_template or after["special_tokens"]):
            return "hf"  # it may add tokens to a text
        vocabulary = tokens_by_id(content["model"]["vocab"])
        if core == bytes_content():
            return "bytes"
        if core == chars_content("".join(vocabulary)):
            return "chars"
        if vocabulary[:256] == [*BYTE_CHARS] and core == bpe_content(vocabulary):
            return "bpe"
        return "gpt2" if is_gpt2(content, vocabulary) else "hf"
    except (LookupError, TypeError, AttributeError):
        return "hf"  # the package tokenizers reads it or says what is wrong


def is_gpt2(content: dict[str, Any], vocabulary: list[str]) -> bool:
    """Return whether a tokenizer.json gives the ids of GPT-2; its older forms vary."""
    model = content["model"]
    split = content["pre_tokenizer"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return (
        content.get("normalizer") is None
        and split["type"] == "ByteLevel"
        and not split["add_prefix_space"]
        and split.get("use_regex", True)
        and not model.get("dropout")
        and [(token["content"], token["special"]) for token in content["added_tokens"]]
        == [(EOT, True)]
        and hashlib.sha256(json.dumps([vocabulary, merges]).encode()).hexdigest() == GPT2_SUM
    )


def tokens_by_id(ids: dict[str, int]) -> list[str]:
    """List tokens by id, without end-of-text."""
    return [token for token in sorted(ids, key=ids.__getitem__) if token != EOT]
