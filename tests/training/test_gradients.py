"""The gradient of a step: the mean over the whole batch, and the same bits at any layout."""

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel_gpt.config.plan import Plan
from accel_gpt.data.order import derive_seed
from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from accel_gpt.model.targets import TargetMask
from accel_gpt.training.gradients import ExactGradients, Gradients, micro_batches
from tests.conftest import QUIET, launch, reseal, tiny

Arguments = Callable[..., list[str]]
EOT = 64


def accelerator(steps: int) -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def plan(micro: int, steps: int, world: int = 1) -> Plan:
    return Plan(world, micro, 16, steps, max_steps=1, warmup_steps=0, decay_steps=1)


def windows(count: int = 12) -> Tensor:
    """Return tokens (count, 17); about every fifth ends a document."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(EOT, (count, 17), generator=generator)
    ends = torch.rand(count, 17, generator=generator) < 0.2
    return tokens.masked_fill(ends, EOT)


class Batches:
    """The methods of `Loader` that a step uses."""

    def __init__(self, rows: Tensor, micro: int) -> None:
        self.batches = iter([(part[:, :-1], part[:, 1:]) for part in rows.split(micro)])

    def __next__(self) -> tuple[Tensor, Tensor]:
        return next(self.batches)


def loader(rows: Tensor, micro: int) -> Any:
    return Batches(rows, micro)


def make(kind: type[Gradients], one: Accelerator, model: nn.Module) -> Gradients:
    return kind(one, model, 1, 0.0)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
    """Return the model's loss in float64."""
    logits = model(tokens, documents=documents)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


@pytest.fixture
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------- the mean


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", [Gradients, ExactGradients])
@pytest.mark.parametrize("document_end", [None, EOT], ids=["whole", "documents"])
@pytest.mark.parametrize("micro", [1, 3, 12])
def test_accumulated_gradient_is_that_of_one_big_batch(
    micro: int, document_end: int | None, kind: type[Gradients]
) -> None:
    torch.manual_seed(0)
    model, rows = GPT(tiny("llama"), EOT + 1), windows()
    tokens, targets, documents = rows[:, :-1], rows[:, 1:], None
    if document_end is not None:
        targets, documents = separate(tokens, targets, document_end)
    whole = loss_of(model, tokens, targets, documents)
    expected = torch.autograd.grad(whole, list(model.parameters()))

    steps = len(rows) // micro
    one = accelerator(steps)
    gradients = make(kind, one, model)
    batches = micro_batches(loader(rows, micro), one, plan(micro, steps), TargetMask(document_end))
    for first, (tokens, targets, documents, weight) in enumerate(batches):
        with gradients.micro_step(first):
            gradients.backward(loss_of(model, tokens, targets, documents) * weight)
    assert gradients.finish().item() == pytest.approx(whole.item(), rel=1e-6)
    for parameter, right in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        units = 2**-51 * right.numel() ** 0.5 if kind is ExactGradients else 0
        assert (parameter.grad - right).norm() <= 1e-12 * right.norm() + units


# --------------------------------------------------------------------------- order


class Fed(nn.Module):
    """A model whose input is its gradient."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def drawn(count: int = 24, size: int = 500) -> list[Tensor]:
    """Return gradients whose elements span twelve powers of ten, up to 0.3."""
    generator = torch.Generator().manual_seed(3)
    scale = 10.0 ** (-12 * torch.rand(count, size, generator=generator))
    return list(0.3 * scale * torch.rand(count, size, generator=generator).sub(0.5).mul(2))


def summed(
    groups: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return gradient and loss after a step of several processes, one group in each."""
    size, steps = len(groups[0][0]), len(groups[0])
    processes = []
    for group in groups:
        gradients = ExactGradients(accelerator(steps), Fed(size, dtype), 1, 0.0)
        for number, gradient in enumerate(group):
            with gradients.micro_step(number):
                loss = gradients.model(gradient) + gradient[0].abs() + 3
                gradients.backward(loss)
        processes.append(gradients)
    first = processes[0]

    def all_reduce(sums: Tensor) -> None:
        for other in processes[1:]:
            sums += other.sums

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    one = first.accelerator
    first.accelerator = SimpleNamespace(  # type: ignore[assignment]
        num_processes=len(groups), gradient_accumulation_steps=one.gradient_accumulation_steps
    )
    loss = first.finish()
    grad = first.parameters[0].grad
    assert grad is not None
    return grad, loss


