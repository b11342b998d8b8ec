"""Read, write and recognize the files of a tokenizer.

- tokenizer.json in the format of Hugging Face `tokenizers`, written for the kinds bytes, chars and
  bpe, and for gpt2;
- tokenizer_config.json and chat_template.jinja in the same folder;
- GPT-2's older vocab.json and merges.txt, read if there is no tokenizer.json.

`content` is parsed JSON. Tokens are in the byte-level spelling, with one character for each byte.
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import read_json
from accel_gpt.records import read_object

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL = "special_tokens_map.json"  # names special tokens, in older folders
HUB_FILES = (FILE, CONFIG, TEMPLATE, SPECIAL, "vocab.json", "merges.txt")
MODEL_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Keys of tokenizer_config.json that name Python code, or files on the machine that wrote it, or
# that change the tokens of a text.
LEFT_OUT = (
    "add_bos_token",
    "add_eos_token",
    "added_tokens_decoder",
    "split_special_tokens",
    "auto_map",
    "name_or_path",
    "tokenizer_file",
    "vocab_file",
    "merges_file",
    "special_tokens_map_file",
)
# Keys of tokenizer.json that do not change the ids of `Tokenizer.encode()`. transformers may change
# them when it saves a file.
BESIDE_THE_POINT = ("post_processor", "truncation", "padding")
# Keys of tokenizer.json; the package tokenizers rejects any other.
KEYS = frozenset(
    {
        "version",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "decoder",
        "model",
        "post_processor",
        "truncation",
        "padding",
    }
)

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
# The pattern of tokenizers that older versions trained: without the alternative for contractions
FORMER_PATTERN = PATTERN[PATTERN.index("|[^") + 1 :]
GPT2_TOKENS = 50_256  # without end-of-text
# SHA-256 of the JSON of openai-community/gpt2's [tokens by id without end-of-text, merges by rank]
GPT2_SUM = "e1bf1d7abcc7e361ff81bef4019332b6b745a38a09133324388925dd4ba005e0"


# --------------------------------------------------------------------------- reading


def read_file(where: Path) -> tuple[str, Any]:
    """Read a tokenizer.json; return its text and its parsed content.

    If there is none, vocab.json and merges.txt in the same folder replace it. Raises `UserError` if
    there is no tokenizer, `DataError` if it is not JSON or has a key that may change ids.
    """
    if where.exists():
        if where.name != FILE and not begins_an_object(where):
            raise other_model(where)
        content = read_object(where, DataError)
        if unknown := content.keys() - KEYS:
            raise DataError(
                f"{where} is not a tokenizer.json: {min(unknown)} is an unknown key; save it again "
                "with transformers"
            )
        return where.read_bytes().decode(), content
    joined = join_two_files(where.parent) if where.name == FILE else None
    if joined is None:
        for name in MODEL_FILES:
            if where.with_name(name).is_file():
                raise other_model(where.with_name(name))
        raise UserError(f"there is no tokenizer at {where}; give the path of a {FILE}")
    return json.dumps(joined, ensure_ascii=False), joined


def begins_an_object(where: Path) -> bool:
    """Return whether a file begins as a JSON object, or cannot be read."""
    try:
        with where.open("rb") as file:
            start = file.read(1000)
    except OSError:
        return True
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def other_model(where: Path) -> UserError:
    """Return the error for a file of another format, such as SentencePiece's tokenizer.model."""
    return UserError(
        f"{where} is not a {FILE}; if it is a SentencePiece or tiktoken model, write one with "
        "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), where FOLDER "
        "holds the files of the model; or give its Hub id (user/name)"
    )


