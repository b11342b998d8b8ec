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

from accel_gpt.data.tokenizer import CharsTokenizer, Tokenizer
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
class Compared:
    """What a float32 file was compared with, and the result in words."""

    reference: dict[str, Tensor]
    settings: dict[str, Any]
    description: str


def prove_equal_gguf(
    model: GPT,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    tokens: Tensor,
    file: Path,
) -> Compared:
    """Open a float32 file with llama.cpp in a new process and compare it with `model`.

    Compares the logits after the beginnings of `tokens` (B, T), and the ids of texts. Raises
    `CheckpointError` if they differ, `UserError` if llama.cpp cannot open the file.
    """
    texts = texts_to_compare(tokenizer, tokenizer.decode(tokens[0].tolist()), COMPARED_TEXTS)
    texts += [f"a {token} b{token}" for token in vocabulary.added]
    if not isinstance(tokenizer, CharsTokenizer):  # see the warning of `pre_tokenizer_name`
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    tolerance = GELU_TOLERANCE if model.config.mlp == "gelu" else TOLERANCE
    reference = gguf_reference(model, tokens)
    settings = {
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "block_size": model.config.block_size,
        "plain_token": plain_token(tokenizer),
        "tolerance": tolerance,
    }
    report = run_comparison(file, reference, settings)
    return Compared(
        reference=reference,
        settings=settings,
        description=(
            f"opened by llama.cpp ({LLAMA_CPP} {report['version']}): its logits at "
            f"{len(reference['lengths'])} tokens differ by at most {report['difference']:.1e} from "
            f"ours in float32; the ids of {len(texts):,} texts are equal"
        ),
    )


def measure_difference(file: Path, compared: Compared) -> float:
    """Open a file of a smaller type with llama.cpp; return the largest difference of a logit."""
    report = run_comparison(file, compared.reference, {**compared.settings, "tolerance": None})
    difference: float = report["difference"]
    return difference


def run_comparison(
    file: Path, reference: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """Run `compare_gguf.py` in a new process; return its report."""
    return compare_in_child(
        exported=file,
        name=file.name,
        reference=reference,
        metadata={"settings": json.dumps(settings)},
        module="accel_gpt.publish.compare_gguf",
        program="llama.cpp",
    )


@torch.no_grad()
def gguf_reference(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """Return the values that `compare_gguf.py` compares.

    They are `tokens` (T,), `lengths` (N,) of the beginnings after which the next token is
    predicted, and its `log_probabilities` (N, V).
    """
    longest = min(COMPARED_TOKENS, model.config.block_size - 1)  # one more is predicted
    prompt = tokens[0, :longest].clone()
    steps = min(COMPARED_POSITIONS, len(prompt))
    lengths = torch.linspace(1, len(prompt), steps=steps).long()
    logits = model(prompt.unsqueeze(0))[0]  # (T, V)
    log_probabilities = logits[lengths - 1].float().log_softmax(-1)
    return {"tokens": prompt, "lengths": lengths, "log_probabilities": log_probabilities}


def plain_token(tokenizer: Tokenizer) -> int:
    """Return the id of a token of whole printable characters."""

    def is_plain(i: int) -> bool:
        text = tokenizer.decode([i])
        return bool(text) and text.isprintable() and "\ufffd" not in text

    return next(i for i in range(tokenizer.vocab_size) if i != tokenizer.eot_id and is_plain(i))


def texts_to_compare(tokenizer: Tokenizer, text: str, n: int) -> list[str]:
    """Return `n` texts: pieces of `text`, and random mixtures of many kinds of characters."""
    kinds = (tokenizer.chars,) if isinstance(tokenizer, CharsTokenizer) else CHARACTERS
    draw = random.Random(0)
    texts = []
    for number in range(n):
        start = draw.randrange(len(text))
        if number % 2 == 0 and not text.isspace():
            texts.append(text[start : start + draw.randrange(1, 200)])
        else:
            words = draw.choices(kinds, k=draw.randrange(1, 12))
            texts.append("".join(draw.choice(word) for word in words for _ in range(3)))
    return texts
