"""Memory: the formulas against autograd, torch's allocations and the process."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from accel_gpt.commands.plan import PlanCommand
from accel_gpt.commands.plan_forecast import forecast
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.parse import load_config
from accel_gpt.cost import activations as model_memory
from accel_gpt.cost import memory
from accel_gpt.cost.activations import (
    Numerics,
    activation_bytes,
    backward_bytes,
    block_bytes,
    cast_bytes,
    chunked,
    kept_logits_bytes,
    logits_bytes,
)
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.machine import Machine
from accel_gpt.cost.memory import IMPORTED_CPU, footprint, muon_work, optimizer_bytes
from accel_gpt.model import layers
from accel_gpt.model import loss as model_loss
from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT
from accel_gpt.optim import muon
from accel_gpt.optim.groups import make_optimizer
from tests.conftest import tiny

V, B = 100, 3
SHAPES = {
    "gpt2": tiny(),
    "no biases": tiny(bias=False),
    "dropout": tiny(dropout=0.1),
    "llama": tiny("llama", n_kv_head=2),
    "llama, dropout": tiny("llama", n_kv_head=2, dropout=0.1),
    "qwen3, wide heads": tiny("qwen3", n_kv_head=2, head_dim=12),
    "qwen3, dropout": tiny("qwen3", dropout=0.1),
    "fast": tiny("fast"),
    "fast, tied, weights in the norms": tiny("fast", tie_embeddings=True, norm_weight=True),
    "gpt2 with qk_norm": tiny(qk_norm=True),
}


def kept(config: ModelConfig, half: bool, masked: bool, vocab_size: int = V) -> int:
    """Bytes of the storages that autograd keeps of a micro-batch, without weights and tokens."""
    model = GPT(config, vocab_size).train()
    tokens = torch.randint(0, V, (B, config.block_size))
    given = (*model.parameters(), *model.buffers(), tokens)
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    sizes: dict[int, int] = {}
    alive = []  # a freed storage could give its address to another

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    documents = separate(tokens, tokens, 3)[1] if masked else None
    cast = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    with saved_tensors_hooks(note, lambda tensor: tensor), cast:
        model(tokens, tokens, documents=documents)
    return sum(sizes.values())


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("masked", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_the_formula_counts_every_byte_that_autograd_keeps(
    config: ModelConfig, half: bool, masked: bool
) -> None:
    numerics = Numerics(half)
    expected = (
        activation_bytes(config, B, numerics, masked)
        + kept_logits_bytes(config, V, B, numerics)
        + cast_bytes(config, V, numerics)
    )
    assert kept(config, half, masked) - expected == 12  # sum and number of the targets


@pytest.fixture
def activating_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, model_memory):
        monkeypatch.setattr(module, "activates_twice", lambda values: values > 0)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.usefixtures("activating_twice")
def test_of_a_large_micro_batch_the_results_of_activation_functions_are_not_kept(
    preset: str, half: bool
) -> None:
    config, numerics = tiny(preset), Numerics(half)
    expected = activation_bytes(config, B, numerics) + kept_logits_bytes(config, V, B, numerics)
    expected += cast_bytes(config, V, numerics)
    # half-precision copies of `down` are made again, too
    copies = 2 * config.n_layer * config.n_embd * config.hidden_size if half else 0
    assert kept(config, half, masked=False) - expected == 12 - copies


@pytest.mark.parametrize("preset", PRESETS)
def test_activating_twice_changes_no_bit_and_runs_no_product_twice(
    preset: str, request: pytest.FixtureRequest
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
    request.getfixturevalue("activating_twice")
    found, again = step()
    assert all(map(torch.equal, found, expected))
    assert again == count > 0


@pytest.mark.parametrize(
    "half", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("preset", ["gpt2", "fast"])
def test_the_formula_counts_every_byte_that_is_kept_of_chunks(preset: str, half: bool) -> None:
    config, numerics, vocab_size = tiny(preset, block_size=64), Numerics(half), 400_000
    assert chunked(config, vocab_size, B, numerics)
    expected = (
        activation_bytes(config, B, numerics)
        + kept_logits_bytes(config, vocab_size, B, numerics)
        + cast_bytes(config, vocab_size, numerics)
    )
    # the number of the targets alone; a copy of the head lives while the chunks are at work
    head = 2 * padded_vocab_size(vocab_size) * config.n_embd if half else 0
    assert kept(config, half, False, vocab_size) - expected == 8 - head


def test_gradients_lie_beside_the_buckets_of_ddp_until_they_are_reduced() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Linear(8, 8)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for _ in range(2):
            with wrapped.no_sync():
                wrapped(torch.ones(8)).sum().backward()
            assert model.bias.grad is not None
            assert model.bias.grad.untyped_storage().nbytes() == 4 * 8  # its own
            wrapped(torch.ones(8)).sum().backward()
            assert model.bias.grad.untyped_storage().nbytes() == 4 * (8 + 64)  # the bucket's
            model.zero_grad()
    finally:
        torch.distributed.destroy_process_group()


def most_alive(step: Callable[[], None]) -> int:
    """The most bytes of tensors that a step makes and that are alive at once."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = top = 0
    for _, change in changes:
        now += change
        top = max(top, now)
    return top


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])
def test_a_chunk_at_work_takes_what_is_planned(
    cap: float | None, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no array of logits more, as that of the chunk before would be."""
    for module in (model_loss, model_memory):
        monkeypatch.setattr(module, "chunk_tokens", lambda rows, cpu: 64)
    config, vocab_size = tiny(n_embd=8, block_size=256, logit_softcap=cap), 4096
    x, targets = torch.randn(1, 256, 8), torch.zeros(1, 256, dtype=torch.long)
    weight = torch.randn(vocab_size, 8)

    def loss() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            model_loss.chunked_next_token_loss(x, weight, targets, vocab_size, cap)

    planned = logits_bytes(config, vocab_size, 1, Numerics(half))
    assert 0.85 * planned < most_alive(loss) < 1.15 * planned


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
            monkeypatch.setattr(module, "STACK", blocks * max(hidden_matrices(model)))
        found = most_alive(optimizer.step)
        assert found == pytest.approx(muon_work(config)["muon at work"], rel=0.01)
    adamw = Config(model=model)
    assert optimizer_bytes(adamw, V) == 8 * parameter_counts(model, V)["total"]
    assert muon_work(adamw) == {}


def live(
    config: ModelConfig,
    vocab_size: int,
    sequences: int,
    half: bool,
    recompute: bool = False,
    micro_steps: int = 1,
) -> int:
    """The most bytes of tensors alive in a step, with weights, optimizer and no older gradients."""
    model = GPT(config, vocab_size).train()
    model.recompute = recompute
    optimizer = make_optimizer(model, OptimConfig())
    tokens = torch.randint(0, vocab_size, (sequences, config.block_size))

    def step() -> None:
        for _ in range(micro_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(tokens, tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    top = most_alive(step)
    return top + 12 * parameter_counts(config, vocab_size)["total"]


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_fullest_moment_is_where_the_loss_begins_its_backward_pass(
    preset: str, half: bool
) -> None:
    config = tiny(preset, n_embd=64, block_size=64)
    numerics, vocab_size, sequences = Numerics(half), 2000, 16
    expected = (
        12 * parameter_counts(config, vocab_size)["total"]
        + activation_bytes(config, sequences, numerics)
        + cast_bytes(config, vocab_size, numerics)
        + logits_bytes(config, vocab_size, sequences, numerics)
    )
    assert live(config, vocab_size, sequences, half) == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_with_chunks_it_lies_between_those_of_the_loss_and_of_a_block(
    half: bool,
    recompute: bool,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if large:
        request.getfixturevalue("activating_twice")
    for module in (model_loss, model_memory):
        monkeypatch.setattr(module, "chunk_tokens", lambda rows, cpu: 64)
    config = tiny("fast", n_layer=4, n_embd=64, block_size=64)
    numerics, vocab_size, sequences = Numerics(half), 2000, 16
    found = live(config, vocab_size, sequences, half, recompute)
    kept = (
        12 * parameter_counts(config, vocab_size)["total"]
        + activation_bytes(config, sequences, numerics, recomputed=recompute)
        + cast_bytes(config, vocab_size, numerics)
    )
    work = backward_bytes(config, sequences, numerics)
    work += block_bytes(config, sequences, numerics) * recompute
    head = 4 * padded_vocab_size(vocab_size) * config.n_embd
    assert kept + logits_bytes(config, vocab_size, sequences, numerics) < found
    assert 0.95 * found < kept + head + work < 1.3 * found


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=[pytest.mark.slow] * (p != "gpt2")) for p in PRESETS]
)
def test_of_few_tokens_the_plan_is_what_is_alive_at_once(
    preset: str, tied: bool, micro_steps: int, half: bool
) -> None:
    """The fullest moment is that of the embedding's gradient, a block or the update."""
    model = tiny(preset, n_embd=64, n_layer=8, tie_embeddings=tied)
    train = TrainConfig(16 * micro_steps, micro_batch_size=1, max_steps=1)
    machine = Machine(1, None, None, False, "bf16" if half else "no", "test")
    parts = footprint(Config(model=model, train=train), 2000, machine, micro_steps).parts
    tensors = sum(parts.values()) - parts["libraries"] - parts.get("gaps between tensors", 0)
    found = live(model, 2000, 1, half, micro_steps=micro_steps)
    assert tensors == pytest.approx(found, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_allocates_what_is_planned(preset: str, half: bool) -> None:
    shape = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
    config = ModelConfig(**{**shape, **PRESETS[preset]})
    numerics, vocab_size, sequences = Numerics(half, cuda=True), 8192, 16
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPT(config, vocab_size).cuda().train()
    optimizer = make_optimizer(model, OptimConfig())
    tokens = torch.randint(0, vocab_size, (sequences, config.block_size), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = (
        12 * parameter_counts(config, vocab_size)["total"]
        + activation_bytes(config, sequences, numerics)
        + cast_bytes(config, vocab_size, numerics)
        + logits_bytes(config, vocab_size, sequences, numerics)
    )
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(expected, rel=0.15)


MEASURE = r"""
import json, re, sys
from pathlib import Path
from accel_gpt import train
from accel_gpt.console import run_main

def resident(key):
    status = Path("/proc/self/status").read_text()
    return int(re.search(key + r":\s+(\d+) kB", status)[1]) * 1024

before = resident("VmRSS")
code = run_main(train.main, sys.argv[1:])
print(json.dumps([code, before, resident("VmHWM")]))
"""
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 x 128, T 64, wide": (
        {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
        {"tokens_per_step": 12288, "micro_batch_size": 192},
    ),
    "6 x 384, T 256": (
        {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
        {"tokens_per_step": 2048, "micro_batch_size": 8},
    ),
    "llama, 8 x 512, T 512, accumulated": (
        {"preset": "llama", "n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 512},
        {"tokens_per_step": 1024, "micro_batch_size": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("model", "train"), RUNS.values(), ids=RUNS.keys())
def test_the_plan_predicts_what_a_run_grows_by(
    model: dict[str, Any], train: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    """Resident memory of a run of three steps, from the imports to its highest."""
    path = tmp_path / "config.yaml"
    sections = {
        "out_dir": str(tmp_path / "run"),
        "data": {"train": str(corpus)},
        "model": {**model, "vocab_size": 2048},
        "train": {**train, "max_steps": 3, "cpu_threads": 1},
        "eval": {"every": 0, "tokens": model["block_size"]},
        "sample": {"every": 0},
        "log": {"trackers": []},
    }
    path.write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    code, before, highest = json.loads(re.findall(r"^\[.*\]$", done.stdout, re.MULTILINE)[-1])
    assert code == 0
    planned = forecast(PlanCommand(str(path)), load_config([str(path)], "test"))["memory"]["total"]
    assert planned - IMPORTED_CPU == pytest.approx(highest - before, rel=0.15)
