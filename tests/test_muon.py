"""Muon: the updates of torch's own, on each matrix of a fused weight, and none where it is told."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_gpt.errors import UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.optim import muon
from accel_gpt.optim.groups import configure, make_optimizer, set_lr
from accel_gpt.optim.muon import MuonAdamW, hidden_matrices, orthogonalize
from accel_gpt.optim.schedule import momentum_at
from accel_gpt.optim_config import OptimConfig
from tests.conftest import launch, tiny
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]
MUON = ("--optim.name", "muon")


def model(preset: str = "llama", **changes: Any) -> GPT:
    """With grouped queries and a gate, so that fused weights are of matrices of unlike height."""
    torch.manual_seed(0)
    return GPT(tiny(preset, **{"n_kv_head": 2, **changes}), 64)


def gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=generator)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of weights and state, by name."""
    found = {name: p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        found |= {f"{name}.{k}": v.clone() for k, v in optimizer.state[p].items()}
    return found


def matrices(net: GPT) -> dict[str, Tensor]:
    """Each matrix by itself, written out."""
    found = {}
    for i, block in enumerate(net.blocks):
        attn, mlp = block.attn, block.mlp
        H, K = attn.heads[0] * attn.head_size, attn.heads[1] * attn.head_size
        q, k, v = attn.qkv.weight.detach().split([H, K, K])
        found |= {f"{i}.q": q, f"{i}.k": k, f"{i}.v": v, f"{i}.o": attn.proj.weight.detach()}
        up = mlp.up.weight.detach()
        found |= dict(zip((f"{i}.gate", f"{i}.up"), up.chunk(2) if mlp.gated else (up, up[:0])))
        found[f"{i}.down"] = mlp.down.weight.detach()
    return {name: matrix for name, matrix in found.items() if len(matrix)}


def gradient_of(net: GPT) -> dict[str, Tensor]:
    """The gradients of `matrices`."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), net.parameters(), strict=True):
            assert q.grad is not None
            p.copy_(q.grad)
    return matrices(twin)


def oracle(net: GPT, config: OptimConfig) -> tuple[dict[str, nn.Parameter], list[Any]]:
    """torch's Muon on split copies of the matrices, torch's AdamW on copies of the rest."""
    Muon: Any = pytest.importorskip("torch.optim._muon").Muon
    split = {name: nn.Parameter(m.clone()) for name, m in matrices(net).items()}
    taken = {id(w) for weights in hidden_matrices(net).values() for w in weights}
    rest = {n: nn.Parameter(p.detach().clone()) for n, p in net.named_parameters() if id(p) not in taken}
    decayed = [p for p in rest.values() if p.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": [p for p in rest.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    both = [
        Muon(split.values(), config.muon_peak, config.weight_decay, config.muon_momentum,
             adjust_lr_fn=config.muon_scale),
        torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, fused=True),
    ]  # fmt: skip
    return split | rest, both


def follow(net: GPT, config: OptimConfig, optimizer: MuonAdamW, tolerance: float) -> None:
    """Several steps of ours and of torch's."""
    copies, both = oracle(net, config)
    for step in range(5):
        gradients(net, step)
        of_matrices, named = gradient_of(net), dict(net.named_parameters())
        for name, p in copies.items():
            p.grad = of_matrices[name] if name in of_matrices else named[name].grad
        for one in (optimizer, *both):
            set_lr(optimizer, 1 - step / 10)
            for group in one.param_groups:
                if one is not optimizer:
                    group["lr"] = group["initial"] = group.get("initial", group["lr"])
                    group["lr"] *= 1 - step / 10
            one.step()
        now = matrices(net)
        for name, p in copies.items():
            if name in now:
                torch.testing.assert_close(now[name], p.detach(), atol=tolerance, rtol=0)
            else:
                assert torch.equal(named[name].detach(), p.detach()), name


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("preset", ["llama", "gpt2", "fast"])
def test_updates_are_those_of_torch(
    preset: str, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, in which torch's has to be made to compute."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    net = model(preset, n_kv_head=None if preset == "gpt2" else 2)
    config = OptimConfig("muon", lr=0.02, muon_scale=rule, weight_decay=0.3)
    optimizer = make_optimizer(net, config)
    assert isinstance(optimizer, MuonAdamW)
    follow(net, config, optimizer, 1e-6)


def test_updates_in_bfloat16_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked products may round in another way: 2^-8 of the largest update, a few times."""
    net = model()
    config = OptimConfig("muon", lr=0.02, weight_decay=0.3)
    optimizer = make_optimizer(net, config)
    assert isinstance(optimizer, MuonAdamW)
    optimizer.dtype = torch.bfloat16
    follow(net, config, optimizer, 5e-3)
