"""A run from trained weights evaluates them before step 1: once, and without a trace."""

import csv
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_gpt import train
from accel_gpt.errors import DataError
from accel_gpt.evals import validation
from accel_gpt.launch import compile as compilation
from accel_gpt.runs.checkpoint import read_state
from accel_gpt.runs.folder import RunFolder
from tests.conftest import launch
from tests.runs.test_interrupted import call_before
from tests.test_train import assert_same_weights, records, weights
from tests.training.test_trackers import assert_shows, shown_by_tensorboard
from tests.transformers_io.test_export import QUICK

Arguments = Callable[..., list[str]]
Patch = pytest.MonkeyPatch


@pytest.fixture
def source(trained: Callable[..., Path]) -> Path:
    """A run of one step, evaluated at its end."""
    return trained(*QUICK, to="source")


@pytest.fixture
def tuned(source: Path, small_run: Arguments) -> Arguments:
    """Arguments of a run of four steps from the weights of `source`."""
    words = ["--model.init_from", str(source), "--train.max_steps", "4", "--sample.every", "0"]
    words += ["--eval.every", "2", "--checkpoint.every", "2"]
    return partial(small_run, *words)


def without_first_evaluation(patch: Patch) -> None:
    """Let a run begin with step 1."""
    set_up = train.set_up

    def unevaluated(*arguments: Any) -> train.Training:
        run = set_up(*arguments)
        run.state.pending_record = None
        return run

    patch.setattr(train, "set_up", unevaluated)


def test_the_first_record_is_the_evaluation_of_the_trained_weights(
    tuned: Arguments, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = tuned("--log.trackers", "tensorboard")
    assert launch([*words, "--train.stop_at", "2"]) == 0
    assert launch(words) == 0
    first, *others = records(run)
    assert [record["step"] for record in others] == [1, 2, 3, 4]
    ours = {name: value for name, value in first.items() if name.startswith("eval/")}
    assert first == {"step": 0, "tokens": 0, **ours}
    evaluated = {k: v for k, v in records(source)[-1].items() if k.startswith("eval/")}
    assert ours == evaluated  # the same weights on the same tokens
    row, *_ = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert (row["step"], row["progress"], row["tokens_this_launch"]) == ("0", "0.0", "0")
    assert float(row["eval/val_loss"]) == first["eval/val_loss"]
    line = r"^step 0/4 \| train \d+\.\d+ \| val \d+\.\d+ \| \d+\.\d+ bits/byte$"
    assert len(re.findall(line, capsys.readouterr().err, flags=re.MULTILINE)) == 1
    shown = shown_by_tensorboard(run)
    assert_shows(shown, run)
    assert min(step for step, _, _ in shown) == 0


def test_step_0_is_not_the_best_and_hinders_no_other(tuned: Arguments, tmp_path: Path) -> None:
    """The learning rate is far too high: the run never reaches the loss that it began with."""
    words = tuned("--checkpoint.keep_best", "true", "--optim.lr", "0.3", "--optim.grad_clip", "0")
    assert launch(words) == 0
    evaluated = [record for record in records(tmp_path / "run") if "eval/val_loss" in record]
    losses = {record["step"]: record["eval/val_loss"] for record in evaluated}
    assert losses.keys() == {0, 2, 4}
    assert losses.pop(0) < min(losses.values())
    best = min(losses, key=lambda step: losses[step])
    assert (tmp_path / "run" / "best").read_text() == f"{best}\n"
    assert read_state(tmp_path / "run" / "checkpoints" / "step_00000004").best_step in (2, 4)


def test_the_first_evaluation_leaves_no_trace(
    tuned: Arguments, tmp_path: Path, monkeypatch: Patch
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"ctx": "the king", "endings": ["a sea", "war"], "label": 0}\n' * 5)
    words = tuned("--eval.hellaswag", str(questions))
    assert launch([*words, "--out_dir", str(tmp_path / "with")]) == 0
    without_first_evaluation(monkeypatch)
    assert launch([*words, "--out_dir", str(tmp_path / "without")]) == 0
    first, *others = records(tmp_path / "with")
    assert "eval/hellaswag_acc" in first
    assert others == records(tmp_path / "without")
    assert_same_weights(weights(tmp_path / "with", 4), weights(tmp_path / "without", 4))


@pytest.mark.parametrize(
    ("module", "name", "number"), [(validation, "collate", 3), (train, "update", 1)]
)
def test_a_launch_that_ends_before_step_1_is_repeated(
    module: Any,
    name: str,
    number: int,
    tuned: Arguments,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """It ends in the evaluation, or after it; no tracker shows a value twice."""

    def fail() -> None:
        raise DataError("the shard cannot be read")

    for run in ("whole", "run"):
        words = tuned("--log.trackers", "tensorboard", "--out_dir", str(tmp_path / run))
        if run == "run":
            with monkeypatch.context() as patch:
                call_before(patch, module, name, number, fail)
                assert launch(words) == 3
            assert len(list(RunFolder(tmp_path / run).records())) == (name == "update")
            assert not RunFolder(tmp_path / run).checkpoints
            time.sleep(1)  # the names of event files begin with the second
        assert launch(words) == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "run", 4), weights(tmp_path / "whole", 4))
    assert_shows(shown_by_tensorboard(tmp_path / "run"), tmp_path / "run")


def test_a_stop_in_the_first_evaluation_does_not_say_that_it_saved(
    tuned: Arguments,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = tuned()
    with monkeypatch.context() as patch:
        press = partial(os.kill, os.getpid(), signal.SIGINT)
        call_before(patch, validation, "collate", 2, press)
        assert launch(words) == 75
    told = capsys.readouterr().err
    assert "SIGINT: stopped before the first step; launch again to start\n" in told
    assert "SIGINT: stopping before the first step\n" in told
    assert not re.search("saved|saving", told)
    run = RunFolder(tmp_path / "run")
    assert (list(run.records()), run.checkpoints) == ([], {})
    assert launch(words) == 0
    assert [record["step"] for record in records(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_signal_after_the_first_evaluation_saves_step_1(
    tuned: Arguments, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    press = partial(os.kill, os.getpid(), signal.SIGINT)
    call_before(monkeypatch, train, "update", 1, press)
    assert launch(tuned()) == 75
    told = capsys.readouterr().err
    assert "SIGINT: saving after this step; press again to abandon it\n" in told
    assert "SIGINT: saved at step 1 of 4" in told
    assert list(RunFolder(tmp_path / "run").checkpoints) == [1]


@pytest.mark.slow
def test_the_first_evaluation_does_not_change_the_graph_of_the_steps(
    tuned: Arguments, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Compiled for the evaluation first, a number of the step would become a variable.

    Evaluations are compiled only on GPUs, so this one is told that it is on one.
    """
    variables: list[int] = []

    def backend(graph: nn.Module, inputs: list[Any]) -> nn.Module:
        if torch.is_grad_enabled():
            variables.append(sum(not isinstance(one, torch.Tensor) for one in inputs))
        return graph

    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: plain(module, backend=backend))
    monkeypatch.setattr(compilation, "compiler_error", lambda device: None)
    monkeypatch.setattr(validation, "evaluating", lambda _: torch.no_grad())
    words = tuned("--train.compile", "true", "--model.dropout", "0")
    for name in ("with", "without"):
        if name == "without":
            without_first_evaluation(monkeypatch)
        torch._dynamo.reset()
        assert launch([*words, "--out_dir", str(tmp_path / name)]) == 0
    assert variables == [0, 0]
