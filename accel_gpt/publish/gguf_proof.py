"""Compare a GGUF file, opened with llama.cpp in a new process, with what our model computed.

    python -m accel_gpt.publish.gguf_proof MODEL.gguf REFERENCE.safetensors

The new process starts llama.cpp's server and asks it over HTTP. REFERENCE holds the values and
settings of a `Reference`. Prints one JSON object. If the two differ too much, prints one sentence
and exits with code `DIFFERENT`. Without a tolerance it only measures the difference.
"""

import importlib.metadata
import json
import math
import random
import string
import sys
import unicodedata
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.model.gpt import GPT
from accel_gpt.publish.gguf_tokenizer import Vocabulary
from accel_gpt.transformers_io.compare_export import DIFFERENT
from accel_gpt.transformers_io.export import compare_in_child

CONTEXT = 4096  # tokens of llama.cpp, at most
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
    """What our model computes, for the new process.

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
    """Open a file with llama.cpp in a new process; return its report.

    `exact`: raise `CheckpointError` if the file, of float32, computes something else; otherwise
    only measure the difference. Raises `UserError` if llama.cpp cannot open the file.
    """
    settings = reference.settings if exact else {**reference.settings, "tolerance": None}
    return compare_in_child(
        exported=file,
        name=file.name,
        reference=reference.values,
        metadata={"settings": json.dumps(settings)},
        module="accel_gpt.publish.gguf_proof",
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


# --------------------------------------------------------------------------- the new process


def main(argv: Sequence[str]) -> int:
    """Compare; return the exit code."""
    file, reference = argv
    with safe_open(reference, framework="pt") as opened:
        names = opened.keys()  # a safetensors file cannot be iterated
        ours = {name: opened.get_tensor(name) for name in names}
        settings = json.loads(opened.metadata()["settings"])
    server = Server(file, settings["block_size"], settings["plain_token"])
    found = torch.stack(
        [
            server.log_probabilities(ours["tokens"][:length], ours["log_probabilities"].shape[1])
            for length in ours["lengths"].tolist()
        ]
    )
    difference = largest_logit_difference(ours["log_probabilities"], found)
    problem = None
    if settings["tolerance"] is not None:  # in standard deviations of the logits
        allowed = settings["tolerance"] * ours["log_probabilities"].std(-1).mean().item()
        if difference > allowed:
            problem = (
                f"its logits differ from ours by up to {difference:.2e}; allowed are {allowed:.2e}"
            )
        for text, ids in zip(settings["texts"], settings["ids"], strict=True):
            if server.encode(text) != ids:
                problem = f"its tokenizer returns different ids for {text[:40]!r}"
                break
    if problem:
        sys.stderr.write(f"llama.cpp: {problem}\n")
        return DIFFERENT
    version = importlib.metadata.version(LLAMA_CPP)
    sys.stdout.write(json.dumps({"difference": difference, "version": version}))
    return 0


class Server:
    """Run llama.cpp on a GGUF file, with float32 keys and values and without flash attention.

    `plain_token`: a token of whole characters that is not end-of-text.
    """

    def __init__(self, file: str, block_size: int, plain_token: int) -> None:
        import xllamacpp

        self.plain_token = plain_token
        params = xllamacpp.CommonParams()
        params.model.path = file
        params.n_ctx = min(block_size, CONTEXT)
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = False
        params.fit_params = False
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy

    def ask(self, path: str, **content: Any) -> Any:
        """Post `content` to an address of the server and return its answer."""
        request = urllib.request.Request(
            f"{self.server.listening_address}{path}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with self.opener.open(request) as answer:
            return json.load(answer)

    def log_probabilities(self, tokens: Tensor, vocab_size: int) -> Tensor:
        """Return the log-probabilities (V,) of the token after `tokens` (T,)."""
        # the server answers without probabilities if it chooses end-of-text or half a character;
        # a bias changes its choice, not the probabilities
        answer = self.ask(
            "/completion",
            prompt=tokens.tolist(),
            n_predict=1,
            temperature=0,
            cache_prompt=False,
            n_probs=vocab_size,
            logit_bias=[[self.plain_token, 1e4]],
        )
        found = torch.full((vocab_size,), float("nan"))
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that llama.cpp adds by default, if any."""
        answer = self.ask("/tokenize", content=text, add_special=True, parse_special=False)
        ids: list[int] = answer["tokens"]
        return ids


def largest_logit_difference(ours: Tensor, found: Tensor) -> float:
    """Return the largest difference of two log-probabilities (N, V); infinite if one is NaN.

    A constant for each of the N tokens is left out: llama.cpp's server sums the V probabilities one
    after another in float32. For 50,000 of them, the error of the sum is 1e-3.
    """
    difference = found - ours
    largest = (difference - difference.mean(-1, keepdim=True)).abs().max().item()
    return math.inf if math.isnan(largest) else largest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