@settings(max_examples=20)
@given(draw=st.randoms(use_true_random=False), world=st.sampled_from([1, 2, 3, 4, 6]))
def test_any_order_and_any_number_of_processes_give_the_same_bits(
    draw: random.Random, world: int
) -> None:
    """Compare all 53 bits: the 24 bits of float32 would hide most differences."""
    gradients = drawn()
    with pytest.MonkeyPatch.context() as patch:
        expected, loss = summed([gradients], patch, torch.float64)
        draw.shuffle(gradients)
        groups = [gradients[rank::world] for rank in range(world)]
        found, other = summed(groups, patch, torch.float64)
    assert torch.equal(found, expected)
    assert torch.equal(other, loss)


def test_rounding_to_units_is_below_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are not finite stay so."""
    gradients = drawn()
    gradients[0][1:3] = torch.tensor([torch.inf, torch.nan])
    found, _ = summed([gradients], monkeypatch)
    assert found[1].isinf()
    assert found[2].isnan()
    for element in range(0, len(found), 25):
        exact = sum(Fraction(g[element].item()) for g in gradients) / len(gradients)
        ulp = abs(np.spacing(np.float32(exact)))
        assert abs(float(Fraction(found[element].item()) - exact)) <= 0.5 * ulp + 2**-51


# --------------------------------------------------------------------------- dropout


def test_a_run_seeds_dropout_by_the_sequence_before_and_after_a_resume(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on another number of processes than before."""
    seeds, plain_forward = [], GPT.forward

    def forward(self: GPT, *given: Any, **named: Any) -> Tensor:
        if self.training:
            seeds.append(torch.default_generator.initial_seed())
        return plain_forward(self, *given, **named)

    monkeypatch.setattr(GPT, "forward", forward)
    options = [*QUIET, "--seed", "7", "--checkpoint.allow_change", "train.max_steps"]
    options += ["--schedule.name", "constant", "--train.micro_batch_size", "4"]
    for last in (2, 3, 4):
        assert launch(small_run(*options, "--train.max_steps", str(last))) == 0
        path = tmp_path / "run" / "checkpoints" / f"step_{last:08d}"
        state = json.loads((path / "trainer_state.json").read_text())
        if last == 3:
            (path / "trainer_state.json").write_text(json.dumps(state | {"world_size": 2}))
            reseal(path)
    assert seeds == [derive_seed(7, "dropout", 4 * micro_step) for micro_step in range(8)]


# --------------------------------------------------------------------------- refusals


def test_what_decides_the_bits_is_held(
    small_run: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = ["--train.reproducible", "--eval.every", "0", "--sample.every", "0"]
    longer = ["--train.max_steps", "4", "--train.micro_batch_size", "4"]
    assert launch(small_run(*exact, "--train.max_steps", "3")) == 0
    allow = ["--checkpoint.allow_change", "train.max_steps"]
    assert launch(small_run(*exact, *longer, *allow)) == 2
    assert "train.micro_batch_size was 8, is 4" in capsys.readouterr().err
    assert launch(small_run(*exact[1:], *longer, *allow)) == 2
    assert "train.reproducible was True, is False" in capsys.readouterr().err
    allow += ["--checkpoint.allow_change", "train.micro_batch_size"]
    assert launch(small_run(*exact, *longer, *allow)) == 0
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it
    assert launch(small_run(*exact, *longer, *allow)) == 2
    assert "train.mixed_precision was no, is bf16" in capsys.readouterr().err
