"""A run with data inside its folder is moved, or named from another folder."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands.resolve import load_config
from accel_gpt.runs.folder import RunFolder
from tests.conftest import QUIET, launch, run_here

Arguments = Callable[..., list[str]]
LONGER = ("--train.max_steps", "6", "--checkpoint.allow_change", "train.max_steps")


@pytest.fixture
def work(
    small_run: Arguments, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a run `runs/a` of 4 steps that holds its data and val data."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.copytree(corpus, folder / "runs" / "a" / "data")
    shutil.copytree(corpus, folder / "runs" / "a" / "held_out")
    data = ("--data.train", "runs/a/data", "--data.val", "runs/a/held_out")
    assert launch(small_run(*QUIET, *data, "--out_dir", "runs/a", "--train.max_steps", "4")) == 0
    shutil.rmtree(corpus)
    return folder


def test_a_moved_run_is_evaluated_and_resumed_from_another_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "moved"
    (work / "runs" / "a").rename(run)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert run_here(dispatch, ["evaluate", "moved"]) == 0
    assert re.search(r"^step +4$", capsys.readouterr().out, re.MULTILINE)
    assert launch(["moved/config.yaml", *LONGER]) == 0
    said = capsys.readouterr().err
    assert "moved/config.yaml sets out_dir to runs/a; the run continues in moved," in said
    assert "from step 4 (moved/checkpoints/step_00000004)" in said
    assert RunFolder(run).step == 6
    assert sorted(path.name for path in tmp_path.glob("*")) == [
        *("moved", "small.yaml", "text.txt", "work"),
    ]
    assert list((work / "runs").iterdir()) == []
    assert run_here(dispatch, ["evaluate", str(run)]) == 0


def test_the_config_of_a_run_starts_another_one_where_out_dir_is_given(work: Path) -> None:
    config = load_config(["runs/a/config.yaml", "--out_dir", "runs/c"], "train")
    assert (config.out_dir, config.data.train) == ("runs/c", "runs/a/data")
    (work / "runs" / "a").rename("runs/b")
    config = load_config(["runs/b/config.yaml", "--out_dir", "runs/c"], "train")
    assert (config.out_dir, config.data.train) == ("runs/c", "runs/b/data")
