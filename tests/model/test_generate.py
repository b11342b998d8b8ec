"""Text generation: the cache changes nothing, settings have their meaning, no state is left."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.model.generate import context_start, sample_token, stream
from accel_gpt.model.gpt import GPT
from tests.conftest import tiny

VOCAB = 65


def make(config: ModelConfig) -> GPT:
    """Return a model whose choices are so clear that rounding does not change them."""
    torch.manual_seed(2)
    model = GPT(config, VOCAB)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)
    return model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings_of(count: int, **changes: Any) -> SampleConfig:
    neutral = {"temperature": 1.0, "top_k": None}
    return SampleConfig(max_new_tokens=count, **{**neutral, **changes})


def generate(
    model: GPT, prompt: Tensor, config: SampleConfig, generator: torch.Generator, **options: Any
) -> Tensor:
    """Return prompt and new tokens (B, T + max_new_tokens), padded with end-of-text."""
    new = list(stream(model, prompt, config, generator, **options))
    B, T = prompt.shape
    tokens = prompt.new_full((B, T + config.max_new_tokens), options.get("eot_id", 0))
    tokens[:, :T] = prompt
    tokens[:, T : T + len(new)] = torch.stack(new, dim=1)
    return tokens


def run(model: GPT, prompt: Tensor, count: int, seed: int = 0, **changes: Any) -> Tensor:
    names = ("eot_id", "to_the_end")
    options = {name: changes.pop(name) for name in names if name in changes}
    return generate(model, prompt, settings_of(count, **changes), seeded(seed), **options)


PROMPT = torch.tensor([[1, 2, 3], [7, 8, 9]])


SHAPES = {
    "gpt2": tiny(),
    "llama grouped": tiny("llama", n_kv_head=2),
    "odd block": tiny(block_size=7),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_text_is_the_same_with_and_without_cache(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt_length = make(config), 3
    prompt = torch.randint(VOCAB, (2, prompt_length), generator=seeded(5))
    cached = run(model, prompt, 28, temperature=0)
    monkeypatch.setattr(GPT, "make_cache", lambda *_: None)
    assert torch.equal(cached, run(model, prompt, 28, temperature=0))
    assert torch.equal(cached[:, :prompt_length], prompt)
    assert len(cached[0, prompt_length:].unique()) > 3  # not one token over and over


@given(length=st.integers(1, 500), block_size=st.integers(1, 64))
def test_the_context_is_long_and_moves_by_half_blocks(length: int, block_size: int) -> None:
    start, half = context_start(length, block_size), max(block_size // 2, 1)
    assert start % half == 0
    assert 0 < length - start <= block_size
    assert start == 0 or length - (start - half) > block_size  # the smallest shift that fits


def scripted(model: GPT, script: list[list[int]]) -> list[int]:
    """Make the model generate `script` (one list per step); return the list of calls."""
    calls: list[int] = []

    def forward(tokens: Tensor, **_: Any) -> Tensor:
        logits = torch.full((len(tokens), 1, VOCAB), -1e9)
        for row, token in enumerate(script[len(calls)]):
            logits[row, 0, token] = 0.0
        calls.append(tokens.shape[1])
        return logits

    model.forward = forward  # type: ignore[method-assign]
    return calls


def test_texts_end_with_eot_and_generation_when_all_are_done() -> None:
    script = [[5, 6], [0, 7], [9, 0], [9, 9], [9, 9], [9, 9]]
    expected = [[0, 5, 0, 0, 0, 0, 0], [0, 6, 7, 0, 0, 0, 0]]
    prompt = torch.tensor([[0], [0]])  # eot in the prompt does not count
    model = make(tiny())
    calls = scripted(model, script)
    assert run(model, prompt, 6, eot_id=0).tolist() == expected
    assert len(calls) == 3
    calls = scripted(model, script)
    assert run(model, prompt, 6, eot_id=0, to_the_end=True).tolist() == expected
    assert len(calls) == 6


def test_a_stream_that_is_dropped_leaves_the_model_as_it_was() -> None:
    model = make(tiny(dropout=0.5)).train()
    started = stream(model, PROMPT, settings_of(30), seeded())
    next(started)
    del started  # as Ctrl-C does
    assert model.blocks[0].attn.training
    assert torch.is_grad_enabled()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.none() | st.integers(1, 30),
    temperature=st.sampled_from([1e-37, 0.5, 1.0, 3.0]),
)
def test_only_tokens_of_top_k_are_drawn(seed: int, top_k: int | None, temperature: float) -> None:
    logits = 2 * torch.randn(20, generator=seeded(seed))
    drawn = sample_token(logits.expand(200, 20), temperature, top_k, seeded(seed))
    allowed = logits.argsort(descending=True)[:top_k].tolist()
    assert set(drawn.tolist()) <= set(allowed)
    if len(allowed) == 2 and temperature == 3.0:
        assert len(set(drawn.tolist())) == 2


@pytest.mark.parametrize(("top_k", "left"), [(None, 4), (3, 3)])
def test_frequencies_follow_the_probabilities(top_k: int | None, left: int) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    logits = (probabilities.log() * 2).expand(20_000, 4)
    drawn = sample_token(logits, 2.0, top_k, seeded())
    kept = probabilities > 0.45 - left / 10
    expected = probabilities * kept / (probabilities * kept).sum()
    assert (drawn.bincount(minlength=4) / 20_000 - expected).abs().max() < 0.02
