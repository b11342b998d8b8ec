"""The forecast of memory against torch's allocations and a training process."""

import itertools
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accel_gpt.config.data import DataConfig
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.cost import memory
from accel_gpt.cost.memory import (
    GAP_SHARE_CPU,
    LIBRARIES_CPU_BYTES,
    Machine,
    footprint,
    optimizer_bytes,
    update_bytes,
)
from accel_gpt.model import layers
from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.optim import muon
from accel_gpt.optim.groups import make_optimizer
from tests.conftest import tiny
from tests.helpers.memory import most_alive

V, B = 100, 3


@pytest.mark.parametrize("preset", PRESETS)
def test_activating_twice_changes_no_bit_and_runs_no_product_twice(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = GPT(tiny(preset), V).train(), torch.randint(0, V, (B, 16))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # projections of fast start at zero

    def step() -> tuple[list[torch.Tensor | None], int]:
        model.zero_grad()
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        return [weight.grad for weight in model.parameters()], counter.get_total_flops()

    expected, count = step()
    monkeypatch.setattr(layers, "activates_twice", lambda values: values > 0)
    found, again = step()
    assert all(map(torch.equal, found, expected))
    assert again == count > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_muon_keeps_one_moment_and_works_on_a_stack(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(preset, n_embd=64, n_layer=5)
    config = Config(model=model, optim=OptimConfig("muon"))
    gpt = GPT(model, V)
    optimizer = make_optimizer(gpt, config.optim)
    for p in gpt.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert optimizer_bytes(config, V) == sum(t.nbytes for t in moments)
    for blocks in (5, 2):
        for module in (muon, memory):
            monkeypatch.setattr(module, "STACK", blocks * max(model.block_matrices))
        planned = update_bytes(config, V)["muon at work"]
        assert most_alive(optimizer.step) == pytest.approx(planned, rel=0.05)
    assert optimizer_bytes(Config(model=model), V) == 8 * parameter_counts(model, V)["total"]


def live(
    config: ModelConfig, vocab_size: int, sequences: int, half: bool, recompute: bool = False,
    micro_steps: int = 1, documents: bool = False,
) -> int:  # fmt: skip
    """Return the peak bytes of live tensors in a step, with weights and optimizer."""
    model = GPT(config, vocab_size).train()
    model.recompute = recompute
    model.bf16_residual = True
    optimizer = make_optimizer(model, OptimConfig())
    tokens = torch.randint(0, vocab_size, (sequences, config.block_size))
    mask = separate(tokens, tokens, 3)[1] if documents else None

    def step() -> None:
        for _ in range(micro_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(tokens, tokens, documents=mask)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return most_alive(step) + 12 * parameter_counts(config, vocab_size)["total"]


# options of the model, options of the step; in the last two, another moment has the peak
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "recomputed": ({}, {"recompute": True}),
    "dropout": ({"dropout": 0.1}, {}),
    "documents": ({}, {"documents": True}),
    "work of a block": ({"n_layer": 3}, {"sequences": 64, "vocab_size": 10}),
    "gradients of the embedding": (
        {"n_layer": 1, "block_size": 16, "tie_embeddings": True},
        {"sequences": 1, "micro_steps": 2, "vocab_size": 20_000},
    ),
}


QUICK = [("plain", "gpt2", True), *((case, "gpt2", False) for case in CASES)]
MORE = itertools.product(("plain", "recomputed"), PRESETS, (False, True))
ALL = dict.fromkeys([*QUICK, *MORE])  # each once


@pytest.mark.parametrize(
    ("case", "preset", "half"),
    [pytest.param(*given, marks=[pytest.mark.slow] * (given not in QUICK)) for given in ALL],
)
def test_the_forecast_is_near_the_tensors_that_are_alive_at_once(
    case: str, preset: str, half: bool
) -> None:
    changes, step = CASES[case]
    model = tiny(preset, **{"n_embd": 64, "block_size": 64, **changes})
    step = {"sequences": 16, "vocab_size": 2000, **step}
    train = TrainConfig(
        model.block_size * step["sequences"] * step.get("micro_steps", 1),
        micro_batch_size=step["sequences"],
        max_steps=1,
        activation_checkpointing="blocks" if step.get("recompute") else "none",
    )
    data = DataConfig(document_mask=step.get("documents", False))
    machine = Machine(1, None, False, "bf16" if half else "no")
    config = Config(model=model, train=train, data=data)
    parts = footprint(config, step["vocab_size"], machine).parts
    assert parts.pop("libraries") == LIBRARIES_CPU_BYTES
    if case != "gradients of the embedding":  # while these are held, the activations are freed
        gaps = parts.pop("gaps between tensors")
        names = ("activations", "weights in half precision", "logits and loss", "work of a block")
        assert gaps == round(GAP_SHARE_CPU * sum(parts.get(name, 0) for name in names))
    assert case in parts or "logits and loss" in parts
    alive = live(model, half=half, **step)
    assert 0.96 * alive < sum(parts.values()) < 1.15 * alive


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_allocates_what_is_planned(preset: str, half: bool, compiled: bool) -> None:
    shape = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
    model = ModelConfig(**{**shape, **PRESETS[preset]})
    train = TrainConfig(32 * 256, micro_batch_size=32, max_steps=1, compile=compiled)
    machine = Machine(1, "h100", False, "bf16" if half else "no")
    planned = footprint(Config(model=model, train=train), 2048, machine)
    torch.ones(16, 16, device="cuda", requires_grad=True).mm(torch.ones(16, 16, device="cuda"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # with the workspaces of cuBLAS
    gpt = GPT(model, 2048).cuda().train()
    gpt.bf16_residual = True
    if compiled:
        for block in gpt.blocks:
            block.compile()
    optimizer = make_optimizer(gpt, OptimConfig())
    tokens = torch.randint(0, 2048, (32, 256), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = gpt(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = planned.total - planned.parts["libraries"]
    found = torch.cuda.max_memory_allocated() - before
    sys.stdout.write(f"{preset}: planned over found {expected / found:.3f}\n")
    assert found == pytest.approx(expected, rel=0.15)
