"""Any optimizer of torch, returned by a file of --code: clipped, skipped, saved and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt import train
from tests.conftest import QUIET, launch
from tests.test_matrix import work
from tests.test_train import assert_same_weights, records, weights
from tests.training.test_numerics import Waits

Arguments = Callable[..., list[str]]
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "fused AdamW": "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
}
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
        fused=FUSED,
    )
"""
# each value that it keeps decides the update
KEEPS_ALL_KINDS = """
import torch


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr, decay):
        super().__init__(params, {"lr": lr, "decay": decay, "betas": (0.9, 0.99), "updates": 0})

    def step(self):
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


def optimizer(model, config):
    return Own(model.parameters(), 1e-3, config.model.extra["decay"])


def metrics(run):
    group = run.optimizer.param_groups[0]
    return {"own/updates": group["updates"], "own/decay": group["decay"]}
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


def returns(made: str) -> str:
    """Return a file whose optimizer() returns `made`."""
    return f"import torch\n\n\ndef optimizer(model, config):\n    return {made}\n"


def write(folder: Path, source: str) -> str:
    """Write a file of --code; return its path."""
    path = folder / "my.py"
    path.write_text(source)
    return str(path)


def states(run: Path, step: int) -> dict[str, Any]:
    """Return the state of the optimizer in a checkpoint, by parameter and name."""
    path = run / "checkpoints" / f"step_{step:08d}" / "optimizer.bin"
    state = torch.load(path, weights_only=True)["state"]
    return {f"{number}.{key}": value for number, one in state.items() for key, value in one.items()}


def test_a_skipped_first_step_leaves_no_state_to_a_fused_kernel(
    small_run: Arguments, tmp_path: Path
) -> None:
    """torch allocates the momentum before its kernel skips, and would go on with any numbers."""
    made = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"
    poisoned = POISONED.replace("== 3", "== 1")
    losses = []
    for name in ("fused", "plain"):
        code = write(tmp_path, returns(made.replace("True", str(name == "fused"))) + poisoned)
        options = ("--train.max_steps", "5", "--out_dir", str(tmp_path / name), "--code", code)
        assert launch(small_run(*QUIET, *options)) == 0
        losses.append([one["train/loss"] for one in records(tmp_path / name)[1:]])
    assert losses[0] == pytest.approx(losses[1])


def test_numbers_of_numpy_are_stored_and_other_values_refused(
    small_run: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (*QUIET, "--checkpoint.every", "1")
    options = (*options, "--train.max_steps", "4", "--code")
    of_numpy = "torch.optim.SGD(model.parameters(), lr=np.sqrt(0.01), momentum=0.9)"
    code = write(tmp_path, f"import numpy as np\n{returns(of_numpy)}")
    assert launch(small_run(*options, code, "--train.stop_at", "2")) == 0
    assert launch(small_run(*options, code)) == 0
    late = "{1} if self.state[p] else 0"  # not in the first update
    code = write(tmp_path, KEEPS_A_TEXT.replace('"own"', late))
    capfd.readouterr()
    assert launch(small_run(*options, code, "--out_dir", str(tmp_path / "late"))) == 4
    assert "keeps a set in its state" in capfd.readouterr().err


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert first.keys() == second.keys()
    return all(
        torch.equal(torch.as_tensor(first[key]), torch.as_tensor(second[key])) for key in first
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_neither_weights_nor_state(
    name: str, small_run: Arguments, tmp_path: Path
) -> None:
    code = write(tmp_path, f"{returns(OPTIMIZERS[name])}{POISONED}")
    options = ("--train.max_steps", "4", "--checkpoint.every", "1", "--checkpoint.keep_last", "9")
    assert launch(small_run(*QUIET, *options, "--code", code)) == 0
    run = tmp_path / "run"
    assert_same_weights(weights(run, 2), weights(run, 3))
    assert equal(states(run, 2), states(run, 3))
    assert not equal(states(run, 3), states(run, 4))
    assert [record["train/skipped"] for record in records(run)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("name", "waits"), [("fused AdamW", False), ("SGD", True)])
def test_only_an_optimizer_without_the_guard_on_the_device_waits(
    name: str,
    waits: bool,
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    lists = []
    plain_update = train.update
    plain_list = torch.Tensor.tolist

    def update(run: train.Training) -> None:
        lists.clear()
        with Waits() as waiting:
            plain_update(run)
        counts.append(waiting.count + len(lists))

    def to_list(tensor: torch.Tensor) -> Any:  # waits, but calls no operator
        lists.append(tensor)
        return plain_list(tensor)

    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(torch.Tensor, "tolist", to_list)
    code = write(tmp_path, returns(OPTIMIZERS[name]))
    options = ("--train.max_steps", "4", "--model.dropout", "0")
    assert launch(small_run(*QUIET, *options, "--code", code)) == 0
    assert [count > 0 for count in counts] == [True, *[waits] * 3]  # the first one has no state


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_with_our_groups_trains_as_ours(
    fused: bool, small_run: Arguments, tmp_path: Path
) -> None:
    """The fused one bit for bit; the plain one is clipped on the host, and rounds differently."""
    options = (*QUIET, "--optim.grad_clip", "0.1", "--train.max_steps", "6")
    code = write(tmp_path, OURS.replace("FUSED", str(fused)))
    ours, own = tmp_path / "ours", tmp_path / "own"
    assert launch(small_run(*options, "--out_dir", str(ours))) == 0
    assert launch(small_run(*options, "--out_dir", str(own), "--code", code)) == 0
    if fused:
        assert records(own) == records(ours)
        assert_same_weights(weights(own, 6), weights(ours, 6))
    for here, there in zip(records(own), records(ours), strict=True):
        assert here["train/grad_norm"] > 0.1  # clipped
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-5)
        assert here["train/lr"] == there["train/lr"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_is_clipped_before_the_update(
    fused: bool, small_run: Arguments, tmp_path: Path
) -> None:
    """The step of SGD is its rate times the norm to which the gradient is clipped."""
    rate = "\n\ndef lr(step, config, plan):\n    return 1.0\n"
    made = f"torch.optim.SGD(model.parameters(), lr=0.5, fused={fused})"
    code = write(tmp_path, returns(made) + rate)
    options = ("--optim.grad_clip", "0.1", "--checkpoint.every", "1", "--train.max_steps", "3")
    assert launch(small_run(*QUIET, *options, "--code", code)) == 0
    before, after = (weights(tmp_path / "run", step) for step in (2, 3))
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    last = records(tmp_path / "run")[2]
    assert last["train/grad_norm"] > 0.1
    assert last["train/lr"] == 0.5  # its own, not optim.lr
    assert float(moved.norm()) == pytest.approx(0.5 * 0.1, rel=1e-4)


def test_numbers_texts_and_tensors_of_any_shape_survive_a_resume(
    small_run: Arguments, tmp_path: Path
) -> None:
    code = ("--code", write(tmp_path, KEEPS_ALL_KINDS))
    options = (*QUIET, *code, "--train.max_steps", "6", "--eval.every", "3")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch(small_run(*options, "--model.extra.decay", "0.1", "--out_dir", str(whole))) == 0
    own = small_run(*options, "--out_dir", str(parted))
    assert launch([*own, "--model.extra.decay", "0.1", "--train.stop_at", "3"]) == 0
    assert launch([*own, "--model.extra.decay", "0.1"]) == 0
    assert records(whole) == records(parted)
    assert_same_weights(weights(whole, 6), weights(parted, 6))
    assert [record["own/updates"] for record in records(whole)] == [1, 2, 3, 4, 5, 6]


def test_what_it_draws_comes_from_the_seed(small_run: Arguments, tmp_path: Path) -> None:
    made = returns("torch.optim.SGD(model.parameters(), lr=torch.rand(()).item())")
    options = (*QUIET, "--code", write(tmp_path, made), "--schedule.warmup_steps", "0")
    rates = []
    for name in ("one", "two"):
        torch.rand(7)  # another state of the generator
        out = ("--train.max_steps", "1", "--out_dir", str(tmp_path / name))
        assert launch(small_run(*options, *out)) == 0
        rates.append(records(tmp_path / name)[0]["train/lr"])
    assert rates[0] == rates[1]


def test_an_option_that_changes_wins_over_the_checkpoint_and_counts_continue(
    small_run: Arguments, tmp_path: Path
) -> None:
    code = ("--code", write(tmp_path, KEEPS_ALL_KINDS))
    own = small_run(*QUIET, *code, "--train.max_steps", "6")
    assert launch([*own, "--model.extra.decay", "0.1", "--train.stop_at", "3"]) == 0
    allow = ("--checkpoint.allow_change", "model.extra")
    assert launch([*own, "--model.extra.decay", "0.5", *allow]) == 0
    lines = records(tmp_path / "run")
    assert [line["own/decay"] for line in lines] == [0.1, 0.1, 0.1, 0.5, 0.5, 0.5]
    assert [line["own/updates"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            returns("torch.optim.Adafactor(model.parameters(), lr=0.01)"),
            r"step\(\) of Adafactor, .* cannot update the shards of",
        ),
        (KEEPS_A_TEXT, "optimizer of .* keeps kind, a str, but with FSDP a checkpoint holds only"),
    ],
    ids=["Adafactor", "a text"],
)
def test_an_optimizer_that_fsdp_cannot_shard_is_one_sentence(
    source: str, expected: str, small_run: Arguments, tmp_path: Path
) -> None:
    code = ("--code", write(tmp_path, source), "--model.extra.decay", "0.1")
    run = small_run(*QUIET, *code, "--train.micro_batch_size", "4")
    with pytest.raises(AssertionError, match=f"error: the {expected}"):
        work("fsdp2", 2, [["run", run, 0, None]], tmp_path)
