"""Any optimizer of torch, returned by a file of --code: clipped, skipped, saved and resumed."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.errors import UserError
from accel_gpt.optim.own import OwnOptimizer, make_own_optimizer
from accel_gpt.own_code import OwnCode, OwnFunction
from tests.conftest import QUIET, launch
from tests.test_matrix import work
from tests.test_train import assert_same_weights, records, weights
from tests.training.test_numerics import Waits

Arguments = Callable[..., list[str]]
# NaN in the third step
POISONED = """
calls = []


def loss(model, tokens, targets, documents):
    if model.training:  # not in the check before the first step
        calls.append(1)
    loss = model(tokens, targets, documents=documents)
    return loss * float("nan") if len(calls) == 3 else loss
"""
# the groups and options of our AdamW
MADE = """
from accel_gpt.optim.groups import make_optimizer
def optimizer(model, config):
    return make_optimizer(model, config.optim)
"""
HOOKED = """
import torch
from accel_gpt.optim.groups import make_optimizer
def _note(optimizer, *_):
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    with open("FILE", "a") as file:
        print(torch.nn.utils.get_total_norm(gradients).item(), file=file)
def optimizer(model, config):
    made = make_optimizer(model, config.optim)
    made.register_step_pre_hook(_note)
    return made
"""
OURS = """
import torch


def optimizer(model, config):
    options = config.optim
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )
"""
KEEPS_ALL_KINDS = """
from tests.optim.test_own import KeepsAllKinds


def optimizer(model, config):
    return KeepsAllKinds(model.parameters(), 0.0017, decay=0.1)


def lr(step, config, plan):
    return 1.0


def metrics(run):
    return {"own/updates": run.optimizer.param_groups[0]["updates"]}
"""
KEEPS_A_TEXT = """
import torch


class Own(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["kind"] = "own"
        return super().step()


def optimizer(model, config):
    return Own(model.parameters(), lr=0.1)
"""
ADAFACTOR = """
import torch


def optimizer(model, config):
    return torch.optim.Adafactor(model.parameters(), lr=0.01)
"""


class KeepsAllKinds(torch.optim.Optimizer):
    """Each value that it keeps decides the update."""

    def __init__(self, params: Any, lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "betas": (0.9, 0.99), "updates": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["number"] = state.get("number", 0) + 1
                state["scale"] = state.get("scale", 1.0) * 0.9
                state["kind"] = "own"
                mean = state.setdefault("mean", torch.zeros_like(p))
                rows = state.setdefault("rows", p.new_zeros(p.shape[0], dtype=torch.bfloat16))
                count = state.setdefault("count", torch.zeros((), dtype=torch.int64))
                count += 1
                mean.lerp_(p.grad, 1 - group["betas"][0])
                rows += p.grad.abs().flatten(1).mean(1) if p.dim() > 1 else p.grad.abs()
                row = rows.float().view(-1, *[1] * (p.dim() - 1))
                share = state["scale"] + 1 / state["number"] + 1 / group["updates"] + 1 / count
                p -= group["lr"] * (share * mean / (row + 1e-3) + group["decay"] * p)


def write(folder: Path, source: str) -> str:
    """Write a file of --code; return its path."""
    path = folder / "my.py"
    path.write_text(source)
    return str(path)


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def step(optimizer: OwnOptimizer, net: nn.Module, seed: int, skip: bool = False) -> Tensor:
    """Update `net` by random gradients, clipped to 0.1; return their norm."""
    draw = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=draw) * (torch.nan if skip else 1)
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    optimizer.clip(norm, 0.1)
    optimizer.skip = torch.tensor(float(skip))
    optimizer.step()
    return norm


def everything(optimizer: OwnOptimizer, net: nn.Module) -> dict[str, Tensor]:
    """Return copies of weights and state, by name."""
    found = {name: p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_first_step_leaves_no_state_to_a_fused_kernel(
    fused: bool, net: nn.Linear
) -> None:
    """torch allocates the momentum before its kernel skips, and would go on with any numbers."""
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    optimizer = OwnOptimizer(inner, "my.py")
    start = net.weight.detach().clone()
    step(optimizer, net, seed=0, skip=True)
    assert not any(optimizer.state.values())
    assert torch.equal(net.weight, start)
    norm = step(optimizer, net, seed=1)
    draw = torch.randn(net.weight.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(inner.state[net.weight]["momentum_buffer"], 0.1 * draw / norm)


@pytest.mark.parametrize(("fused", "waits"), [(True, False), (False, True)])
def test_a_skipped_step_changes_neither_weights_nor_state(
    fused: bool, waits: bool, net: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an optimizer without the guard on the device waits for it."""
    lists: list[Tensor] = []
    plain = Tensor.tolist

    def to_list(tensor: Tensor) -> Any:  # waits, but calls no operator
        lists.append(tensor)
        return plain(tensor)

    inner = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    optimizer = OwnOptimizer(inner, "my.py")
    monkeypatch.setattr(Tensor, "tolist", to_list)
    states = []
    for number in range(4):
        lists.clear()
        with Waits() as waiting:
            step(optimizer, net, seed=number, skip=number == 2)
        if number:  # the first one has no state
            # AdamW reads its count of updates, unless it is fused
            assert bool(lists) == waits
            assert waits or not waiting.count
        states.append(everything(optimizer, net))
    assert equal(states[1], states[2])
    assert not equal(states[2], states[3])


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_is_clipped_before_the_update(fused: bool, net: nn.Linear) -> None:
    """The step of SGD is its rate times the norm to which the gradient is clipped."""
    optimizer = OwnOptimizer(torch.optim.SGD(net.parameters(), lr=0.5, fused=fused), "my.py")
    for number in range(2):
        before = nn.utils.parameters_to_vector(net.parameters()).detach()
        assert step(optimizer, net, seed=number) > 0.1
        moved = nn.utils.parameters_to_vector(net.parameters()).detach() - before
        assert float(moved.norm()) == pytest.approx(0.5 * 0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(OURS, ()), (MADE, ("--optim.name", "muon", "--optim.muon_lr", "0.02"))],
    ids=["AdamW of torch", "make_optimizer"],
)
def test_our_groups_in_an_own_optimizer_train_as_ours(
    optimizer: str, options: tuple[str, ...], small_run: Arguments, tmp_path: Path
) -> None:
    """Bit for bit, clipped and with a step that is skipped."""
    options = (*QUIET, "--optim.grad_clip", "0.1", "--train.max_steps", "6", *options)
    runs = []
    for name, source in (("ours", POISONED), ("own", optimizer + POISONED)):
        code = write(tmp_path, source)
        runs.append(tmp_path / name)
        assert launch(small_run(*options, "--out_dir", str(runs[-1]), "--code", code)) == 0
    ours, own = runs
    assert str(records(own)) == str(records(ours))  # NaN is equal to itself as text
    assert_same_weights(weights(own, 6), weights(ours, 6))
    assert [record["train/skipped"] for record in records(own)] == [0, 0, 1, 1, 1, 1]
    assert records(own)[0]["train/grad_norm"] > 0.1  # clipped


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_hook_sees_the_gradient_before_it_is_clipped_once_a_step(
    optimizer: str, small_run: Arguments, tmp_path: Path
) -> None:
    """In the first step of a launch, too."""
    source = HOOKED.replace("FILE", str(tmp_path / "norms"))
    options = (*QUIET, "--optim.grad_clip", "0.1", "--optim.name", optimizer)
    code = write(tmp_path, source)
    assert launch(small_run(*options, "--train.max_steps", "3", "--code", code)) == 0
    seen = [float(line) for line in (tmp_path / "norms").read_text().splitlines()]
    logged = [record["train/grad_norm"] for record in records(tmp_path / "run")]
    assert seen == pytest.approx(logged, rel=1e-5)


