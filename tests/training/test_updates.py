"""The size of an update is measured as a share of the weights, by part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_gpt.model.gpt import GPT
from accel_gpt.training import updates
from accel_gpt.training.updates import RATIO, UpdateSizes, part_of
from tests.conftest import tiny


def sizes_of(gpt: GPT) -> UpdateSizes:
    optimizer: Any = SimpleNamespace(param_groups=[{"params": list(gpt.parameters())}])
    accelerator: Any = SimpleNamespace()
    return UpdateSizes(gpt, optimizer, accelerator)


@pytest.mark.parametrize("sampled", [10**6, 8])
def test_ratios_are_those_of_the_norms(monkeypatch: pytest.MonkeyPatch, sampled: int) -> None:
    """A sample gives the same ratio if all numbers of a weight change by the same share."""
    monkeypatch.setattr(updates, "SAMPLED", sampled)
    gpt = GPT(tiny(), 100)
    sizes = sizes_of(gpt)
    sizes.begin()
    with torch.no_grad():
        for name, weight in gpt.named_parameters():
            weight.mul_(1.5 if "mlp" in name else 1.25 if "wte" in name else 1)
    sizes.end()
    found = sizes.metrics()
    assert found == {
        f"{RATIO}/wte": pytest.approx(0.25),
        f"{RATIO}/wpe": 0,
        f"{RATIO}/blocks.attn": 0,
        f"{RATIO}/blocks.mlp": pytest.approx(0.5),
        f"{RATIO}/least": 0,
    }
    assert sizes.metrics() == {}


def test_a_weight_counts_as_much_as_it_has_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part with weights of two sizes, a sample of the larger one stands for more numbers."""
    found = []
    for sampled in (10**6, 8):
        monkeypatch.setattr(updates, "SAMPLED", sampled)
        gpt = GPT(tiny(), 100)
        with torch.no_grad():
            for weight in gpt.parameters():
                weight.fill_(1.0)
        sizes = sizes_of(gpt)
        sizes.begin()
        with torch.no_grad():
            for block in gpt.blocks:
                block.get_parameter("attn.qkv.weight").add_(1)
        sizes.end()
        found.append(sizes.metrics()[f"{RATIO}/blocks.attn"])
    assert found == [pytest.approx((3 / 4) ** 0.5)] * 2  # qkv has three of four numbers


def test_one_weight_that_stands_still_is_the_least() -> None:
    gpt = GPT(tiny(), 100)
    sizes = sizes_of(gpt)
    sizes.begin()
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.add_(0.1)
        fixed = gpt.blocks[1].mlp.get_submodule("down").get_parameter("weight")
        fixed.sub_(0.1)
    sizes.end()
    found = sizes.metrics()
    assert found[f"{RATIO}/least"] == pytest.approx(0, abs=1e-6)
    assert found[f"{RATIO}/blocks.mlp"] > 0.1


def test_an_embedding_that_stands_still_is_not_the_least() -> None:
    """Only the rows of the tokens in a batch have a gradient."""
    gpt = GPT(tiny("llama", tie_embeddings=False), 100)
    sizes = sizes_of(gpt)
    sizes.begin()
    with torch.no_grad():
        for weight in gpt.matrices():
            weight.mul_(1.5)
    sizes.end()
    found = sizes.metrics()
    assert found[f"{RATIO}/wte"] == 0
    assert found[f"{RATIO}/least"] == pytest.approx(0.5)


def test_weights_of_zeros_have_no_ratio() -> None:
    gpt = GPT(tiny("fast", zero_init=True), 100)
    sizes = sizes_of(gpt)
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.zero_()
        sizes.begin()
        for weight in gpt.parameters():
            weight.add_(1)
    sizes.end()
    assert sizes.metrics() == {}


def test_parts_are_paths_without_numbers() -> None:
    names = ["blocks.3.attn.qkv.weight", "wte.weight", "layers.0.0.weight", "weight"]
    assert [part_of(name) for name in names] == ["blocks.attn", "wte", "layers", "model"]
