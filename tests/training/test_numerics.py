"""Steps that are not finite: skipped on the device, reported, never kept; spikes."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.utils._python_dispatch import TorchDispatchMode

from accel_gpt import train
from accel_gpt.errors import DivergedError
from accel_gpt.runs.folder import checkpoint_steps
from accel_gpt.runs.state import TrainState
from accel_gpt.training.guard import (
    SPIKE_WINDOW,
    StepGuard,
    check_weights,
)
from tests.conftest import QUIET, launch
from tests.helpers.processes import together
from tests.test_train import around_updates, assert_same_weights, records, weights

Arguments = Callable[..., list[str]]


def poison(monkeypatch: pytest.MonkeyPatch, bad: Callable[[TrainState], bool]) -> None:
    """Make the loss of one micro-batch NaN in the steps that `bad` chooses."""
    current: list[TrainState] = []

    def batches(*given: Any) -> Iterator[Any]:
        poisoned = bad(current[-1])
        for tokens, targets, documents, weight in plain_batches(*given):
            yield tokens, targets, documents, math.nan if poisoned else weight
            poisoned = False

    plain_batches = train.micro_batches
    around_updates(monkeypatch, before=lambda run: current.append(run.state))
    monkeypatch.setattr(train, "micro_batches", batches)


def optimizer_of(run: Path, step: int) -> dict[str, Any]:
    path = run / "checkpoints" / f"step_{step:08d}" / "optimizer.bin"
    state: dict[str, Any] = torch.load(path, weights_only=True)["state"]
    return state


def test_a_poisoned_step_changes_nothing_and_is_told(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    poison(monkeypatch, lambda state: state.step == 4)
    every = ["--checkpoint.every", "1", "--checkpoint.keep_last", "20"]
    assert launch(small_run(*QUIET, *every)) == 0
    run = tmp_path / "run"
    assert_same_weights(weights(run, 4), weights(run, 5))
    before, after = optimizer_of(run, 4), optimizer_of(run, 5)
    assert all(torch.equal(before[p][key], after[p][key]) for p in before for key in before[p])
    later = weights(run, 6)
    assert not all(torch.equal(later[name], w) for name, w in weights(run, 5).items())
    lines = records(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["train/skipped"] for line in lines] == [0] * 4 + [1] * 8
    assert lines[4]["train/loss"] is None  # JSON has no NaN
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    said = capsys.readouterr().err
    assert "WARNING: step 5: loss nan, gradient norm nan: not finite; its update was skip" in said
    assert "(sequences from 32)" in said


def test_too_many_in_a_row_end_the_run_without_saving(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fault is in sequences 40 to 55, steps 6 and 7; the last save of the run is before."""
    poison(monkeypatch, lambda state: state.sequences in (40, 48))
    own = small_run(*QUIET, "--log.every", "100")
    monkeypatch.setattr("accel_gpt.training.guard.MOST_SKIPPED", 2)
    assert launch(own) == 5
    said = capsys.readouterr().err
    assert (
        "the updates of 2 steps in a row, up to step 7, were skipped (sequences 40 to 55)" in said
    )
    run = tmp_path / "run"
    assert checkpoint_steps(run / "checkpoints") == [4]
    path = ["--checkpoint.resume", str(run / "checkpoints/step_00000004")]
    other = ["--out_dir", str(tmp_path / "other")]
    allowed = ["--optim.lr", "1e-4", "--checkpoint.allow_change", "optim.lr"]
    monkeypatch.setattr("accel_gpt.training.guard.MOST_SKIPPED", 3)
    assert launch([*own, *path, *other, *allowed]) == 0
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "other").values())


def test_weights_that_overflowed_are_never_saved(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def overflow(run: train.Training) -> None:
        if run.state.step == 8:
            next(run.gpt.parameters()).data[0, 0] = math.inf

    around_updates(monkeypatch, after=overflow)
    assert launch(small_run(*QUIET, "--log.every", "5")) == 5
    assert "after step 8 weights are not finite, and were not saved" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]


