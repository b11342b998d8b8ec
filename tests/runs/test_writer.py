"""Writing of checkpoints: in the background, in order, and after failures."""

import errno
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_gpt import files, train
from accel_gpt.files import fault_counts
from accel_gpt.runs import saving as writer
from accel_gpt.runs.checkpoint import verify_checkpoint, write_json
from accel_gpt.runs.folder import checkpoint_steps
from accel_gpt.runs.saving import CheckpointWriter, Snapshot
from tests.conftest import QUIET, launch
from tests.test_train import around_updates, assert_same_weights, before_step, records, weights

Arguments = Callable[..., list[str]]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Request a fault at a named point."""

    def ask(spec: str) -> None:
        fault_counts.cache_clear()
        monkeypatch.setenv("ACCEL_GPT_FAULT", spec)

    return ask


def wait_for_save(run: train.Training) -> None:
    """Wait until no checkpoint is being written."""
    if run.writer.thread:
        run.writer.thread.join()


def test_a_copy_in_memory_gives_the_files_of_save_state_and_is_not_changed_by_what_follows(
    small_run: Arguments, tmp_path: Path, fault: Callable[[str], None], monkeypatch: Any
) -> None:
    """Training continues for half a second before the first copy is written."""
    own = ("--checkpoint.keep_last", "3", *QUIET, "--out_dir")
    plain, copied = tmp_path / "plain", tmp_path / "copied"
    assert launch(small_run(*own, str(plain))) == 0
    monkeypatch.setattr(files, "SLEEP_SECONDS", 0.5)
    fault("save.copied=sleep")
    assert launch(small_run(*own, str(copied), "--checkpoint.async_save", "true")) == 0
    assert records(plain) == records(copied)
    for step in (4, 8, 12):
        assert_same_weights(weights(plain, step), weights(copied, step))
        folders = [run / "checkpoints" / f"step_{step:08d}" for run in (plain, copied)]
        assert {p.name for p in folders[0].iterdir()} == {p.name for p in folders[1].iterdir()}
        states = [torch.load(f / "optimizer.bin", weights_only=True) for f in folders]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        for p, moments in states[0]["state"].items():
            assert all(torch.equal(moments[key], states[1]["state"][p][key]) for key in moments)


@pytest.mark.gpu
def test_a_copy_in_memory_is_pinned_and_that_of_the_gpu() -> None:
    snapshot = Snapshot()
    for scale in (1, 2):  # the buffer grows
        original = {
            "w": torch.arange(15 * scale, device="cuda").bfloat16(),
            "groups": [{"lr": 0.1}],
        }
        copied = snapshot.copy(original)
        torch.testing.assert_close(copied, original, rtol=0, atol=0, check_device=False)
        assert copied["w"].is_pinned()


def test_training_does_not_wait_for_the_disk(
    small_run: Arguments, tmp_path: Path, fault: Callable[[str], None], monkeypatch: Any
) -> None:
    """The first checkpoint, the best so far, hangs until step 8 is made and the next one is due."""
    freed = threading.Event()
    seen: dict[str, bool] = {}

    def hang(*_: object) -> None:
        seen["trained meanwhile"] = freed.wait(60)

    def look(run: train.Training) -> None:
        if run.state.step == 8:
            seen["the next save waits"] = freed.is_set()

    def free_soon(run: train.Training) -> None:
        if run.state.step == 8:
            threading.Timer(0.5, freed.set).start()

    around_updates(monkeypatch, look, free_soon)
    monkeypatch.setattr(files, "fail", hang)
    fault("manifest.due=sleep")
    best = ("--eval.every", "4", "--checkpoint.keep_best", "true")
    assert launch(small_run(*QUIET[2:], *best)) == 0
    assert seen == {"trained meanwhile": True, "the next save waits": True}
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [8, 12]


def test_points_are_passed_in_the_order_that_keeps_a_checkpoint_whole(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "points.txt"
    monkeypatch.setenv("ACCEL_GPT_FAULT_LOG", str(log))
    for name in ("sync", "sha256"):
        traced(monkeypatch, name, log)
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if path.is_dir():
            with log.open("a") as file:
                file.write("rename_folder\n")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    assert launch(small_run(*QUIET, "--checkpoint.keep_last", "1")) == 0
    passed = [name for name in log.read_text().split() if name != "step"]
    one = passed[: passed.index("save.begun", 1)]
    assert one[:2] == ["save.begun", "save.filled"]
    files = 7 * ["file.written", "sync", "file.synced", "sha256"]
    # a power cut may not leave a folder without a manifest
    end = ["manifest.due", "manifest.written", "sync_folder"]
    end += ["rename_folder", "renamed", "sync_folder", "published"]
    assert [p for p in one[2:] if not p.startswith("state.")] == [*files, *end]
    last = passed[len(passed) - passed[::-1].index("save.begun") :]
    assert last[-2:] == ["trash.renamed", "trash.gone"]
    assert last.index("published") < last.index("trash.renamed")


def traced(monkeypatch: pytest.MonkeyPatch, name: str, log: Path) -> None:
    """Also log the calls of a function of the writer."""
    plain = getattr(writer, name)

    def call(path: Path) -> Any:
        with log.open("a") as file:
            file.write(f"{name}_folder\n" if path.is_dir() else f"{name}\n")
        return plain(path)

    monkeypatch.setattr(writer, name, call)


@pytest.mark.parametrize(("point", "error"), [("file.written", "enospc"), ("renamed", "eio")])
def test_a_save_that_fails_is_told_and_training_goes_on(
    small_run: Arguments,
    tmp_path: Path,
    fault: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    point: str,
    error: str,
) -> None:
    """The second of three saves fails."""
    number = 8 if point == "file.written" else 2
    fault(f"{point}:{number}={error}")
    assert launch(small_run(*QUIET, "--checkpoint.keep_last", "3")) == 0
    said = capsys.readouterr().err
    assert "WARNING: the checkpoint of step 8 could not be written in" in said
    assert ("No space left" if error == "enospc" else "Input/output error") in said
    assert re.search(r"\(it needs [\d,]+ bytes\); step", said)
    root = tmp_path / "run" / "checkpoints"
    kept = [4, 8, 12] if point == "renamed" else [4, 12]  # a checkpoint is valid once it is renamed
    assert f"step {kept[-2]} is the newest checkpoint so far" in said
    assert checkpoint_steps(root) == kept
    for step in kept:
        verify_checkpoint(root / f"step_{step:08d}")
    assert not [p.name for p in root.iterdir() if p.name.startswith(".")]


def test_a_failed_save_is_tried_again_before_the_next_is_due(
    small_run: Arguments,
    tmp_path: Path,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.0)
    around_updates(monkeypatch, before=wait_for_save)  # so that the failure is known
    fault("manifest.due=enospc")
    assert launch(small_run(*QUIET, "--checkpoint.every", "8", "--checkpoint.keep_last", "9")) == 0
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [9, 12]


def test_room_is_not_made_of_the_newest_intact_checkpoint_or_the_best(
    small_run: Arguments,
    tmp_path: Path,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full at step 12, with checkpoints at 3, the best, 6 and 9."""
    root = tmp_path / "run" / "checkpoints"

    before_step(monkeypatch, 12, lambda: (tmp_path / "run" / "best").write_text("3\n"))
    around_updates(monkeypatch, before=wait_for_save)
    fault("manifest.due:4+=enospc")
    own = ("--checkpoint.every", "3", "--checkpoint.keep_last", "9")
    assert launch(small_run(*QUIET, *own)) == 4
    assert checkpoint_steps(root) == [3, 9]
    assert "removed step 6 to make room" in capsys.readouterr().err
    shutil.copytree(root / "step_00000003", root / "step_00000001")
    write_json(root / "step_00000001" / "trainer_state.json", {"format": 1, "step": 1})
    (root / "step_00000009" / "model.json").write_text("{}")
    assert writer.make_room(tmp_path / "run", best_step=None) == 1  # 3 is intact, 9 is not
    assert writer.make_room(tmp_path / "run", best_step=None) is None


