"""Tokens per second of sampling with and without the key-value cache.

    python benchmarks/sample.py CONFIG.yaml [--section.key value ...]

One text of 512 new tokens after a prompt of 8, with weights as they are drawn (the speed does not
depend on them); greedy, and both ways write the same. In turn with and without the cache, for the
context as it is in the config and for one that holds the whole text: a context that is shorter is
moved by half of it when it is full, and then the cache starts anew (`context_start`), as what the
first layers made of the tokens that fell out is in all keys and values of the layers above. Prints
medians over the rounds with their ratios, and the same as JSON.
"""

import json
import statistics
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.parse import load_config
from accel_gpt.console import run_main
from accel_gpt.model.generate import generate
from accel_gpt.model.gpt import GPT
from accel_gpt.training.machine import device_name

NEW_TOKENS = 512
PROMPT = 8
ROUNDS = 5


def main(argv: list[str]) -> int:
    """Measure both contexts."""
    config = load_config(argv, "benchmarks/sample.py")
    vocab_size = config.model.vocab_size or config.data.prepare.vocab_size
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    found = {}
    for block_size in dict.fromkeys((config.model.block_size, NEW_TOKENS + PROMPT)):
        shape = replace(config.model, block_size=block_size)
        found[block_size] = compare(shape, vocab_size, device)
    print(f"{'block_size':>10} {'cached':>12} {'not cached':>12} {'ratio':>7}   same text")
    for block_size, row in found.items():
        cached, bare = row["cached_tokens_per_second"], row["tokens_per_second"]
        print(f"{block_size:10,} {cached:12,.1f} {bare:12,.1f} {row['ratio']:7.2f}   {row['same']}")
    facts = {"device": device_name(device), "threads": torch.get_num_threads()}
    facts |= {"new_tokens": NEW_TOKENS, "prompt": PROMPT, "rounds": ROUNDS}
    print(json.dumps(facts | {"by_block_size": found}))
    return 0


def compare(
    shape: ModelConfig, vocab_size: int, device: torch.device, rounds: int = ROUNDS
) -> dict[str, float | bool]:
    """Medians of both ways, their ratio, and whether they wrote the same."""
    torch.manual_seed(0)
    model = GPT(shape, vocab_size).to(device)
    prompt = torch.randint(vocab_size, (1, PROMPT)).to(device)
    for use_cache in (True, False):
        write(model, prompt, use_cache, 16)  # the first calls take longer
    seconds: dict[bool, list[float]] = {True: [], False: []}
    texts = {}
    for _ in range(rounds):
        for use_cache, spent in seconds.items():
            start = time.perf_counter()
            texts[use_cache] = write(model, prompt, use_cache, NEW_TOKENS).tolist()  # waits
            spent.append(time.perf_counter() - start)
    cached, bare = (NEW_TOKENS / statistics.median(spent) for spent in seconds.values())
    return {
        "cached_tokens_per_second": cached,
        "tokens_per_second": bare,
        "ratio": cached / bare,
        "same": texts[True] == texts[False],
    }


def write(model: GPT, prompt: Tensor, use_cache: bool, count: int) -> Tensor:
    """`count` tokens after `prompt`, greedily."""
    greedy = SampleConfig(max_new_tokens=count, temperature=0)
    return generate(model, prompt, greedy, torch.Generator(prompt.device), use_cache=use_cache)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
