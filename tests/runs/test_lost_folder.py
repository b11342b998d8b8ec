"""A run whose folder is removed, renamed or taken by another run while it trains."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.errors import BusyError
from accel_gpt.runs.folder import RunFolder, checkpoint_steps, locked
from accel_gpt.runs.saving import publish_checkpoint
from tests.conftest import QUIET, launch
from tests.runs.test_writer import wait_for_save
from tests.test_train import around_updates, before_step

Arguments = Callable[..., list[str]]
GONE = "was removed, renamed or taken by another run while the run was training"


def test_a_folder_that_was_removed_is_not_made_again(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    before_step(monkeypatch, 6, lambda: shutil.rmtree(run))
    around_updates(monkeypatch, before=wait_for_save)  # a save must not race with the removal
    # the first write is a checkpoint
    assert launch(small_run(*QUIET, "--log.every", "100")) == BusyError.exit_code == 6
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
        around_updates(patch, before=wait_for_save)
        assert launch(small_run(*QUIET, "--log.trackers", "tensorboard")) == 6
    assert GONE in capsys.readouterr().err
    assert not run.exists()
    assert checkpoint_steps(moved / "checkpoints") == [4]
    assert RunFolder(moved).step == 5
    assert launch([str(moved / "config.yaml")]) == 0
    assert RunFolder(moved).step == 12


def test_nothing_is_written_where_another_run_works(
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
        around_updates(monkeypatch, before=wait_for_save)
        assert launch(small_run(*QUIET, "--log.every", "1")) == 6
        assert f"error: out_dir {run} {GONE}" in capsys.readouterr().err
        assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == [
            *(".lock", "checkpoints")
        ]


def test_a_checkpoint_gets_no_name_in_a_folder_that_was_lost(tmp_path: Path) -> None:
    """Also if the folder is lost while the files are written."""
    temporary, final = tmp_path / ".tmp_step_00000004", tmp_path / "step_00000004"
    temporary.mkdir()
    final.mkdir()  # of the run that works there now

    def lost() -> None:
        raise BusyError(GONE)

    with pytest.raises(BusyError):
        publish_checkpoint(temporary, final, {}, lost)
    assert {path.name for path in tmp_path.iterdir()} == {temporary.name, final.name}
    assert not list(final.iterdir())
