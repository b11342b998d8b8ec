"""A run whose folder is removed, renamed or taken by another run while it trains."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import train
from accel_gpt.errors import BusyError
from accel_gpt.files import fault_counts
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, locked
from tests.conftest import QUIET, launch

Arguments = Callable[..., list[str]]
GONE = "was removed or renamed while the run was training"
TAKEN = "is no longer locked by this run: its file .lock was removed or replaced"


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call `act` before step `step` is trained."""
    plain_update = train.update

    def update(run: train.Training) -> Any:
        if run.state.step == step - 1:
            act()
        return plain_update(run)

    monkeypatch.setattr(train, "update", update)


@pytest.mark.parametrize(
    "options",
    [
        (*QUIET,),
        (*QUIET, "--log.every", "100"),  # the first write is a checkpoint
        # the first write is samples
        ("--log.every", "100", "--eval.every", "0", "--checkpoint.every", "0"),
        # the first write is the metrics of the last step
        (*QUIET, "--log.every", "100", "--checkpoint.every", "0"),
    ],
)
def test_a_folder_that_was_removed_is_not_made_again(
    options: tuple[str, ...],
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    before_step(monkeypatch, 6, lambda: shutil.rmtree(run))
    assert launch(small_run(*options)) == BusyError.exit_code == 6
    said = capsys.readouterr().err
    assert f"error: out_dir {run} {GONE}" in said
    assert "WARNING" not in said  # no warning of a full disk
    assert not run.exists()


def test_a_renamed_folder_keeps_what_it_had(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with monkeypatch.context() as patch:
        before_step(patch, 6, lambda: run.rename(moved))
        assert launch(small_run(*QUIET, "--log.trackers", "tensorboard")) == 6
    assert GONE in capsys.readouterr().err
    assert not run.exists()
    assert checkpoint_steps(moved / "checkpoints") == [4]
    assert RunFolder(moved).step == 5
    assert launch([str(moved / "config.yaml")]) == 0
    assert RunFolder(moved).step == 12


@pytest.mark.parametrize("every", ["1", "100"])
def test_nothing_is_written_where_another_run_works(
    every: str,
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with contextlib.ExitStack() as other:

        def take() -> None:
            shutil.rmtree(run)
            other.enter_context(locked(run))
            (run / "checkpoints").mkdir()

        before_step(monkeypatch, 6, take)
        assert launch(small_run(*QUIET, "--log.every", every)) == 6
        assert f"error: out_dir {run} {TAKEN}" in capsys.readouterr().err
        assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == [
            *(".lock", "checkpoints")
        ]


@pytest.mark.slow
def test_a_checkpoint_under_way_is_not_published_where_another_run_works(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The save of step 4 sleeps while another run takes the folder; both have its files."""
    run, log = tmp_path / "run", tmp_path / "points.txt"
    with contextlib.ExitStack() as other:

        def take() -> None:
            while not log.exists() or "manifest.due" not in log.read_text():
                time.sleep(0.01)
            run.rename(tmp_path / "moved")
            other.enter_context(locked(run))
            shutil.copytree(tmp_path / "moved" / "checkpoints", run / "checkpoints")

        before_step(monkeypatch, 6, take)
        fault_counts.cache_clear()
        monkeypatch.setenv("ACCEL_GPT_FAULT_LOG", str(log))
        monkeypatch.setenv("ACCEL_GPT_FAULT", "manifest.due=sleep")
        options = (*QUIET, "--log.every", "100", "--checkpoint.async_save", "true")
        assert launch(small_run(*options)) == 6
        assert TAKEN in capsys.readouterr().err
        assert checkpoint_steps(run / "checkpoints") == []
        assert (run / "checkpoints" / ".tmp_step_00000004").is_dir()  # the other run's


def test_metrics_that_were_removed_begin_anew_with_a_header(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def remove() -> None:
        (run / "metrics.csv").unlink()
        (run / "metrics.jsonl").unlink()

    before_step(monkeypatch, 6, remove)
    assert launch(small_run(*QUIET)) == 0
    assert [int(row["step"]) for row in RunFolder(run).csv_records()] == list(range(6, 13))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6, 13))
    longer = ("--train.max_steps", "13", "--checkpoint.allow_change", "train.max_steps")
    assert launch(small_run(*QUIET, *longer)) == 0
    assert [int(row["step"]) for row in RunFolder(run).csv_records()] == list(range(6, 14))
