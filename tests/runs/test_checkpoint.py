"""Checkpoints: complete or absent, verified, pruned last, rejected if of another run."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.config.experiment import CheckpointConfig
from accel_gpt.config.yardstick import Yardstick
from accel_gpt.errors import CheckpointError, NewerFormatError, UserError
from accel_gpt.runs.checkpoint import (
    find_checkpoint,
    optimizer_parts,
    read_state,
    verify_checkpoint,
    write_json,
)
from accel_gpt.runs.folder import checkpoint_steps, step_name
from accel_gpt.runs.resume import find_resume
from accel_gpt.runs.saving import name_best_and_prune
from accel_gpt.runs.state import TrainState
from accel_gpt.transformers_io.load import load_checkpoint
from tests.conftest import launch, reseal, run_here

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]


@pytest.fixture
def run(trained: Trained) -> Path:
    """A finished run with checkpoints at 8 and 12 (4 is pruned)."""
    return trained()


def fake(root: Path, states: dict[int, Any]) -> None:
    """Write checkpoints with only a manifest and a state."""
    for step, state in states.items():
        (root / step_name(step)).mkdir(parents=True)
        (root / step_name(step) / "manifest.json").write_text("{}")
        content = {"format": 1, "step": step} | state
        write_json(root / step_name(step) / "trainer_state.json", content)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    fake(root, {step: {} for step in range(1, 6)})
    (root / "mine").mkdir()
    name_best_and_prune(tmp_path, CheckpointConfig(keep_last=2), 5, best_step=2)
    assert checkpoint_steps(root) == [2, 4, 5]
    assert (root / "mine").is_dir()
    assert (tmp_path / "best").read_text() == "2\n"
    assert find_checkpoint(tmp_path, "best").name == "step_00000002"
    assert find_checkpoint(tmp_path).name == "step_00000002"
    fake(root, {6: {}, 7: {}})
    name_best_and_prune(
        tmp_path, CheckpointConfig(keep_last=1), 7, best_step=6 + 3
    )  # the save of step 9 failed
    assert checkpoint_steps(root) == [2, 7]
    assert (tmp_path / "best").read_text() == "2\n"
    (tmp_path / "best").write_text("3\n")
    with pytest.raises(UserError, match="no checkpoint '3'; expected one of last, best, 2, 7"):
        find_checkpoint(tmp_path)  # no other one is taken in silence
    (tmp_path / "best").unlink()
    with pytest.raises(UserError, match="no checkpoint 'best'; expected one of last, best, 2, 7"):
        find_checkpoint(tmp_path, "best")
    assert find_checkpoint(tmp_path).name == "step_00000007"


def test_only_a_checkpoint_of_the_step_in_its_name_is_counted(tmp_path: Path) -> None:
    """`step_00000003` is a copy of step 1. Neither it nor an unreadable one is removed."""
    root = tmp_path / "checkpoints"
    fake(root, {1: {}, 2: {"step": "broken"}, 3: {"step": 1}, 4: {}, 200: {}})
    name_best_and_prune(tmp_path, CheckpointConfig(keep_last=1), 4, best_step=None)
    assert checkpoint_steps(root) == [2, 3, 4, 200]


def test_a_copy_under_the_name_of_another_step_is_set_aside(run: Path) -> None:
    root = run / "checkpoints"
    shutil.copytree(root / "step_00000008", root / "step_00000100")
    with pytest.raises(CheckpointError, match=r"step_00000100 holds step 8, "):
        load_checkpoint(find_checkpoint(run))
    said: list[str] = []
    assert find_resume(run, "auto", said.append) == root / "step_00000012"
    assert "step_00000100 holds step 8" in said[0]
    assert checkpoint_steps(root) == [8, 12]


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("model.json", "config.window"),
        ("trainer_state.json", "ema"),
        ("manifest.json", "signature"),
    ],
)
def test_a_key_of_another_version_is_never_dropped(
    run: Path, small_run: Arguments, file: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step_00000012"
    content = json.loads((newest / file).read_text())
    (content["config"] if "." in key else content)[key.rpartition(".")[2]] = None
    (newest / file).write_text(json.dumps(content))
    if file != "manifest.json":
        with pytest.raises(NewerFormatError):
            reseal(newest)
    to = str(run.with_name("exported"))
    commands = (["sample"], ["inspect"], ["export", "--to", to])
    for command, *options in commands:
        assert run_here(dispatch, [command, str(run), *options]) == 4
        assert f"{newest / file}: {key} is an unknown key; upd" in capsys.readouterr().err
    assert launch(small_run()) == 4
    assert f"{newest / file}: {key} is an unknown key; upd" in capsys.readouterr().err
    assert checkpoint_steps(run / "checkpoints") == [8, 12]  # nothing is set aside


def test_damage_is_named(run: Path) -> None:
    newest = run / "checkpoints" / "step_00000012"
    file = newest / "optimizer.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin was altered: its SHA-256 begins"):
        verify_checkpoint(newest)
    file.write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"optimizer\.bin was altered: it has 1 bytes, expected"
    ):
        verify_checkpoint(newest)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing"):
        verify_checkpoint(newest)


FILES_OF_OTHERS = (
    *(".DS_Store", "._model.safetensors", "._random_states_0.pkl"),  # macOS
    *("Thumbs.db", ".nfs00000000c0ffee", "optimizer.bin~", "optimizer.bin.part"),
    *("model 2.safetensors", "optimizer.sync-conflict-20261128.bin"),  # Finder, Syncthing
    # as we, torch and Accelerate name theirs
    *("weights_7.safetensors", "optimizer_7.safetensors", "custom_checkpoint_0.pkl"),
)


def test_files_that_the_manifest_does_not_name_are_no_damage(
    run: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run / "checkpoints"
    for folder in (checkpoints, *checkpoints.iterdir()):
        for name in FILES_OF_OTHERS:
            (folder / name).write_bytes(b"\x00\x05\x16\x07Mac OS X")
        (folder / ".stfolder").mkdir()
    longer = ["--train.max_steps", "16", "--checkpoint.allow_change", "train.max_steps"]
    assert launch(small_run(*longer)) == 0
    assert "WARNING" not in capsys.readouterr().err
    assert checkpoint_steps(checkpoints) == [12, 16]
    assert run_here(dispatch, ["inspect", str(run)]) == 0
    assert run_here(dispatch, ["sample", str(run), "--checkpoint", "12"]) == 0
    assert optimizer_parts(checkpoints / "step_00000012") == []


def test_a_file_that_cannot_be_read_now_is_no_damage(
    run: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("optimizer.bin", "trainer_state.json", "manifest.json"):
        file = run / "checkpoints" / "step_00000012" / name
        content = file.read_bytes()
        file.unlink()
        file.symlink_to(file)  # the operating system follows it for ever
        assert launch(small_run()) == 4
        reason = f"{file} cannot be read: {os.strerror(errno.ELOOP)}"
        assert reason in capsys.readouterr().err
        assert checkpoint_steps(run / "checkpoints") == [8, 12]  # not set aside
        file.unlink()
        file.write_bytes(content)
    assert launch(small_run()) == 0


def test_newer_format_is_refused(run: Path) -> None:
    path = run / "checkpoints" / "step_00000012" / "manifest.json"
    path.write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(NewerFormatError, match="has format 99, but this version reads only 1"):
        find_resume(run, "auto", lambda _: None)
    assert path.exists()  # not damaged, not set aside


@pytest.mark.parametrize("text", ["[]", '{"format": 1, "files": {"a": 3}}'])
def test_manifest_that_says_nothing_is_damage(run: Path, text: str) -> None:
    (run / "checkpoints" / "step_00000012" / "manifest.json").write_text(text)
    assert find_resume(run, "auto", lambda _: None) == run / "checkpoints" / "step_00000008"


def test_intervals_in_steps_and_tokens() -> None:
    for every, every_tokens, due in ((4, None, [4, 8]), (0, 250, [3, 5, 8]), (5, 400, [4, 5, 8])):
        config = CheckpointConfig(every=every, every_tokens=every_tokens)
        states = (TrainState(step=step, tokens=100 * step) for step in range(1, 9))
        assert [state.step for state in states if state.save_is_due(config, 100)] == due


def test_a_state_with_a_loss_that_is_no_number_is_json(tmp_path: Path) -> None:
    nan = float("nan")
    config = {"optim.lr": 1.0}
    state = TrainState(step=3, val_loss=nan, train_loss=float("inf"), config=config)
    write_json(tmp_path / "trainer_state.json", vars(state))
    text = (tmp_path / "trainer_state.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    again = read_state(tmp_path)
    assert (again.step, again.val_loss, again.train_loss, again.config) == (3, None, None, config)


@pytest.mark.parametrize("sign", [1, -1])
def test_only_a_better_number_is_better(sign: int) -> None:
    """`eval.best` is the lowest value, or the highest."""
    yardstick = Yardstick("eval/mine", highest=sign < 0)
    state = TrainState(step=1)
    assert state.note_evaluation({"eval/val_loss": 9.0, "eval/mine": sign * 2.0}, yardstick)
    first = {"eval/val_loss": 9.0, "eval/mine": sign * math.inf}
    assert not TrainState(step=1).note_evaluation(first, yardstick)  # JSON cannot hold it
    for step, value in ((2, 2.0), (3, float("nan")), (4, 2.5)):
        state.step = step
        record = {"eval/val_loss": 1.0, "eval/mine": sign * value}
        assert not state.note_evaluation(record, yardstick)
    assert (state.best_step, state.best_value, state.val_loss) == (1, sign * 2.0, 1.0)
