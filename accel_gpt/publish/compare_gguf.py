"""Compare a GGUF file, opened with llama.cpp, with what our model computed.

    python -m accel_gpt.publish.compare_gguf MODEL.gguf REFERENCE.safetensors

Starts llama.cpp's server in this process and asks it over HTTP. Reads the file and REFERENCE: the
values and settings of a `gguf_proof.Reference`. Prints one JSON object. If the two differ too much,
it prints one sentence and exits with code `DIFFERENT`.
Without a tolerance it only measures the difference.
"""

import importlib.metadata
import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accel_gpt.transformers_io.compare_export import DIFFERENT

CONTEXT = 4096  # tokens, at most


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