def join_two_files(folder: Path) -> dict[str, Any] | None:
    """Make GPT-2's tokenizer.json from its vocab.json and merges.txt; None if they are missing.

    Raises `UserError` if they belong to another tokenizer, because they do not say how that
    tokenizer splits text.
    """
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        return None
    try:
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs = [line.split(" ") for line in lines if not line.startswith("#version")]
        content = gpt2_content(tokens_by_id(read_json(vocabulary)), pairs)
    except (ValueError, TypeError, AttributeError):
        content = {}
    if recognize(content) is None:
        raise UserError(
            f"{folder} has no tokenizer.json, and its {vocabulary.name} and {merges.name} are not "
            "GPT-2's; write a tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return content


def read_config(where: Path) -> dict[str, Any]:
    """Read tokenizer_config.json and chat_template.jinja from the folder of `where`, if any.

    Drops the keys in `LEFT_OUT`. If there is no eos_token, it is read from special_tokens_map.json.
    Raises `DataError` if a file is damaged.
    """
    config: dict[str, Any] = {}
    path = where.with_name(CONFIG)
    if path.is_file():
        content = read_object(path, DataError, "repair or remove it")
        config = {key: value for key, value in content.items() if key not in LEFT_OUT}
    special = where.with_name(SPECIAL)
    if special.is_file() and not config.get("eos_token"):
        named = read_object(special, DataError, "repair or remove it")
        if eos := named.get("eos_token"):
            config["eos_token"] = eos
    template = where.with_name(TEMPLATE)
    if template.is_file():
        try:
            config["chat_template"] = template.read_bytes().decode()
        except UnicodeDecodeError:
            raise DataError(f"{template} is not UTF-8 text; repair or remove it") from None
    return config


def spelling(token: object) -> object:
    """Return the text of a special token in tokenizer_config.json: a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def as_trained(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that gives a text by default the ids that it has in training.

    A template is left out, because it adds tokens or changes the text, and so are truncation,
    padding and dropout.
    """
    changes: dict[str, Any] = {key: None for key in BESIDE_THE_POINT if content.get(key)}
    if (content.get("post_processor") or {}).get("type") == "ByteLevel":
        del changes["post_processor"]  # it changes only the positions of tokens in the text
    if content["model"].get("dropout"):  # encodes a text differently each time
        changes["model"] = content["model"] | {"dropout": None}
    return content | changes


def find_eot(
    content: Mapping[str, Any], ids: Mapping[str, int], where: Path, config: Mapping[str, Any]
) -> str:
    """Return the token that ends a document, one of `ids`.

    It is the eos_token of tokenizer_config.json, else the special token with one of `EOT_NAMES`.
    Raises `UserError` if there is no such token.
    """
    named = spelling(config.get("eos_token"))
    if isinstance(named, str):
        require(
            named in ids,
            f"{where.with_name(CONFIG)} sets eos_token to {named!r}, which is not a token of "
            f"{where.name}; set it to the token that ends a document",
        )
        return named
    special = {token["content"] for token in content.get("added_tokens", ()) if token["special"]}
    for name in EOT_NAMES:
        if name in special:
            return name
    raise UserError(
        f"{where} has no end-of-text token: no special token is {', '.join(EOT_NAMES)}; set "
        f"eos_token in {CONFIG} in the same folder"
    )


# --------------------------------------------------------------------------- writing


def bpe_content(vocabulary: list[str], pattern: str = PATTERN) -> dict[str, Any]:
    """Return the tokenizer.json of the kind bpe.

    `vocabulary`: tokens by id, the 256 bytes first, without end-of-text.
    """
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, byte_level()]
    content = byte_level_content(vocabulary, all_merges(vocabulary))
    return content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def bytes_content() -> dict[str, Any]:
    """Return the tokenizer.json of the kind bytes: a BPE without merges."""
    return with_eot_in_vocabulary(byte_level_content([*BYTE_CHARS], []))


