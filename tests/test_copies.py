"""Checkpoints copied elsewhere while a run trains, and taken from there by a run that has none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from accel_gpt import train
from accel_gpt.training.checkpoint import verify
from tests.conftest import run_here
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]
EVERY = (
    "--checkpoint.every",
    "4",
    "--checkpoint.keep_last",
    "1",
    "--checkpoint.keep_best",
    "false",
)


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, or a URL of a store without folders."""
    return str(tmp_path / "other") if request.param == "folder" else f"memory://{tmp_path}/other"


def steps(place: str) -> list[str]:
    system, root = fsspec.url_to_fs(place)
    return sorted(Path(name).name for name in system.ls(root, detail=False))


def test_a_lost_run_goes_on_from_the_copy(
    place: str, small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here(train.main, small_run(*EVERY, "--out_dir", str(tmp_path / "whole"))) == 0
    own = small_run(*EVERY, "--checkpoint.copy_to", place)
    signal_after(monkeypatch, 6, 15)
    assert run_here(train.main, own) == 75
    assert steps(place) == ["step_00000006"]  # keep_last, and the one of the signal
    shutil.rmtree(tmp_path / "run")
    assert run_here(train.main, own) == 0
    lost = records(tmp_path / "run")
    assert [record["step"] for record in lost] == list(range(7, 13))
    assert steps(place) == ["step_00000012"]
    assert not (tmp_path / "run" / ".copies").exists()
    assert_same_weights(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_copy_that_broke_off_or_is_damaged_is_passed_over(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "other"
    own = small_run(*EVERY[:2], "--checkpoint.keep_last", "3", "--checkpoint.copy_to", str(place))
    assert run_here(train.main, own) == 0
    assert steps(str(place)) == ["step_00000004", "step_00000008", "step_00000012"]
    (place / "step_00000012" / "manifest.json").unlink()
    file = place / "step_00000008" / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-9])
    shutil.rmtree(tmp_path / "run")
    assert run_here(train.main, own) == 0
    said = capsys.readouterr().err
    assert "truncated; taking the copy before it" in said
    assert "step 4 was downloaded from" in said
    assert steps(str(place)) == ["step_00000004", "step_00000008", "step_00000012"]
    verify(place / "step_00000012")


def test_a_copy_that_broke_off_is_pruned(small_run: Arguments, tmp_path: Path) -> None:
    (tmp_path / "other" / "step_00000001").mkdir(parents=True)
    assert (
        run_here(train.main, small_run(*EVERY, "--checkpoint.copy_to", str(tmp_path / "other")))
        == 0
    )
    assert steps(str(tmp_path / "other")) == ["step_00000012"]


def test_a_place_that_cannot_be_written_harms_nothing(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    own = small_run(*EVERY, "--checkpoint.copy_to", str(tmp_path / "file" / "other"))
    assert run_here(train.main, own) == 0
    said = capsys.readouterr().err
    assert said.count("could not be copied to") == 1
    assert "12 steps" in said


def test_a_url_with_a_password_is_refused(
    small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(train.main, small_run("--checkpoint.copy_to", "ftp://me:pw@host/x")) == 2
    said = capsys.readouterr().err
    assert "ftp://host/x has a password or a query" in said
    assert "pw" not in said.replace("password", "")
