"""Muon: torch's updates on each matrix of a fused weight, and none if a step is skipped."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_gpt.config.optim import OptimConfig
from accel_gpt.model.gpt import GPT
from accel_gpt.optim import muon
from accel_gpt.optim.groups import PEAK, make_optimizer, set_lr
from accel_gpt.optim.muon import MuonAdamW, muon_weights
from tests.conftest import thorough, tiny

Arguments = Callable[..., list[str]]
MUON = ("--optim.name", "muon")


def model(preset: str = "llama", **changes: Any) -> GPT:
    """Return a model whose fused weights join matrices of different heights."""
    torch.manual_seed(0)
    return GPT(tiny(preset, **{"n_kv_head": 2, **changes}), 64)


def gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=generator)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of weights and state, by name."""
    found = {name: p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        found |= {f"{name}.{k}": v.clone() for k, v in optimizer.state[p].items()}
    return found


def matrices(net: GPT) -> dict[str, Tensor]:
    """Return each matrix of the fused weights."""
    found = {}
    for i, block in enumerate(net.blocks):
        attn, mlp = block.attn, block.mlp
        H, K = attn.heads[0] * attn.head_size, attn.heads[1] * attn.head_size
        q, k, v = attn.qkv.weight.detach().split([H, K, K])
        found |= {f"{i}.q": q, f"{i}.k": k, f"{i}.v": v, f"{i}.o": attn.proj.weight.detach()}
        up = mlp.up.weight.detach()
        halves = up.chunk(2) if mlp.gated else (up,)
        found |= {f"{i}.up.{half}": matrix for half, matrix in enumerate(halves)}
        found[f"{i}.down"] = mlp.down.weight.detach()
    return found


def gradient_of(net: GPT) -> dict[str, Tensor]:
    """Return the gradients of `matrices`."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), net.parameters(), strict=True):
            assert q.grad is not None
            p.copy_(q.grad)
    return matrices(twin)


def oracle(net: GPT, config: OptimConfig) -> tuple[dict[str, nn.Parameter], list[Any]]:
    """Make torch's Muon for copies of the matrices, and torch's AdamW for the rest."""
    Muon: Any = pytest.importorskip("torch.optim._muon").Muon
    split = {name: nn.Parameter(m.clone()) for name, m in matrices(net).items()}
    taken = {id(w) for weights in muon_weights(net).values() for w in weights}
    rest = {
        n: nn.Parameter(p.detach().clone()) for n, p in net.named_parameters() if id(p) not in taken
    }
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
    for group in both[0].param_groups + both[1].param_groups:
        group[PEAK] = group["lr"]
    return split | rest, both


def follow(net: GPT, config: OptimConfig, optimizer: MuonAdamW, tolerance: float) -> None:
    """Compare several steps of ours with torch's."""
    copies, both = oracle(net, config)
    for step in range(5):
        gradients(net, step)
        of_matrices, named = gradient_of(net), dict(net.named_parameters())
        for name, p in copies.items():
            p.grad = of_matrices[name] if name in of_matrices else named[name].grad
        for one in (optimizer, *both):
            set_lr(one, 1 - step / 10)
            one.step()
        now = matrices(net)
        for name, p in copies.items():
            if name in now:
                torch.testing.assert_close(now[name], p.detach(), atol=tolerance, rtol=0)
            else:
                assert torch.equal(named[name].detach(), p.detach()), name


@pytest.mark.parametrize(
    ("preset", "rule", "shape"),
    [
        ("llama", "original", {}),
        ("gpt2", "match_rms_adamw", {"n_kv_head": None}),
        ("qwen3", "match_rms_adamw", {"head_dim": 32}),  # queries taller than wide, keys less so
    ],
)
def test_updates_are_those_of_torch(
    preset: str, rule: Any, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with several stacks of a shape; torch's Muon is patched to compute in it."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # before torch 2.15
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # from torch 2.15 on
    monkeypatch.setattr(muon, "STACK", 2 * 32 * 32)
    net = model(preset, **shape)
    config = OptimConfig("muon", lr=0.02, muon_scale=rule, weight_decay=0.3)
    optimizer = make_optimizer(net, config)
    assert isinstance(optimizer, MuonAdamW)
    follow(net, config, optimizer, 1e-6)


# --------------------------------------------------------------------------- which and how


def test_the_blocks_are_muons_and_all_else_is_adamws() -> None:
    net = model()
    optimizer = make_optimizer(net, OptimConfig("muon", lr=0.1, muon_lr=0.3, muon_weight_decay=0.2))
    names = {id(p): name for name, p in net.named_parameters()}
    of_muon = {
        names[id(p)]: (group["rows"], group["weight_decay"], group["peak_lr"])
        for group in optimizer.param_groups
        for p in group["params"]
        if "rows" in group
    }
    width = net.config.hidden_size
    kinds: dict[str, Any] = {"attn.qkv": (32, 16, 16), "attn.proj": None, "mlp.up": (width, width)}
    kinds["mlp.down"] = None
    assert of_muon == {
        f"blocks.{i}.{kind}.weight": (rows, 0.2, 0.3)
        for i in (0, 1)
        for kind, rows in kinds.items()
    }
    counted = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in counted} == set(names)
    assert len(counted) == len(names)
    assert OptimConfig("muon", lr=0.003).muon_peak == 0.003  # muon_lr is not set
    assert OptimConfig("muon", lr=0.003, muon_scale="original").muon_peak == 0.02


def test_cautious_decay_spares_what_grows() -> None:
    """The update is the plain one if a weight shrinks, without decay if it grows."""
    plain, cautious, none = model(), model(), model()
    for net, changes in (
        (plain, {}),
        (cautious, {"muon_cautious_decay": True}),
        (none, {"muon_weight_decay": 0.0}),
    ):
        gradients(net, 0)
        make_optimizer(net, OptimConfig("muon", lr=0.1, weight_decay=0.5, **changes)).step()  # type: ignore[arg-type]
    seen = set()
    for new, a, b, c in zip(
        *(matrices(net).values() for net in (model(), plain, cautious, none)), strict=True
    ):
        shrinks = (c - new) * new <= 0
        assert torch.equal(b, torch.where(shrinks, a, c))
        seen |= set(shrinks.flatten().tolist())
    assert seen == {True, False}


# --------------------------------------------------------------------------- updates left out


@pytest.mark.parametrize("left_out", [True, False])
def test_an_update_that_is_left_out_leaves_weights_and_state(left_out: bool) -> None:
    net = model()
    optimizer = make_optimizer(net, OptimConfig("muon", lr=0.1))
    gradients(net, 0)
    optimizer.step()
    before = everything(net, optimizer)
    for p in net.parameters():
        p.grad = torch.full_like(p, float("nan") if left_out else 1.0)
    optimizer.skip = torch.tensor(float(left_out))
    optimizer.step()
    after = everything(net, optimizer)
    assert after.keys() == before.keys()
    for name, old in before.items():
        assert torch.equal(old, after[name]) == left_out, name


@pytest.mark.parametrize(("finite", "unscaled"), [(True, True), (True, False), (False, True)])
def test_a_loss_scaler_is_understood(finite: bool, unscaled: bool) -> None:
    """As with `torch.amp.GradScaler` in fp16: unscale gradients, skip overflows."""
    scaled, plain = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [make_optimizer(net, OptimConfig("muon", lr=0.1)) for net in (scaled, plain)]
    start = everything(scaled, optimizers[0])
    for net in (scaled, plain):
        gradients(net, 0)
    scaler.scale(torch.ones(()))
    for p in scaled.parameters():
        assert p.grad is not None
        p.grad *= 1024
    if not finite:
        scaled.blocks[0].attn.qkv.weight.grad[0, 0] = float("inf")
    if unscaled:
        scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[1].step()
    expected = dict(plain.named_parameters()) if finite else start
    for name, p in scaled.named_parameters():
        assert torch.equal(p, expected[name]), name
    assert scaler.get_scale() == (1024 if finite else 512)


# --------------------------------------------------------------------------- processes


def updated(net: GPT, mesh: Any = None) -> GPT:
    """Return a model after three steps; all processes have the same gradients."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    optimizer = make_optimizer(
        net, OptimConfig("muon", lr=0.1, muon_cautious_decay=True), mesh=mesh
    )
    for step in range(3):
        whole = model(n_layer=5)
        gradients(whole, step)
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            p.grad = q.grad
            if isinstance(p, DTensor):
                assert q.grad is not None
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        optimizer.skip = torch.tensor(float(step == 1))
        optimizer.step()
    return net


def one_rank(rank: int, world: int, engine: str, folder: Path) -> None:
    """Update a model on `engine`; rank 0 saves the weights, and the work of each rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    counts, mesh = [], dist.device_mesh.init_device_mesh("cpu", (world,))
    muon.STACK = 3 * 32 * 32  # several stacks of each shape
    net, direction = model(n_layer=5), muon.update_direction

    def counting(estimates: Tensor, rows: Any) -> Tensor:
        counts.append(estimates.numel())
        return direction(estimates, rows)

    muon.update_direction = counting
    if engine != "ddp":
        sizes, names = (
            ((2, world // 2), ("replica", "shard")) if engine == "hsdp" else ((world,), None)
        )
        shards = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for part in (*net.blocks, net):
            fully_shard(part, mesh=shards)
    updated(net, mesh if engine == "ddp" else None)
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, sum(counts))
    if rank == 0:
        torch.save({"weights": [p.detach() for p in found], "work": everyone}, folder / "found.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "world"), [("ddp", 3), pytest.param("hsdp", 4, marks=thorough)])
def test_ranks_share_the_matrices_and_update_as_one(
    engine: str, world: int, tmp_path: Path
) -> None:
    """Neither the 5 blocks nor the rows divide evenly over 3 ranks."""
    torch.multiprocessing.spawn(one_rank, (world, engine, tmp_path), world)  # type: ignore[no-untyped-call]
    kept = torch.load(tmp_path / "found.pt", weights_only=True)
    whole = list(updated(model(n_layer=5)).parameters())
    for p, q in zip(kept["weights"], whole, strict=True):
        torch.testing.assert_close(p, q.detach(), atol=1e-6, rtol=0)
    elements = 3 * sum(
        w.numel() for group in muon_weights(model(n_layer=5)).values() for w in group
    )
    ranks = world // 2 if engine == "hsdp" else world
    assert sum(kept["work"]) == elements * world // ranks
    assert max(kept["work"]) < elements * 0.7


# --------------------------------------------------------------------------- what it is for


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
def test_compiled_equals_eager() -> None:
    nets = [model(n_layer=3), model(n_layer=3)]
    optimizers = [
        make_optimizer(net, OptimConfig("muon", muon_cautious_decay=True), compiled)
        for net, compiled in zip(nets, (False, True), strict=True)
    ]
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            gradients(net, step)
            set_lr(optimizer, 1 / (1 + step))
            optimizer.skip = torch.tensor(float(step == 2))
            optimizer.step()
    both = [everything(*pair) for pair in zip(nets, optimizers, strict=True)]
    for name, found in both[0].items():
        torch.testing.assert_close(both[1][name], found, atol=1e-6, rtol=1e-4)
