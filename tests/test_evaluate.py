"""`accel-gpt evaluate` and `eval.only`: a run measured after training, its figures kept with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.errors import run_main
from tests.conftest import launch
from tests.test_train import records

Arguments = Callable[..., list[str]]


def call(*words: str) -> int:
    return run_main(dispatch, ["evaluate", *words])


@pytest.fixture
def trained(small_run: Arguments, tmp_path: Path) -> Path:
    """A run of four steps, evaluated at its end."""
    assert launch(small_run("--train.max_steps", "4", "--sample.every", "0")) == 0
    return tmp_path / "run"


def test_figures_of_the_command_are_those_of_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = records(trained)
    assert call(str(trained), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    evals = {key: value for key, value in before[-1].items() if key.startswith("eval/")}
    assert told["figures"] == evals
    assert told["step"] == 4
    assert records(trained) == before
