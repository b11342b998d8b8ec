"""The backward pass of causal attention in bf16 on a CPU: PyTorch's beside `model/passes.py`.

    python benchmarks/attention.py [--rounds 15] [--json FILE]

In turn in one process, heads as the model lays them. Prints medians in milliseconds, and of both
the error of the query's gradient (the norm of the difference over the norm) against float64, with
scores whose standard deviation is 1 and 8.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import facts, headline, save, table, timed
from torch import Tensor

from accel_gpt.model.passes import causal_attention
from accel_gpt.run.environment import keep_freed_memory

SHAPES = (  # sequences, heads, tokens, channels of a head
    (12, 4, 64, 32),
    (32, 2, 128, 64),
    (8, 6, 256, 64),
    (2, 12, 512, 64),
    (2, 12, 768, 64),
    (2, 12, 1024, 64),
)
SPREADS = (1, 8)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PYTORCH: Attention = partial(F.scaled_dot_product_attention, is_causal=True)
KINDS = {"PyTorch": PYTORCH, "ours": causal_attention}


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    keep_freed_memory()
    known, found = facts(), []
    for shape in SHAPES:
        ms = times(shape, asked.rounds)
        wrong = {
            f"error {n}, {of}": error(a, shape, of) for of in SPREADS for n, a in KINDS.items()
        }
        found.append({"shape": " x ".join(map(str, shape)), **ms, **wrong})
    rows = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in found]
    print(headline(known))
    print(table([*found[0]], rows))
    save(asked.json, {"facts": known, "found": found})


def times(shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and ours over PyTorch's."""
    given, coming = drawn(shape, 1)
    outs = {name: attend(*given) for name, attend in KINDS.items()}
    spent: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(rounds):
        for name, out in outs.items():
            back = partial(torch.autograd.grad, out, given, coming, retain_graph=True)
            spent[name].append(1e3 * timed(back))
    ms = {name: statistics.median(all_of) for name, all_of in spent.items()}
    return ms | {"ratio": ms["ours"] / ms["PyTorch"]}


def error(attend: Attention, shape: tuple[int, ...], spread: float) -> float:
    """Of the gradient of the query, against PyTorch's in float64."""
    given, coming = drawn(shape, spread)
    wide = [x.detach().double().requires_grad_() for x in given]
    found = torch.autograd.grad(attend(*given), given[0], coming)[0]
    exact = torch.autograd.grad(PYTORCH(*wide), wide[0], coming.double())[0]
    return ((found - exact).norm() / exact.norm()).item()


def drawn(shape: tuple[int, ...], spread: float) -> Any:
    """Queries, keys and values, and the gradient that comes."""
    sequences, heads, tokens, channels = shape
    torch.manual_seed(0)
    found = torch.randn(4, sequences, tokens, heads, channels)
    found[0] *= spread
    *given, coming = found.bfloat16().transpose(2, 3).unbind()
    return [x.detach().requires_grad_() for x in given], coming


if __name__ == "__main__":
    main()
