"""Translate a tokenizer for a GGUF file, if llama.cpp splits text as it does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_gpt.console import write_err
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.data.tokenizer_json import EOT, PATTERN
from accel_gpt.errors import UserError, require

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens in a GGUF file
# llama.cpp rejects a byte-level tokenizer without merges. It merges from single characters, so this
# pair never occurs.
NO_MERGES = (f"{EOT} {EOT}",)
BYTE_LEVEL, SINGLE_DIGITS = "ByteLevel with its regex", "Digits one by one"
# llama.cpp's name for the steps by which a tokenizer.json splits text: of Llama 3 and our BPE,
# Qwen 2 and 3, GPT-2, and SmolLM
PRE_TOKENIZERS = MappingProxyType(
    {
        (PATTERN,): "llama-bpe",
        (PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),): "qwen2",
        (BYTE_LEVEL,): "gpt-2",
        (SINGLE_DIGITS, BYTE_LEVEL): "smollm",
    }
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as llama.cpp reads it."""

    tokens: Mapping[int, str]  # by id
    types: Mapping[int, int]  # of the tokens that are not NORMAL, by id
    pre: str  # how text is split before merging
    merges: tuple[str, ...] = ()
    added: tuple[str, ...] = ()  # added tokens; special ones are plain text in a text


def add_tokenizer(
    writer: "GGUFWriter", tokenizer: Tokenizer, vocabulary: Vocabulary, vocab_size: int
) -> None:
    """Add the tokenizer to the metadata; ids without a token are unused."""
    tokens = []
    types = []
    for i in range(vocab_size):
        known = i in vocabulary.tokens
        tokens.append(vocabulary.tokens[i] if known else f"[unused {i}]")
        types.append(vocabulary.types.get(i, NORMAL) if known else CONTROL)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(vocabulary.merges or NO_MERGES)
    if tokenizer.eot_id is not None:  # it also begins a document
        writer.add_bos_token_id(tokenizer.eot_id)
        writer.add_eos_token_id(tokenizer.eot_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    template = tokenizer.config.get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def llama_cpp_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Translate a tokenizer; raises `UserError` if llama.cpp splits text in another way."""
    content = json.loads(tokenizer.file_text)
    ids = content["model"].get("vocab", {})
    added = tuple(token["content"] for token in content["added_tokens"])
    require(
        content["model"].get("type", "BPE") == "BPE" and isinstance(ids, dict),
        f"the tokenizer is a {content['model'].get('type')}; only byte-level BPEs can be exported",
    )
    tokens = {i: token for token, i in ids.items()}
    types = {}
    for token in content["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = content["model"]["merges"]
    return Vocabulary(
        tokens=tokens,
        types=types,
        # without merges, it does not matter how text is split
        pre=pre_tokenizer_name(content) if merges else "gpt-2",
        merges=tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in merges),
        added=added,
    )


def pre_tokenizer_name(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a tokenizer.json.

    Raises `UserError` for one that is not in `PRE_TOKENIZERS`.
    """
    outer = content.get("pre_tokenizer") or {}
    steps = tuple(describe_step(step) for step in outer.get("pretokenizers", [outer]))
    found = PRE_TOKENIZERS.get(tuple(step for step in steps if step))
    normalizer = (content.get("normalizer") or {}).get("type")
    if found is None or normalizer not in (None, "NFC"):
        raise UserError(
            f"the tokenizer splits text with the pre-tokenizer {' + '.join(steps) or 'none'} "
            f"after the normalizer {normalizer}; llama.cpp knows those of "
            f"{', '.join(dict.fromkeys(PRE_TOKENIZERS.values()))}"
        )
    if normalizer == "NFC":
        write_err(
            "WARNING: the tokenizer normalizes text to NFC, which llama.cpp leaves out; it splits "
            "accents that are written as two characters into other tokens"
        )
    return found


def describe_step(step: dict[str, Any]) -> str:
    """Return what a step of a pre-tokenizer does, in the terms of `PRE_TOKENIZERS`."""
    kind = str(step.get("type"))
    if kind == "ByteLevel" and step.get("add_prefix_space"):
        return "ByteLevel with a space before a text"
    if kind == "ByteLevel":
        return BYTE_LEVEL if step.get("use_regex", True) else ""
    if kind == "Split":
        return str(step["pattern"].get("Regex"))
    if kind == "Digits" and step.get("individual_digits"):
        return SINGLE_DIGITS
    return kind
