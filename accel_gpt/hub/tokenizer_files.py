"""A tokenizer as files that `transformers.AutoTokenizer` opens, without code of ours.

Writes tokenizer.json and tokenizer_config.json, which holds the chat template that the tokenizer
came with, if any. `load_tokenizer` reads the folder back as the equal tokenizer.
"""

import json
from pathlib import Path
from typing import Any

from accel_gpt.data import tokenizer_json
from accel_gpt.data.bpe import EOT
from accel_gpt.data.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    HFTokenizer,
    RankTokenizer,
    Tokenizer,
    own_file,
)
from accel_gpt.data.tokenizer_json import CONFIG, FILE

# The class that takes tokenizer.json as it is. transformers 5 calls it TokenizersBackend and knows
# it by this name too, which transformers 4 and the servers built on it know alone.
CLASS = "PreTrainedTokenizerFast"


def save_for_transformers(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Write `tokenizer` into `folder`, which exists; `block_size`: tokens, for model_max_length.

    `encode(text, add_special_tokens=False)`, `decode(ids)` and `eos_token_id` of transformers are
    then ours, but for two things. The spelling of a special token within a text, such as
    "<|endoftext|>", is that token for transformers and plain text here (`split_special_tokens`
    makes it so there too). A character that a chars tokenizer does not know raises
    "WordLevel error: Missing [UNK] token from the vocabulary", where ours raises `UserError`.
    """
    settings = json.dumps(transformers_config(tokenizer, block_size), ensure_ascii=False, indent=2)
    (folder / FILE).write_text(transformers_json(tokenizer), encoding="utf-8")
    (folder / CONFIG).write_text(settings + "\n", encoding="utf-8")


def transformers_json(tokenizer: Tokenizer) -> str:
    """Text of the tokenizer.json; one that the tokenizer came from stays as it was."""
    if isinstance(tokenizer, BytesTokenizer):
        content = tokenizer_json.bytes_content()
    elif isinstance(tokenizer, CharsTokenizer):
        content = tokenizer_json.chars_content(tokenizer.chars)
    elif isinstance(tokenizer, RankTokenizer) and tokenizer.file_text == own_file("gpt2"):
        content = gpt2_content(tokenizer)
    else:
        return tokenizer.file_text
    return json.dumps(content, ensure_ascii=False)


def gpt2_content(tokenizer: RankTokenizer) -> dict[str, Any]:
    """GPT-2's tokenizer.json, made from tiktoken's ranks in about a second."""
    token = tokenizer.encoding.decode_single_token_bytes
    vocabulary = tokenizer_json.spelled([token(i) for i in range(tokenizer_json.GPT2_TOKENS)])
    return tokenizer_json.gpt2_content(vocabulary, tokenizer_json.merges_of(vocabulary))


def transformers_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """Content of tokenizer_config.json: what the tokenizer came with, and what must be so.

    eos_token is what ends a document in the training data, also where a chat ended otherwise.
    """
    config = {key: readable(value) for key, value in tokenizer.config.items()} | {
        "tokenizer_class": CLASS,
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    end = tokenizer.eot if isinstance(tokenizer, HFTokenizer) else EOT
    if tokenizer.eot_id is not None and tokenizer_json.spelling(config.get("eos_token")) != end:
        config["eos_token"] = end
    if tokenizer.eot_id is not None and not isinstance(tokenizer, HFTokenizer):
        config.setdefault("bos_token", EOT)  # as GPT-2: the end of a document begins the next
    return config


def readable(value: object) -> object:
    """A special token as transformers 5 takes it: as a string, or an object that tells its type."""
    untyped = isinstance(value, dict) and "content" in value and "__type" not in value
    return tokenizer_json.spelling(value) if untyped else value