def test_weights_that_differ_between_ranks_are_refused_on_all() -> None:
    """This holds for replicas: FSDP's shards differ, and rounding does not count."""

    def check(kind: DistributedType, factor: float) -> list[str]:
        def work(one: Any) -> str:
            one.distributed_type = kind
            net = torch.nn.Linear(3, 2)
            torch.nn.init.ones_(net.weight)
            torch.nn.init.zeros_(net.bias)
            net.weight.data[1, 1] *= factor**one.process_index
            try:
                check_weights(net, one, 7)
            except DivergedError as error:
                return str(error)
            return ""

        return together(2, work)

    for said in check(DistributedType.MULTI_CPU, 1.01):
        assert "after step 7 the weights of rank 1 differ from rank 0" in said
        assert "weight has norm 2.453589, not 2.44949), and were not saved" in said
    assert check(DistributedType.FSDP, 1.01) == ["", ""]
    assert check(DistributedType.MULTI_GPU, 1 + 1e-6) == ["", ""]
    assert all("are not finite" in said for said in check(DistributedType.FSDP, math.inf))


class Waits(TorchDispatchMode):
    """Counts the calls that make the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_nothing(small_run: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def update(run: train.Training) -> None:
        with Waits() as waits:
            plain_update(run)
        counts.append(waits.count)

    plain_update = train.update
    monkeypatch.setattr(train, "update", update)
    assert launch(small_run(*QUIET, "--model.dropout", "0", "--train.max_steps", "3")) == 0
    assert counts == [0] * 3


# --------------------------------------------------------------------------- the step guard alone


def guard() -> StepGuard:
    return StepGuard(torch.device("cpu"))


def check(tested: StepGuard, *losses: float, norm: float = 1.0) -> list[bool]:
    """Return whether the update of each loss is skipped; a step has 8 sequences."""
    first = len(tested.pending)
    return [
        bool(tested.check(i + 1, 8 * i, torch.tensor(loss), torch.tensor(norm)))
        for i, loss in enumerate(losses, first)
    ]


def wavy(count: int) -> list[float]:
    """Return losses with a standard deviation of about 0.07."""
    return [3 + 0.1 * math.sin(i) for i in range(count)]


@pytest.mark.parametrize("height", [0.9, 0.3])
def test_a_spike_stands_out_of_a_full_window_alone(height: float) -> None:
    tested, warnings = guard(), list[str]()
    # at 50 the window is not full yet
    losses = [*wavy(SPIKE_WINDOW - 1), 50.0, *wavy(SPIKE_WINDOW), 3.2]
    assert not any(check(tested, *losses))
    found = height == 0.9  # about 12 standard deviations; 0.3: about 4
    assert check(tested, 3 + height) == [False]
    metrics = tested.flush(warnings.append)
    assert (metrics["train/spikes"], metrics["train/skipped"]) == (found, 0)
    assert ["a spike (" in line for line in warnings] == [True] * found


def test_the_window_resumes_from_a_state_dict() -> None:
    whole, stopped = guard(), guard()
    for i, loss in enumerate([*wavy(200), math.nan, *wavy(50)]):
        for tested in (whole, stopped):
            check(tested, loss)
            tested.flush(lambda _: None)
        if i in (60, 140, 203):
            state = json.loads(json.dumps(stopped.state_dict()))
            stopped = guard()
            stopped.load_state_dict(state)
    assert whole.state_dict() == stopped.state_dict()
    assert len(whole.state_dict()["losses"]) == SPIKE_WINDOW
    assert torch.equal(whole.window, stopped.window)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (3.0, math.inf), (-math.inf, 1.0)])
def test_what_is_not_finite_is_skipped_and_counted(
    loss: float, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.training.guard.MOST_SKIPPED", 3)
    tested = guard()
    for bad in (False, True, True, False, True, True):
        assert check(tested, loss if bad else 3.0, norm=norm if bad else 1.0) == [bad]
    tested.flush(lambda _: None)
    assert (tested.skipped, tested.skipped_in_row) == (4, [32, 40])
    assert not tested.too_many_skipped
    check(tested, loss, 3.0, norm=norm)
    tested.flush(lambda _: None)
    assert tested.too_many_skipped
    assert (tested.step, tested.skipped_in_row) == (1, [32, 40, 0])
