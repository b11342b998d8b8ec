"""Resumed equals never stopped, wherever a run was interrupted."""

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
from accel_gpt.runs.checkpoint import read_evaluated, read_state
from accel_gpt.runs.folder import RunFolder
from tests.conftest import launch
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
Patch = pytest.MonkeyPatch


def call_before(
    monkeypatch: Patch, module: Any, name: str, number: int, act: Callable[[], None]
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


def break_shards(monkeypatch: Patch) -> None:
    def fail(*_: object) -> None:
        raise DataError("the shard cannot be read")

    monkeypatch.setattr(Split, "read", fail)


# The interruptions of one run, in turn: before which call of which function, counted in a launch;
# the signal, or 0 for shards that cannot be read; the step that is saved. An evaluation has four
# batches of 8 x 32 tokens, and steps 4, 8 and 12 have one; steps 6 and 12 have samples of 8 tokens.
STOPS = (
    (train, "update", 3, signal.SIGINT, 3),
    (validation, "collate", 2, signal.SIGTERM, 4),
    (generate, "sample_token", 3, signal.SIGINT, 6),
    (train, "evaluate_step", 1, 0, 8),
    (validation, "collate", 4 + 2, signal.SIGUSR2, 12),
    (generate, "sample_token", 3, signal.SIGUSR1, 12),
)


def best_before(run: Path, step: int) -> int | None:
    """Return the step with the lowest loss in the records before `step`."""
    losses = {}
    for record in records(run):
        if record["step"] < step and "eval/val_loss" in record:
            losses[int(record["step"])] = record["eval/val_loss"]
    return min(losses, key=lambda step: losses[step], default=None)


@pytest.mark.parametrize(
    "options",
    [(), ("--checkpoint.keep_best", "true", "--checkpoint.every", "0", "--log.every", "3")],
)
def test_a_run_that_is_stopped_everywhere_equals_one_that_never_stopped(
    options: tuple[str, ...],
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the end its newest checkpoint is damaged, and its last record is torn."""
    run, whole = tmp_path / "run", trained(*options, to="whole")
    for module, name, number, sent, step in STOPS:
        with monkeypatch.context() as patch:

            def act(patch: Patch = patch, sent: int = sent) -> None:
                os.kill(os.getpid(), sent) if sent else break_shards(patch)

            calls = call_before(patch, module, name, number, act)
            assert launch(small_run(*options)) == (75 if sent else 3)
        said = capsys.readouterr().err
        assert len(calls) == number  # nothing follows
        end = f"{sent.name}: saved at step {step} " if sent else "error: the shard cannot be read"
        assert end in said
        assert list(RunFolder(run).checkpoints)[-1] == step
        assert read_state(RunFolder(run).checkpoints[step]).best_step == best_before(run, step)
    assert 12 not in [record["step"] for record in records(run)][:-1]
    (run / "checkpoints" / "step_00000012" / "model.json").write_text("{}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "tok')
    assert launch(small_run(*options)) == 0
    assert "from step 8 " in capsys.readouterr().err
    assert records(run) == records(whole)
    rows, expected = ((r / "metrics.csv").read_text().splitlines() for r in (run, whole))
    assert [row.partition(",")[0] for row in rows] == [row.partition(",")[0] for row in expected]
    assert RunFolder(run).best == RunFolder(whole).best
    assert_same_weights(weights(run), weights(whole))
    states = [vars(read_evaluated(RunFolder(r).checkpoints[12])) for r in (run, whole)]
    for name in states[0].keys() - {"config", "seconds"}:  # the guard's losses are among them
        assert states[0][name] == states[1][name], name
    texts = [{p.name: p.read_text() for p in (r / "samples").iterdir()} for r in (run, whole)]
    assert texts[0] == texts[1]


def test_a_signal_is_acknowledged_at_once(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """During the step."""
    shown: list[str] = []

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher delivers the same key press again
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
        assert launch(small_run("--train.stop_at", "4", "--sample.every", "0")) == 0
    short = ("--train.stop_at", "6", "--sample.every", "0", "--eval.every", "4")
    assert launch(small_run(*short)) == 0
    times = [record["time"] for record in RunFolder(tmp_path / "run").records()]
    assert times == sorted(times)
