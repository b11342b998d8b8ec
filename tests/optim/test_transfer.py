"""The coordinate check: activations through the first ten steps have one size at every size.

Yang et al. 2022, arXiv 2203.03466, appendix D.1. Learning rates transfer between widths and depths
if the activations change equally fast. benchmarks/transfer.py draws them.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

WIDTHS = [(64, 2), (256, 2)]  # width, depth
DEPTHS = [(64, 2), (64, 16)]
STEPS = 10


@pytest.fixture(scope="module")
def transfer() -> ModuleType:
    """Import benchmarks/transfer.py."""
    folder = ROOT / "benchmarks"
    for name in ("common", "transfer"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules["transfer"]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_activations_have_one_size_at_every_width(transfer: ModuleType, optimizer: str) -> None:
    assert max(transfer.largest_ratio(WIDTHS, optimizer, STEPS, {}).values()) < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_activations_have_one_size_at_every_depth(transfer: ModuleType, optimizer: str) -> None:
    """What the blocks add may grow as the square root of the depth, 2.8 times from 2 to 16."""
    ratios = transfer.largest_ratio(DEPTHS, optimizer, STEPS, {})
    assert ratios.pop("added by the blocks") < 3.3
    assert max(ratios.values()) < 2.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "same", "sizes", "activation", "least"),
    [
        ("muon", {"lr": 0.02}, WIDTHS, "logits", 1.6),
        ("adamw", {"lr": 0.004}, WIDTHS, "added by the blocks", 1.6),
        ("muon", {"residual_lr_factor": 1.0}, DEPTHS, "added by the blocks", 4.5),
    ],
    ids=["head", "matrices", "depth"],
)
def test_without_a_rule_they_do_not(
    transfer: ModuleType,
    optimizer: str,
    same: dict[str, float],
    sizes: Sequence[tuple[int, int]],
    activation: str,
    least: float,
) -> None:
    assert transfer.largest_ratio(sizes, optimizer, STEPS, same)[activation] > least
