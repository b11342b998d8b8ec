"""A signal or an error between a step and its evaluation or samples loses nothing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import train
from accel_gpt.data.shards import Split
from accel_gpt.errors import DataError
from accel_gpt.evals import validation
from accel_gpt.model import generate
from accel_gpt.runs.folder import RunFolder
from tests.conftest import launch
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
BATCHES = 4  # of an evaluation: 512 tokens of two splits, in batches of 8 x 32 tokens
BEST = ("--checkpoint.keep_best", "true")
RARELY = ("--checkpoint.every", "0", "--log.every", "3")


def call_before(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int, act: Callable[[], None]
) -> list[int]:
    """Call `act` before call `number` of a function; return a list with an entry per call."""
    function = getattr(module, name)
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            act()
        return function(*args, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fail() -> None:
    raise DataError("the shard cannot be read")


def saved_steps(run: Path) -> list[int]:
    return list(RunFolder(run).checkpoints)


def assert_same_run(run: Path, whole: Path) -> None:
    assert records(run) == records(whole)
    rows, expected = ((r / "metrics.csv").read_text().splitlines() for r in (run, whole))
    assert [row.partition(",")[0] for row in rows] == [row.partition(",")[0] for row in expected]
    assert RunFolder(run).best == RunFolder(whole).best
    assert_same_weights(weights(run), weights(whole))
    samples = sorted(path.name for path in (whole / "samples").iterdir())
    assert sorted(path.name for path in (run / "samples").iterdir()) == samples
    for name in samples:
        assert (run / "samples" / name).read_text() == (whole / "samples" / name).read_text()


def test_a_signal_during_an_evaluation_saves_at_once(
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of the evaluation of the last step, the third."""
    run, whole = tmp_path / "run", trained(to="whole")
    number, step = BATCHES * 2 + 2, 12
    with monkeypatch.context() as patch:
        calls = call_before(patch, validation, "collate", number, send(signal.SIGTERM))
        assert launch(small_run()) == 75
    assert len(calls) == number  # the current batch is the last one
    assert f"SIGTERM: saved at step {step} " in capsys.readouterr().err
    assert saved_steps(run)[-1] == step
    assert step not in [record["step"] for record in records(run)]
    assert launch(small_run()) == 0
    assert_same_run(run, whole)


def test_a_signal_during_samples_saves_at_once(
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: during the samples of step 6, which restart, and of the last step."""
    run, whole = tmp_path / "run", trained(to="whole")
    with monkeypatch.context() as patch:
        calls = call_before(patch, generate, "sample_token", 3, send(signal.SIGINT))
        assert launch(small_run()) == 75
        assert len(calls) == 3
    assert saved_steps(run)[-1] == 6
    with monkeypatch.context() as patch:
        call_before(patch, generate, "sample_token", 8 + 3, send(signal.SIGUSR1))
        assert launch(small_run()) == 75
    assert [path.name for path in (run / "samples").iterdir()] == ["step_00000006.txt"]
    assert launch(small_run()) == 0
    assert_same_run(run, whole)


@pytest.mark.parametrize(("options", "evaluation"), [(BEST, 3), (RARELY, 1)])
def test_an_evaluation_that_fails_costs_no_step(
    options: tuple[str, ...],
    evaluation: int,
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, whole, step = tmp_path / "run", trained(*options, to="whole"), 4 * evaluation
    with monkeypatch.context() as patch:

        def unreadable() -> None:
            patch.setattr(Split, "read", lambda *_: fail())

        call_before(patch, train, "evaluate_step", evaluation, unreadable)
        assert launch(small_run(*options)) == 3
    assert "error: the shard cannot be read" in capsys.readouterr().err
    assert saved_steps(run)[-1] == step
    assert launch(small_run(*options)) == 0
    assert_same_run(run, whole)


def test_a_signal_is_acknowledged_at_once(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """During the step."""
    shown: list[str] = []

    def press() -> None:
        send(signal.SIGINT)()
        send(signal.SIGINT)()  # a launcher delivers the same key press again
        end = time.monotonic() + 60
        while "SIGINT" not in (text := "".join(shown)) and time.monotonic() < end:
            time.sleep(0.01)
            shown.append(capsys.readouterr().err)
        assert "SIGINT: saving after this step; press again to abandon it\n" in text

    call_before(monkeypatch, train, "update", 3, press)
    assert launch(small_run()) == 75
    shown.append(capsys.readouterr().err)
    assert "".join(shown).count("SIGINT: saving") == 1
    assert "SIGINT: saved at step 3 " in "".join(shown)


def test_the_clock_of_a_run_counts_the_evaluation_after_a_save(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first records after a resume would be earlier than the evaluation's."""
    collate = validation.collate

    def slowly(*args: Any) -> Any:
        time.sleep(0.1)
        return collate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(validation, "collate", slowly)
        assert launch(small_run("--train.stop_at", "4")) == 0
    assert launch(small_run()) == 0
    times = [record["time"] for record in RunFolder(tmp_path / "run").records()]
    assert times == sorted(times)