def gpt2_content(vocabulary: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """Return the tokenizer.json of openai-community/gpt2.

    `vocabulary`: tokens by id, without end-of-text.
    """
    split = byte_level() | {"use_regex": True}
    return with_eot_in_vocabulary(byte_level_content(vocabulary, merges)) | {
        "pre_tokenizer": split,
        "post_processor": split | {"trim_offsets": False},
    }


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


def with_eot_in_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    """Add end-of-text to the model's vocabulary and set `ignore_merges` to false."""
    model = content["model"]
    vocabulary = model["vocab"] | {EOT: len(model["vocab"])}
    return content | {"model": model | {"ignore_merges": False, "vocab": vocabulary}}


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


def learned_merges(vocabulary: list[str]) -> list[list[str]]:
    """List the two tokens that were merged into each token when the BPE was trained.

    They are the last two parts left when the characters of a token are merged, lowest rank first.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    merges = []
    for token in vocabulary[256:]:
        parts = list(token)
        while len(parts) > 2:
            pairs = [rank.get(a + b, rank[token]) for a, b in pairwise(parts)]
            left = pairs.index(min(pairs))
            parts[left : left + 2] = [parts[left] + parts[left + 1]]
        merges.append(parts)
    return merges


# --------------------------------------------------------------------------- recognizing


class Known(NamedTuple):
    """A recognized tokenizer.json: one of the kinds that this package writes, or GPT-2's."""

    kind: Literal["bytes", "chars", "bpe", "gpt2"]
    vocabulary: list[str]
    """Tokens by id without end-of-text."""
    pattern: str = ""
    """The regex by which the kind bpe splits text."""


def recognize(content: Any) -> Known | None:
    """Recognize a tokenizer.json that this package writes, or GPT-2's; return None for any other.

    GPT-2's files vary with their age: merges are strings or lists, end-of-text is in the vocabulary
    or not, and defaults may be left out.
    """
    try:
        if adds_tokens(content.get("post_processor")):
            return None
        vocabulary = tokens_by_id(content["model"]["vocab"])
        for pattern in (PATTERN, FORMER_PATTERN):
            if content["pre_tokenizer"] == bpe_content([], pattern)["pre_tokenizer"]:
                ours = is_bpe(content, vocabulary, pattern)
                return Known("bpe", vocabulary, pattern) if ours else None
        core = content | dict.fromkeys(BESIDE_THE_POINT)
        if core == bytes_content():
            return Known("bytes", vocabulary)
        if content["model"].get("type") == "WordLevel":
            ours = core == chars_content("".join(vocabulary))
            return Known("chars", vocabulary) if ours else None
        return Known("gpt2", vocabulary) if is_gpt2(content, vocabulary) else None
    except (LookupError, TypeError, AttributeError):
        return None


def adds_tokens(post_processor: Any) -> bool:
    """Return whether a post-processor may add tokens to a text."""
    if not post_processor or post_processor["type"] == "ByteLevel":
        return False
    template = post_processor["type"] == "TemplateProcessing"
    return not template or bool(post_processor["special_tokens"])


def is_bpe(content: dict[str, Any], vocabulary: list[str], pattern: str) -> bool:
    """Return whether a tokenizer.json is of the kind bpe."""
    byte_spelling = set("".join(vocabulary)) <= set(BYTE_CHARS)
    bytes_first = tuple(vocabulary[:256]) == BYTE_CHARS
    return byte_spelling and bytes_first and content == bpe_content(vocabulary, pattern)


def is_gpt2(content: dict[str, Any], vocabulary: list[str]) -> bool:
    """Return whether a tokenizer.json gives the same ids as GPT-2's."""
    model = content["model"]
    split = content["pre_tokenizer"]
    added = [(token["content"], token["id"], token["special"]) for token in content["added_tokens"]]
    ids = {EOT: GPT2_TOKENS} | model["vocab"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return (
        content.get("normalizer") is None
        and split["type"] == "ByteLevel"
        and split["add_prefix_space"] is False
        and split.get("use_regex", True)
        and content["decoder"]["type"] == "ByteLevel"
        and added == [(EOT, GPT2_TOKENS, True)]
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and [ids[token] for token in (*vocabulary, EOT)] == list(range(GPT2_TOKENS + 1))
        and hashlib.sha256(json.dumps([vocabulary, merges]).encode()).hexdigest() == GPT2_SUM
    )


def tokens_by_id(ids: dict[str, int]) -> list[str]:
    """List tokens by id, without end-of-text."""
    return [token for token in sorted(ids, key=ids.__getitem__) if token != EOT]
