"""Compare a GGUF file, opened with llama.cpp, with what our model computed.

    python -m accel_gpt.publish.verify_gguf MODEL.gguf REFERENCE.safetensors

Starts llama.cpp's server in this process and asks it over HTTP. Reads the file and REFERENCE: the
values of `gguf.gguf_reference`, and settings with texts and their ids. Prints one JSON object. If
the two differ it prints one sentence and exits with code `DIFFERENT`.
"""

import importlib.metadata
import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accel_gpt.transformers_io.verify import DIFFERENT

CONTEXT = 4096  # tokens, at most
# Largest difference of a logit in float32, in standard deviations of the logits. Measured with
# random weights of std 0.02 to 0.5 in 2 to 12 layers: 2e-4.
TOLERANCE = 1e-3
# How far the logits may be from our rounded model's, as a multiple of what rounding changes: root
# mean square, and largest. llama.cpp adds in another order, so some values round differently, and a
# deep model carries that on. Two independent roundings differ by sqrt(2) times one. Measured with
# random weights of all presets in 2 to 28 layers: up to 1.5 and 1.7. Wrong rotary positions: at
# least 4.4 and 3.2 with weights of std 0.06 to 0.5. With weights of std 0.02 they change the logits
# about as much as bf16 and q8_0 do, and cannot be told apart.
ROUNDING_RMS = 2.0
ROUNDING_LARGEST = 3.0


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
    difference = centred(found - ours["log_probabilities"]).abs().max().item()
    problem = (
        different_ids(server, settings["texts"], settings["ids"])
        or different_values(ours, found)
        or different_tokens(server, ours)
    )
    if problem:
        sys.stderr.write(f"llama.cpp: {problem}\n")
        return DIFFERENT
    version = importlib.metadata.version("xllamacpp")
    sys.stdout.write(json.dumps({"difference": difference, "version": version}))
    return 0


class Server:
    """Run llama.cpp on a GGUF file, with float32 keys and values and without flash attention.

    `plain_token`: a token of whole characters that is not end-of-text.
    """

    def __init__(self, file: str, block_size: int, plain_token: int) -> None:
        import xllamacpp

        self.plain_token = plain_token
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy
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

    def ask(self, path: str, **content: Any) -> Any:
        """Post `content` to an address of the server and return its answer."""
        request = urllib.request.Request(
            f"{self.server.listening_address}{path}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with self.opener.open(request) as answer:
            return json.load(answer)

    def complete(self, tokens: Tensor, n: int, **options: Any) -> Any:
        """Return the server's answer for `n` greedy tokens after `tokens` (T,)."""
        return self.ask(
            "/completion",
            prompt=tokens.tolist(),
            n_predict=n,
            temperature=0,
            cache_prompt=False,
            return_tokens=True,
            **options,
        )

    def log_probabilities(self, tokens: Tensor, vocab_size: int) -> Tensor:
        """Return the log-probabilities (V,) of the token after `tokens` (T,)."""
        # the server answers without probabilities if it chooses end-of-text or half a character;
        # a bias changes its choice, not the probabilities
        bias = [[self.plain_token, 1e4]]
        answer = self.complete(tokens, 1, n_probs=vocab_size, logit_bias=bias)
        found = torch.full((vocab_size,), float("nan"))
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def greedy(self, tokens: Tensor, n: int) -> list[int]:
        """Return the `n` most likely tokens after `tokens` (T,), one after the other."""
        answer = self.complete(tokens, n)
        ids: list[int] = answer["tokens"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that llama.cpp adds by default, if any."""
        answer = self.ask("/tokenize", content=text, add_special=True, parse_special=False)
        ids: list[int] = answer["tokens"]
        return ids


def different_ids(server: Server, texts: list[str], ids: list[list[int]]) -> str | None:
    """Return the first text that llama.cpp splits into different tokens, if there is one."""
    for text, expected in zip(texts, ids, strict=True):
        if server.encode(text) != expected:
            return f"its tokenizer returns different ids for {text[:40]!r}"
    return None


def different_values(ours: dict[str, Tensor], found: Tensor) -> str | None:
    """Return by how much the log-probabilities (N, V) differ, if it is too much."""
    expected = ours["log_probabilities"]
    rounding = centred(ours["rounded"] - expected)
    difference = centred(found - ours["rounded"])
    allowed = TOLERANCE * expected.std(-1).mean()
    largest = difference.abs().max()
    if largest <= allowed + ROUNDING_LARGEST * rounding.abs().max() and root_mean_square(
        difference
    ) <= allowed + ROUNDING_RMS * root_mean_square(rounding):
        return None
    return (
        f"its logits differ from ours by up to {largest:.2e}; rounding changes them by up to "
        f"{rounding.abs().max():.2e}"
    )


def centred(difference: Tensor) -> Tensor:
    """Return differences of log-probabilities (N, V) less a constant for each of the N tokens.

    llama.cpp's server sums the V probabilities one after another in float32. For 50,000 of them,
    the error of the sum is 1e-3.
    """
    return difference - difference.mean(-1, keepdim=True)


def root_mean_square(values: Tensor) -> Tensor:
    """Compute the root of the mean square ()."""
    return values.square().mean().sqrt()


def different_tokens(server: Server, ours: dict[str, Tensor]) -> str | None:
    """Return where greedy decoding differs, if `ours` has greedy tokens."""
    if "greedy" not in ours:
        return None
    expected = ours["greedy"].tolist()
    if not expected:
        return None
    found = server.greedy(ours["greedy_prompt"], len(expected))
    if found != expected[: len(found)]:  # llama.cpp stops at end-of-text
        return f"its greedy tokens are {found[:8]}..., ours {expected[:8]}..."
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
