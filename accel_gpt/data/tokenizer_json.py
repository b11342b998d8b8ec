"""The files of a tokenizer: tokenizer.json in the format of Hugging Face `tokenizers`, written for
our own kinds and recognized; tokenizer_config.json and chat_template.jinja beside it; and GPT-2's
older vocab.json and merges.txt in its place.

Content is JSON as Python objects; tokens are in the byte-level spelling, a character for each byte.
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_gpt.errors import DataError, UserError
from accel_gpt.files import read_json

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
HUB_FILES = (FILE, CONFIG, TEMPLATE, "vocab.json", "merges.txt")
EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Keys of tokenizer_config.json that name Python code to run, or files of the machine that wrote it.
LEFT_OUT = (
    "auto_map",
    "name_or_path",
    "tokenizer_file",
    "vocab_file",
    "merges_file",
    "special_tokens_map_file",
)
# Keys of tokenizer.json that decide no id of `Tokenizer.encode`, and that transformers changes when
# it saves a file.
BESIDE_THE_POINT = ("post_processor", "truncation", "padding")

# The character by which the byte-level scheme spells each byte (GPT-2's encoder.py): itself where
# it is printable in Latin-1, else the next one from 256 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHER_BYTES = tuple(byte for byte in range(256) if byte not in PRINTABLE)
BYTE_CHARS = tuple(chr(b if b in PRINTABLE else 256 + OTHER_BYTES.index(b)) for b in range(256))

# What may become one token of our BPE, in order of preference. The scheme is cl100k's.
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
GPT2_TOKENS = 50_256  # without end-of-text
# SHA-256 of the JSON of openai-community/gpt2's [tokens by id without end-of-text, merges by rank]
GPT2_SUM = "e1bf1d7abcc7e361ff81bef4019332b6b745a38a09133324388925dd4ba005e0"


# --------------------------------------------------------------------------- read


def read_file(where: Path) -> tuple[str, Any]:
    """Read a tokenizer.json, or in its place vocab.json and merges.txt: its text and its content.

    Raises `UserError` when there is none, `DataError` when it is no JSON.
    """
    try:
        text = where.read_bytes().decode()
        return text, json.loads(text)
    except FileNotFoundError:
        content = join_two_files(where.parent) if where.name == FILE else None
        if content is None:
            raise UserError(f"there is no tokenizer at {where}; expected a {FILE}") from None
        return json.dumps(content, ensure_ascii=False), content
    except (OSError, ValueError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def join_two_files(folder: Path) -> dict[str, Any] | None:
    """GPT-2's tokenizer.json from its vocab.json and merges.txt, None where they are not there.

    Raises `UserError` when they are another tokenizer's: they do not tell how it splits text.
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
    """Read tokenizer_config.json and chat_template.jinja beside the file `where`, if any.

    Without `LEFT_OUT`. Raises `DataError` for what cannot be read.
    """
    path, config = where.with_name(CONFIG), {}
    try:
        if path.is_file():
            found = read_json(path)
            config = {key: value for key, value in found.items() if key not in LEFT_OUT}
        path = where.with_name(TEMPLATE)
        if path.is_file():
            config["chat_template"] = path.read_bytes().decode()
    except (ValueError, AttributeError):
        kind = "valid JSON" if path.name == CONFIG else "UTF-8 text"
        raise DataError(f"{path} is not {kind}; repair or remove it") from None
    return config


def spelling(token: object) -> object:
    """A special token of tokenizer_config.json, which may be an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def find_eot(ids: Mapping[str, int], where: Path, config: Mapping[str, Any]) -> str:
    """Name of the token that ends a document, from `EOT_NAMES` or tokenizer_config.json."""
    for name in (*EOT_NAMES, spelling(config.get("eos_token"))):
        if isinstance(name, str) and name in ids:
            return name
    raise UserError(
        f"{where} has no end-of-text token (looked for {', '.join(EOT_NAMES)} and for eos_token in "
        f"{CONFIG} beside it); name it there"
    )


# --------------------------------------------------------------------------- written


def bpe_content(vocabulary: list[str]) -> dict[str, Any]:
    """The tokenizer.json of a BPE of ours: tokens by id, bytes first, without end-of-text."""
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, byte_level()]
    content = byte_level_content(vocabulary, all_merges(vocabulary))
    return content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def bytes_content() -> dict[str, Any]:
    """The tokenizer.json of the bytes tokenizer: a BPE with nothing to merge."""
    return with_eot_in_vocabulary(byte_level_content([*BYTE_CHARS], []))


def gpt2_content(vocabulary: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """The tokenizer.json of openai-community/gpt2: tokens by id, without end-of-text."""
    split = byte_level() | {"use_regex": True}
    return with_eot_in_vocabulary(byte_level_content(vocabulary, merges)) | {
        "pre_tokenizer": split,
        "post_processor": split | {"trim_offsets": False},
    }


def chars_content(chars: str) -> dict[str, Any]:
    """The tokenizer.json of a chars tokenizer: each character is a word.

    Its unknown token is not in the vocabulary, so that a character that is not there either is an
    error ("Missing [UNK] token"), as it is for `CharsTokenizer`.
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
    """The tokenizer.json of a byte-level BPE that does not split text."""
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
            "ignore_merges": True,  # a word that is a token is that token, as in tiktoken
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": merges,
        },
    }


