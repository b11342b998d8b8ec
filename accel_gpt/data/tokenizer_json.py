"""Bytes, chars and GPT-2 in the format of Hugging Face `tokenizers`: written and recognized.

Also what lies beside a tokenizer.json: tokenizer_config.json and chat_template.jinja, or, in place
of it, GPT-2's vocab.json and merges.txt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_gpt.data import bpe
from accel_gpt.data.bpe import EOT
from accel_gpt.errors import DataError, UserError
from accel_gpt.files import load_json, read_json, read_text

FILE = "tokenizer.json"
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Entries of tokenizer_config.json that name Python code to run, or files of the machine that
# wrote it.
LEFT_OUT = frozenset(
    {
        "auto_map",
        "name_or_path",
        "tokenizer_file",
        "vocab_file",
        "merges_file",
        "special_tokens_map_file",
    }
)
# What decides no id of `Tokenizer.encode`, and what transformers changes when it saves a file.
BESIDE_THE_POINT = frozenset({"post_processor", "truncation", "padding"})

GPT2_TOKENS = 50_256  # without end-of-text
# `sum_of` the vocabulary and merges of openai-community/gpt2
GPT2_SUM = "e1bf1d7abcc7e361ff81bef4019332b6b745a38a09133324388925dd4ba005e0"


# --------------------------------------------------------------------------- read


def read_file(where: Path) -> tuple[str, Any]:
    """Text of a tokenizer.json, and what it holds; or what GPT-2's two files in its place hold.

    Raises `UserError` when there is none, `DataError` when it is no JSON.
    """
    try:
        text = read_text(where)
        return text, load_json(text)
    except FileNotFoundError:
        joined = join_two_files(where.parent) if where.name == FILE else None
        if joined is None:
            raise UserError(f"there is no tokenizer at {where}; expected a {FILE}") from None
        return json.dumps(joined, ensure_ascii=False), joined
    except (OSError, ValueError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def read_config(where: Path) -> dict[str, Any]:
    """What tokenizer_config.json and chat_template.jinja beside the file `where` say.

    Empty where there is none. Without `LEFT_OUT`; `DataError` for what cannot be read.
    """
    path, template = where.with_name(CONFIG), where.with_name(TEMPLATE)
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            found = read_json(path, any_number=True)  # model_max_length may be 1e30, digit by digit
            config = {key: value for key, value in found.items() if key not in LEFT_OUT}
        except (ValueError, AttributeError):
            raise DataError(f"{path} is not valid JSON; repair or remove it") from None
    if template.is_file():
        try:
            config["chat_template"] = read_text(template)
        except ValueError:
            raise DataError(f"{template} is no UTF-8 text; repair or remove it") from None
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


def join_two_files(folder: Path) -> dict[str, Any] | None:
    """tokenizer.json for GPT-2's vocab.json and merges.txt, None where they are not in `folder`.

    Raises `UserError` when they are those of another tokenizer: they do not tell how it splits
    text, nor its special tokens.
    """
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    if not (vocabulary.is_file() and merges.is_file()):
        return None
    try:
        ids = read_json(vocabulary)
        lines = read_text(merges).splitlines()
        pairs = [line.split(" ") for line in lines if not line.startswith("#version")]
        content = gpt2_content([token for token in in_order(ids) if token != EOT], pairs)
    except (ValueError, TypeError, AttributeError):
        content = {}
    if gpt2_ranks(content) is None:
        raise UserError(
            f"{folder} has no tokenizer.json, and its {VOCABULARY} and {MERGES} are not GPT-2's; "
            "write a tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return content


# --------------------------------------------------------------------------- written


def bytes_content() -> dict[str, Any]:
    """tokenizer.json of the bytes tokenizer: a BPE of the 256 bytes, with nothing to merge."""
    content = bpe.layout(bpe.byte_chars(), []) | {"pre_tokenizer": bpe.byte_level()}
    return with_eot_in_vocabulary(content)


def chars_content(chars: str) -> dict[str, Any]:
    """tokenizer.json of a chars tokenizer: each character is a word.

    Its unknown token is not in the vocabulary, so that a character that is not there either is an
    error ("Missing [UNK] token"), as it is for `CharsTokenizer`.
    """
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    vocabulary = {char: i for i, char in enumerate(chars)}
    return bpe.layout([], []) | {
        "added_tokens": [],
        "pre_tokenizer": {**every, "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": ""},
    }


def gpt2_content(vocabulary: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """tokenizer.json as openai-community/gpt2 has it; tokens in byte-level spelling."""
    split = {**bpe.byte_level(), "use_regex": True}
    content = bpe.layout(vocabulary, merges) | {
        "pre_tokenizer": split,
        "post_processor": {**split, "trim_offsets": False},
    }
    return with_eot_in_vocabulary(content)


def with_eot_in_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    """`content` whose model also lists end-of-text, and finds words by merging alone."""
    model = content["model"]
    vocabulary = {**model["vocab"], EOT: len(model["vocab"])}
    return content | {"model": {**model, "ignore_merges": False, "vocab": vocabulary}}


def byte_level_tokens(vocabulary: Sequence[bytes]) -> list[str]:
    """Tokens in byte-level spelling."""
    chars = bpe.byte_chars()
    return ["".join(chars[byte] for byte in token) for token in vocabulary]


def merges_of(vocabulary: list[str]) -> list[list[str]]:
    """The two tokens from which each longer one was merged; tokens by rank, bytes first.

    They are what is left of the token's own bytes when all merges of lower rank are done. Where
    two neighbours within a text make the token, nothing was merged over their outer ends before,
    so they are these two: tiktoken, which merges any neighbours that make a token, does the same.
    """
    rank = {token: i for i, token in enumerate(vocabulary)}
    return [last_merge(token, rank) for token in vocabulary[256:]]


def last_merge(token: str, rank: Mapping[str, int]) -> list[str]:
    """The two tokens that merging the characters of `token`, lowest rank first, leaves at last."""
    parts, own = list(token), rank[token]
    while len(parts) > 2:
        pairs = [rank.get(a + b, own) for a, b in pairwise(parts)]
        lowest = min(pairs)
        assert lowest < own, f"{token!r} cannot be merged"
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


# --------------------------------------------------------------------------- recognized


def is_bytes(content: Any) -> bool:
    """Whether a tokenizer.json is that of the bytes tokenizer."""
    return same(content, bytes_content())


def characters(content: Any) -> str | None:
    """The characters of a tokenizer.json that `chars_content` wrote, None for any other."""
    try:
        if content["model"]["type"] != "WordLevel":
            return None
        chars = "".join(in_order(content["model"]["vocab"]))
    except (LookupError, TypeError, AttributeError):
        return None
    return chars if same(content, chars_content(chars)) else None


def gpt2_ranks(content: Any) -> dict[bytes, int] | None:
    """Token bytes -> id of a tokenizer.json that is GPT-2's, None for any other.

    Files of every age are known: merges as strings or lists, end-of-text in the vocabulary or
    beside it, defaults left out.
    """
    try:
        ids = {token: i for token, i in content["model"]["vocab"].items() if token != EOT}
        if len(ids) != GPT2_TOKENS or not works_as_gpt2(content):
            return None
        vocabulary = in_order(ids)
        merges = [m.split(" ") if isinstance(m, str) else m for m in content["model"]["merges"]]
        if [ids[token] for token in vocabulary] != [*range(GPT2_TOKENS)]:
            return None
    except (LookupError, TypeError, AttributeError):
        return None
    if sum_of(vocabulary, merges) != GPT2_SUM:
        return None
    to_byte = {char: byte for byte, char in enumerate(bpe.byte_chars())}
    return {bytes(to_byte[c] for c in token): i for i, token in enumerate(vocabulary)}


def works_as_gpt2(content: dict[str, Any]) -> bool:
    """Whether all of a tokenizer.json but its vocabulary and merges does what GPT-2's does."""
    model, split = content["model"], content["pre_tokenizer"]
    added = [(token["content"], token["id"], token["special"]) for token in content["added_tokens"]]
    return (
        content.get("normalizer") is None
        and (split["type"], split["add_prefix_space"]) == ("ByteLevel", False)
        and split.get("use_regex", True)
        and content["decoder"]["type"] == "ByteLevel"
        and added == [(EOT, GPT2_TOKENS, True)]
        and model["vocab"].get(EOT, GPT2_TOKENS) == GPT2_TOKENS
        and model.get("type", "BPE") == "BPE"
        and not any(
            model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        and adds_nothing(content.get("post_processor"))
    )


def sum_of(vocabulary: list[str], merges: list[list[str]]) -> str:
    """SHA-256 (hex) of tokens by id, without end-of-text, and of their merges by rank."""
    return hashlib.sha256(json.dumps([vocabulary, merges]).encode()).hexdigest()


def same(content: Any, ours: dict[str, Any]) -> bool:
    """Whether both tokenizer.json give the same ids and text."""
    if not isinstance(content, dict) or not adds_nothing(content.get("post_processor")):
        return False
    theirs = {key: value for key, value in content.items() if key not in BESIDE_THE_POINT}
    return theirs == {key: value for key, value in ours.items() if key not in BESIDE_THE_POINT}


def adds_nothing(post_processor: Any) -> bool:
    """Whether a post-processor leaves the ids as they are."""
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return True
    template: bool = post_processor["type"] == "TemplateProcessing"
    return template and not post_processor["special_tokens"]


def in_order(ids: dict[str, int]) -> list[str]:
    """Tokens by id."""
    return sorted(ids, key=ids.__getitem__)
