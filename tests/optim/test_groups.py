"""Parameter groups: weight decay, and a peak learning rate per group."""

import pytest
import torch
from torch import nn

from accel_gpt.config.experiment import OptimConfig
from accel_gpt.model.gpt import GPT
from accel_gpt.optim import adamw
from accel_gpt.optim.groups import PART, configure, make_optimizer, set_lr
from tests.conftest import tiny


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_without_a_gradient_matrices_shrink_and_vectors_stay(name: str) -> None:
    gpt = GPT(tiny(), 64)
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(1.0)
            p.grad = torch.zeros_like(p)
    before = {key: p.detach().clone() for key, p in gpt.named_parameters()}
    settings = OptimConfig(name, lr=0.1, weight_decay=0.3)  # type: ignore[arg-type]
    optimizer = make_optimizer(gpt, settings)
    set_lr(optimizer, 0.5)
    optimizer.step()
    for key, p in gpt.named_parameters():
        left = 1 - 0.5 * 0.1 * 0.3 if p.dim() == 2 else 1
        torch.testing.assert_close(p.detach(), left * before[key], msg=key)


def test_configure_overrides_what_a_checkpoint_restored() -> None:
    gpt = GPT(tiny(), 64)
    optimizer = make_optimizer(gpt, OptimConfig("muon", lr=0.1, weight_decay=0.5, beta2=0.9))
    restored = make_optimizer(gpt, OptimConfig("muon", lr=0.7, muon_scale="original"))
    restored.load_state_dict(optimizer.state_dict())
    configure(restored, OptimConfig("muon", lr=0.7, weight_decay=0.2, beta2=0.99, muon_lr=0.3))
    groups = [(g["peak_lr"], g["weight_decay"], g.get("betas")) for g in restored.param_groups]
    assert groups[:2] == [(0.7, 0.2, (0.9, 0.99)), (0.7, 0.0, (0.9, 0.99))]
    assert {group[:2] for group in groups[2:]} == {(0.3, 0.2)}
    assert {g.get("scale") for g in restored.param_groups} == {None, "match_rms_adamw"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_embedding_and_head_have_their_own_learning_rates(name: str) -> None:
    gpt = GPT(tiny("fast", norm="rmsnorm"), 64)
    settings = OptimConfig(name, lr=0.1, embedding_lr=0.2, weight_decay=0.3)  # type: ignore[arg-type]
    optimizer = make_optimizer(gpt, settings)
    of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    assert len(of) == sum(len(g["params"]) for g in optimizer.param_groups)
    assert len(of) == len(list(gpt.parameters()))
    assert (of[id(gpt.wte.weight)][PART], of[id(gpt.head.weight)][PART]) == ("embedding", "head")
    assert of[id(gpt.wte.weight)]["peak_lr"] == 0.2
    assert of[id(gpt.head.weight)]["peak_lr"] == of[id(gpt.norm_f.weight)]["peak_lr"] == 0.1
    assert of[id(gpt.head.weight)]["weight_decay"] == 0.3
    restored = make_optimizer(gpt, settings)
    restored.load_state_dict(optimizer.state_dict())
    configure(restored, OptimConfig(name, lr=0.1, head_lr=0.5))  # type: ignore[arg-type]
    rates = {g[PART]: g["peak_lr"] for g in restored.param_groups if PART in g}
    assert rates == {"embedding": 0.1, "head": 0.5}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_projections_onto_the_residual_stream_scale_rate_and_decay(name: str) -> None:
    gpt = GPT(tiny("fast"), 64)
    settings = OptimConfig(name, lr=0.1, weight_decay=0.3, residual_lr_factor=2.0)  # type: ignore[arg-type]
    optimizer = make_optimizer(gpt, settings)
    configure(optimizer, settings)  # a second time, as after a resume
    of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    assert len(of) == sum(len(g["params"]) for g in optimizer.param_groups)
    assert len(of) == len(list(gpt.parameters()))
    for block in gpt.blocks:
        for module in (block.attn.proj, block.mlp.down):  # type: ignore[union-attr]
            group = of[id(module.weight)]  # type: ignore[union-attr]
            assert (group["peak_lr"], group["weight_decay"]) == (0.2, 0.15)
        for module in (block.attn.qkv, block.mlp.up):  # type: ignore[union-attr]
            group = of[id(module.weight)]  # type: ignore[union-attr]
            assert (group["peak_lr"], group["weight_decay"]) == (0.1, 0.3)
    assert of[id(gpt.wte.weight)]["peak_lr"] == 0.1


def test_a_tied_head_has_the_rate_of_the_embedding() -> None:
    gpt = GPT(tiny(), 64)
    optimizer = make_optimizer(gpt, OptimConfig(lr=0.1, embedding_lr=0.2))
    groups = [g for g in optimizer.param_groups if any(p is gpt.head.weight for p in g["params"])]
    assert [g["peak_lr"] for g in groups] == [0.2]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("limit", [0.0, 0.5, 1e3], ids=["off", "clipped", "below"])
def test_clipping_in_the_update_equals_clipping_before_it(name: str, limit: float) -> None:
    """Against torch's clipping of the gradients, in float64."""
    settings = OptimConfig(name, lr=0.1, weight_decay=0.3)  # type: ignore[arg-type]  # a Literal
    ours, plain = (GPT(tiny(), 64).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizers = [make_optimizer(ours, settings), make_optimizer(plain, settings)]
    for seed in range(2):
        torch.manual_seed(seed)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), limit or float("inf"))
        optimizers[0].clip(norm, limit)
        for optimizer in optimizers:
            set_lr(optimizer, 1.0)
            optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert (optimizers[0].divisor is not None) == (limit > 0)


def test_where_the_kernel_ignores_skip_and_divisor_the_host_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Linear(4, 4)
    optimizer = make_optimizer(net, OptimConfig(lr=0.1))
    before = net.weight.detach().clone()
    for p in net.parameters():
        p.grad = torch.full_like(p, 8.0)
    optimizer.clip(torch.tensor(4.0), 2.0)
    monkeypatch.setattr(adamw, "UNGUARDED", ("cpu",))
    for skip in (1.0, 0.0):
        optimizer.skip = torch.tensor(skip)
        optimizer.step()
        assert torch.equal(net.weight, before) == (skip == 1.0)
    for p in net.parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.full_like(p, 4.0))
