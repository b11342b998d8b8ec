"""`train.profile`: writes a trace that a browser opens, and does not change training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import QUIET, launch
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]

STEP = "Optimizer.step#GuardedAdamW.step"


def count(folder: Path, name: str) -> int:
    events = json.loads((folder / "profile_0.json").read_text())["traceEvents"]
    return sum(event.get("name") == name and event.get("ph") == "X" for event in events)


def test_a_profile_records_its_steps_and_changes_nothing(
    small_run: Arguments, trained: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trained(*QUIET)
    assert not (tmp_path / "run" / "profile").exists()
    assert launch(small_run(*QUIET, "--out_dir", str(tmp_path / "p"), "--train.profile", "3")) == 0
    assert_same_weights(weights(tmp_path / "run"), weights(tmp_path / "p"))
    assert records(tmp_path / "run") == records(tmp_path / "p")
    folder = tmp_path / "p" / "profile"
    assert count(folder, STEP) == 3
    assert count(folder, "aten::embedding") == 3  # micro-steps
    assert f"profiled 3 steps: open {folder}/ in ui.perfetto.dev" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["profile_0.json"]


def test_a_launch_that_ends_before_the_first_recorded_step_says_so(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run(*QUIET, "--train.profile", "1", "--train.max_steps", "3")) == 0
    assert "WARNING: train.profile begins at step 4 of a launch" in capsys.readouterr().err
    assert not (tmp_path / "run" / "profile").exists()


def test_a_profile_without_room_does_not_end_the_run(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    options = ("--train.profile", "1", "--train.max_steps", "5")
    assert launch(small_run(*QUIET, *options)) == 0
    assert "the profile could not be written" in capsys.readouterr().err
