"""Compare a GGUF file, opened with llama.cpp in a new process, with what our model computed."""

import json
import random
import string
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.model.gpt import GPT
from accel_gpt.publish.gguf_tokenizer import Vocabulary
from accel_gpt.transformers_io.export import compare_in_child

LLAMA_CPP = "xllamacpp"  # the Python package that holds llama.cpp
COMPARED_TOKENS = 256  # of the first sequence
COMPARED_POSITIONS = 16  # at each, the logits of the whole vocabulary are compared
COMPARED_TEXTS = 500
# Largest difference of a logit in float32, in standard deviations of the logits. Measured with
# random weights of std 0.02 to 0.1 in 2 to 24 layers: 2e-5. ggml computes GELU by a table of
# float16 (ggml/src/ggml-cpu/vec.h); measured with it: 2e-3.
TOLERANCE = 1e-3
GELU_TOLERANCE = 2e-2
# Kinds of characters that pre-tokenizers treat differently
CHARACTERS = (
    string.ascii_letters,
    string.digits,
    string.punctuation,
    " \t\n\r\u00a0\u3000",
    "'s 't 're 've 'm 'll 'd 'S 'T",
    "àéîõüßøñçÅ",
    "абвгдежзийклмн",
    "日本語中文字符한국어",
    "😀👍🏽👩‍💻🇩🇪✨",
    "αβγδ∑∫≤²½",
)


@dataclass(frozen=True)
class Reference:
    """What our model computes, for `compare_gguf.py`.

    `values` are `tokens` (T,), `lengths` (N,) of the beginnings after which the next token is
    predicted, and its `log_probabilities` (N, V). `settings` holds texts, their ids and the
    tolerance.
    """

    values: dict[str, Tensor]
    settings: dict[str, Any]


@torch.no_grad()
def compute_reference(
    model: GPT, tokenizer: Tokenizer, vocabulary: Vocabulary, tokens: Tensor
) -> Reference:
    """Compute what a file of `model` must compute: the beginnings of `tokens` (B, T), and texts."""
    longest = min(COMPARED_TOKENS, model.config.block_size - 1)  # one more is predicted
    prompt = tokens[0, :longest].clone()
    lengths = torch.linspace(1, len(prompt), steps=min(COMPARED_POSITIONS, len(prompt))).long()
    logits = model(prompt.unsqueeze(0))[0]  # (T, V)
    values = {
        "tokens": prompt,
        "lengths": lengths,
        "log_probabilities": logits[lengths - 1].float().log_softmax(-1),
    }
    texts = texts_to_compare(tokenizer.decode(tokens[0].tolist()), COMPARED_TEXTS)
    texts += [f"a {token} b{token}" for token in vocabulary.added]
    # see the warning of `pre_tokenizer_name`
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    settings = {
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "block_size": model.config.block_size,
        "plain_token": plain_token(tokenizer),
        "tolerance": GELU_TOLERANCE if model.config.mlp == "gelu" else TOLERANCE,
    }
    return Reference(values, settings)


def compare_gguf(file: Path, reference: Reference, exact: bool = True) -> dict[str, Any]:
    """Open a file with llama.cpp in a new process; return the report of `compare_gguf.py`.

    `exact`: raise `CheckpointError` if the file, of float32, computes something else; otherwise
    only measure the difference. Raises `UserError` if llama.cpp cannot open the file.
    """
    settings = reference.settings if exact else {**reference.settings, "tolerance": None}
    return compare_in_child(
        exported=file,
        name=file.name,
        reference=reference.values,
        metadata={"settings": json.dumps(settings)},
        module="accel_gpt.publish.compare_gguf",
        program="llama.cpp",
    )


def plain_token(tokenizer: Tokenizer) -> int:
    """Return the id of a token of whole printable characters."""

    def is_plain(i: int) -> bool:
        text = tokenizer.decode([i])
        return bool(text) and text.isprintable() and "\ufffd" not in text

    return next(i for i in range(tokenizer.vocab_size) if i != tokenizer.eot_id and is_plain(i))


def texts_to_compare(text: str, n: int) -> list[str]:
    """Return `n` texts: pieces of `text`, and random mixtures of many kinds of characters."""
    draw = random.Random(0)
    texts = []
    for number in range(n):
        start = draw.randrange(len(text))
        if number % 2 == 0 and not text.isspace():
            texts.append(text[start : start + draw.randrange(1, 200)])
        else:
            words = draw.choices(CHARACTERS, k=draw.randrange(1, 12))
            texts.append("".join(draw.choice(word) for word in words for _ in range(3)))
    return texts
