"""The coordinate check: activations have one size at every width and depth, for ten steps.

Yang et al. 2022, arXiv 2203.03466, appendix D.1. Hyperparameters transfer between sizes only if
this holds.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import config_of
from accel_gpt.config.plan import make_plan
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer, set_rates

VOCAB = 257
STEPS = 10
WIDTHS = [(width, 2) for width in (64, 128, 256, 512)]  # width, depth
DEPTHS = [(64, depth) for depth in (2, 4, 8, 16)]


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
    """Train some steps on text; return the root mean square of some activations."""
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
    found["logits"] = logits.std(-1).mean().item()
    return found


def spread(sizes: list[tuple[int, int]], optimizer: str, steps: int, **changes: object) -> float:
    """Return the largest ratio between two sizes of an activation."""
    found = [sizes_after(family_config(*size, optimizer), steps) for size in sizes]
    ratios = []
    for name in found[0]:
        values = [one[name] for one in found]
        ratios.append(max(values) / min(values))
    return max(ratios)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("sizes", [WIDTHS, DEPTHS], ids=["widths", "depths"])
def test_activations_have_one_size(sizes: list[tuple[int, int]], optimizer: str) -> None:
    for steps in (0, STEPS):
        print(steps, [sizes_after(family_config(*size, optimizer), steps) for size in sizes])