@pytest.mark.parametrize("point", ["manifest.due", "renamed"])
def test_the_last_save_waits_for_room(
    point: str,
    small_run: Arguments,
    tmp_path: Path,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the new checkpoint has its name, or when it has: then it is accepted."""
    monkeypatch.setattr(writer, "LAST_RETRY_SECONDS", 600.0)
    monkeypatch.setattr(writer, "FIRST_PAUSE_SECONDS", 0.0)
    fail, failed = files.fail, []

    def fail_at_first(*fault: Any) -> None:
        failed.append(fault)
        if len(failed) <= 5:
            fail(*fault)

    monkeypatch.setattr(files, "fail", fail_at_first)
    fault(f"{point}:3+=eio")  # no older checkpoint is removed for room: only time helps
    assert launch(small_run(*QUIET)) == 0
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"step_00000008", "step_00000012"}  # nothing set aside


def test_a_signal_ends_the_wait_of_the_last_save(
    small_run: Arguments,
    tmp_path: Path,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sleep = time.sleep

    def signal_once(seconds: float) -> None:
        monkeypatch.setattr(writer.time, "sleep", sleep)
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(0.1)

    monkeypatch.setattr(writer, "LAST_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(writer, "FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(writer.time, "sleep", signal_once)
    fault("manifest.due:3+=enospc")
    assert launch(small_run(*QUIET)) == 4
    said = capsys.readouterr().err
    assert "error: the checkpoint of step 12 could not be written: " in said
    assert "No space left on device" in said
    assert "; step 8 is the newest checkpoint before it" in said
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [8]


def test_a_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "manifest.json", []

    def fsync(file: int) -> None:
        assert not path.exists()
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size))

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_json(path, {"format": 1})
    assert synced == [(path.stat().st_ino, path.stat().st_size)]


def test_a_limit_on_the_size_of_files_is_not_told_as_a_full_disk(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = {"w": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)) as error:
            torch.save(weights, tmp_path / "optimizer.bin")
        said = writer.describe_save_error(error.value, tmp_path, 400_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == os.strerror(errno.EFBIG)
    assert writer.describe_save_error(ValueError("another one"), tmp_path, 9) == "another one"


@pytest.mark.parametrize("main", [True, False])
def test_the_first_rank_alone_writes_the_scale_of_the_loss(main: bool, tmp_path: Path) -> None:
    """Also if a save fails; otherwise all ranks would write the same file."""
    seen = []

    def save_state(_: str) -> None:
        seen.append(accelerator.scaler)
        raise OSError

    accelerator: Any = SimpleNamespace(scaler="scaler", save_state=save_state)
    rank: Any = SimpleNamespace(accelerator=accelerator, fsdp=False, snapshot=None, main=main)
    with pytest.raises(OSError):  # noqa: PT011 - the one from above
        CheckpointWriter.save_tensors(rank, tmp_path, rank, rank, None)
    assert seen == ["scaler" if main else None]
    assert accelerator.scaler == "scaler"
