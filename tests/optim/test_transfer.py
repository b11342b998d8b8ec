"""The coordinate check: the sizes of activations through the first ten steps, at several sizes.

Yang et al. 2022, arXiv 2203.03466, appendix D.1. Learning rates transfer between widths and depths
if the activations change equally fast.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import config_of
from accel_gpt.config.plan import make_plan
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer, set_rates

Size = tuple[int, int]  # width, depth
Ratios = dict[str, float]
VOCAB = 257
STEPS = 10
WIDTHS = [(64, 2), (256, 2)]
DEPTHS = [(64, 2), (64, 16)]


def family_config(width: int, depth: int, optimizer: str) -> Config:
    """Return the config of a size of the family, at one batch and length."""
    return config_of(
        {
            "model.depth": depth,
            "model.n_embd": width,
            "model.block_size": 32,
            "model.vocab_size": VOCAB,
            "optim.name": optimizer,
            "train.tokens_per_step": 4096,
            "train.max_steps": int(__import__("os").environ.get("ST", "400")),
        }
    )


def sizes_after(config: Config, steps: int) -> dict[str, float]:
    """Train some steps on text; return the root mean square of two activations."""
    torch.manual_seed(1)
    model = GPT(config.model, VOCAB)
    optimizer = make_optimizer(model, config.optim)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // 33 * 33].view(-1, 33)
    plan = make_plan(config, 1)
    for step in range(steps):
        set_rates(optimizer, config, plan, step)
        batch = rows[torch.arange(8) + 8 * step]
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, float] = {}

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        found["residual stream"] = output.square().mean().sqrt().item()

    model.blocks[-1].register_forward_hook(hook)
    with torch.no_grad():
        logits = model(rows[:8, :-1])
    # The embedding has size 1; what the blocks add is hardly correlated with it. At the start they
    # add nothing, and 0.01 keeps the ratio of two sizes finite.
    added = found.pop("residual stream") ** 2 - 1
    found["added by the blocks"] = math.sqrt(max(added, 0)) + 0.01
    found["logits"] = logits.std(-1).mean().item()
    return found


def largest_ratio(sizes: Sequence[Size], optimizer: str, steps: int, **same: float) -> Ratios:
    """Return for each activation its largest value over its smallest.

    `same`: options of the optimizer that have one value at all sizes, instead of the rule's.
    """
    found = []
    for size in sizes:
        config = family_config(*size, optimizer)
        found.append(sizes_after(replace(config, optim=replace(config.optim, **same)), steps))
    ratios = {}
    for name in found[0]:
        values = [one[name] for one in found]
        ratios[name] = max(values) / min(values)
    return ratios


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_activations_have_one_size_at_every_width(optimizer: str) -> None:
    assert max(largest_ratio(WIDTHS, optimizer, steps=0).values()) < 1.2
    assert max(largest_ratio(WIDTHS, optimizer, steps=STEPS).values()) < 1.4


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_what_blocks_add_grows_slower_than_the_root_of_the_depth(optimizer: str) -> None:
    assert max(largest_ratio(DEPTHS, optimizer, steps=0).values()) < 1.2
    assert max(largest_ratio(DEPTHS, optimizer, steps=STEPS).values()) < 2.4


@pytest.mark.parametrize(
    ("optimizer", "same", "sizes", "activation", "least"),
    [
        ("muon", {"lr": 0.02}, WIDTHS, "logits", 1.6),
        ("adamw", {"head_lr": 0.02}, WIDTHS, "logits", 1.6),
        ("adamw", {"lr": 0.004}, WIDTHS, "added by the blocks", 1.6),
        ("muon", {"residual_lr_factor": 1.0}, DEPTHS, "added by the blocks", 2.8),
        ("adamw", {"residual_lr_factor": 1.0}, DEPTHS, "added by the blocks", 2.8),
    ],
    ids=["head, Muon", "head, AdamW", "matrices", "depth, Muon", "depth, AdamW"],
)
def test_without_a_rule_they_do_not(
    optimizer: str, same: dict[str, float], sizes: list[Size], activation: str, least: float
) -> None:
    assert largest_ratio(sizes, optimizer, steps=STEPS, **same)[activation] > least