def test_what_it_draws_comes_from_the_seed(net: nn.Linear) -> None:
    def optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=torch.rand(()).item())

    config = Config(
        train=TrainConfig(max_steps=1),
        own=OwnCode(file="my.py", optimizer=OwnFunction("optimizer", optimizer, "my.py")),
    )
    rates = set()
    for _ in range(2):
        torch.rand(7)  # another state of the generator
        rates.add(make_own_optimizer(net, config).param_groups[0]["lr"])
    assert len(rates) == 1


# --------------------------------------------------------------------------- checkpoints


def test_numbers_of_numpy_are_stored_and_other_values_refused(net: nn.Linear) -> None:
    inner = torch.optim.SGD(net.parameters(), lr=np.sqrt(0.01), momentum=0.9)  # type: ignore[arg-type]
    optimizer = OwnOptimizer(inner, "my.py")
    step(optimizer, net, seed=0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["lr"] == pytest.approx(0.1)
    inner.state[net.weight]["kind"] = {1}  # not in the first update
    with pytest.raises(UserError, match="keeps a set in its state"):
        optimizer.state_dict()


def test_numbers_texts_and_tensors_of_any_shape_survive_a_resume(
    small_run: Arguments, tmp_path: Path
) -> None:
    code = ("--code", write(tmp_path, KEEPS_ALL_KINDS))
    options = (*QUIET, *code, "--train.max_steps", "4", "--eval.every", "2")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch(small_run(*options, "--out_dir", str(whole))) == 0
    assert launch(small_run(*options, "--out_dir", str(parted), "--train.stop_at", "2")) == 0
    assert launch(small_run(*options, "--out_dir", str(parted))) == 0
    assert records(whole) == records(parted)
    assert_same_weights(weights(whole, 4), weights(parted, 4))
    assert [record["own/updates"] for record in records(whole)] == [1, 2, 3, 4]
    assert {record["train/lr"] for record in records(whole)} == {0.0017}  # its own, not optim.lr


@pytest.mark.parametrize("sharded", [False, True])
def test_an_option_that_changes_wins_over_the_checkpoint_and_counts_continue(
    sharded: bool, net: nn.Linear
) -> None:
    """Checkpoints of shards hold the groups as JSON."""
    first, second = (
        OwnOptimizer(KeepsAllKinds(net.parameters(), 0.1, decay), "my.py") for decay in (0.1, 0.5)
    )
    for number in range(3):
        step(first, net, seed=number)
    if sharded:
        second.load_group_values(json.loads(json.dumps(first.group_values())))
    else:
        second.load_state_dict(first.state_dict())
    group = second.param_groups[0]
    assert (group["decay"], group["updates"], group["betas"]) == (0.5, 3, (0.9, 0.99))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ADAFACTOR, r"step\(\) of Adafactor, .* cannot update the shards of"),
        (KEEPS_A_TEXT, "optimizer of .* keeps kind, a str, but with FSDP a checkpoint holds only"),
    ],
    ids=["Adafactor", "a text"],
)
def test_an_optimizer_that_fsdp_cannot_shard_is_one_sentence(
    source: str, expected: str, small_run: Arguments, tmp_path: Path
) -> None:
    run = small_run(*QUIET, "--code", write(tmp_path, source), "--train.micro_batch_size", "4")
    with pytest.raises(AssertionError, match=f"error: the {expected}"):
        work("fsdp2", 2, [["run", run, 0, None]], tmp_path)