def byte_level() -> dict[str, Any]:
    """Bytes spelled as printable characters, without a regex of its own."""
    settings = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "ByteLevel", **settings}


def with_eot_in_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    """`content` whose model also lists end-of-text, and finds words by merging alone."""
    model = content["model"]
    vocabulary = model["vocab"] | {EOT: len(model["vocab"])}
    return content | {"model": model | {"ignore_merges": False, "vocab": vocabulary}}


def all_merges(vocabulary: list[str]) -> list[list[str]]:
    """Every split (left, right) of each token into two tokens, by rank of token, left and right.

    tiktoken merges any neighbours whose concatenation is a token, Hugging Face only listed pairs;
    with all pairs listed in this order both do the same.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    merges: list[list[str]] = []
    for token in vocabulary[256:]:
        splits = ([token[:i], token[i:]] for i in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
        merges += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def learned_merges(vocabulary: list[str]) -> list[list[str]]:
    """The two tokens from which each token above the bytes was merged when it was learned: what
    merging its characters, lowest rank first, leaves at last.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    merges = []
    for token in vocabulary[256:]:
        parts = list(token)
        while len(parts) > 2:
            pairs = [rank.get(a + b, rank[token]) for a, b in pairwise(parts)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append(parts)
    return merges


# --------------------------------------------------------------------------- recognized


def recognize(content: Any) -> tuple[str, list[str]] | None:
    """Kind (bytes, chars, bpe or gpt2) of a tokenizer.json that is one of ours or GPT-2's, and its
    tokens by id without end-of-text; None for any other.

    Of GPT-2 files of every age are known: merges as strings or lists, end-of-text in the vocabulary
    or beside it, defaults left out.
    """
    try:
        post = content.get("post_processor") or {"type": "ByteLevel"}
        adds = post["type"] != "TemplateProcessing" or post["special_tokens"]
        if post["type"] != "ByteLevel" and adds:
            return None
        vocabulary = tokens_by_id(content["model"]["vocab"])
        if content["pre_tokenizer"] == bpe_content([])["pre_tokenizer"]:
            spelled = (*vocabulary[:256],) == BYTE_CHARS and {*"".join(vocabulary)} <= {*BYTE_CHARS}
            return ("bpe", vocabulary) if spelled and content == bpe_content(vocabulary) else None
        core = content | dict.fromkeys(BESIDE_THE_POINT)
        if core == bytes_content():
            return "bytes", vocabulary
        if content["model"].get("type") == "WordLevel":
            return ("chars", vocabulary) if core == chars_content("".join(vocabulary)) else None
        return ("gpt2", vocabulary) if is_gpt2(content, vocabulary) else None
    except (LookupError, TypeError, AttributeError):
        return None


def is_gpt2(content: dict[str, Any], vocabulary: list[str]) -> bool:
    """Whether a tokenizer.json does what GPT-2's does."""
    model, split = content["model"], content["pre_tokenizer"]
    added = [(token["content"], token["id"], token["special"]) for token in content["added_tokens"]]
    ids = {EOT: GPT2_TOKENS} | model["vocab"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return (
        content.get("normalizer") is None
        and (split["type"], split["add_prefix_space"]) == ("ByteLevel", False)
        and split.get("use_regex", True)
        and content["decoder"]["type"] == "ByteLevel"
        and added == [(EOT, GPT2_TOKENS, True)]
        and model.get("type", "BPE") == "BPE"
        and not any(
            model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        and [ids[token] for token in (*vocabulary, EOT)] == [*range(GPT2_TOKENS + 1)]
        and hashlib.sha256(json.dumps([vocabulary, merges]).encode()).hexdigest() == GPT2_SUM
    )


def tokens_by_id(ids: dict[str, int]) -> list[str]:
    """Tokens in the order of their ids, without end-of-text."""
    return [token for token in sorted(ids, key=ids.__getitem__) if token != EOT]
