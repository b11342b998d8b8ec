"""Resume at awkward places of the data, with a clock that jumps, and among foreign files."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from accel_gpt.training.run_folder import locked
from tests.faults.harness import (
    EPOCH_STEPS,
    STEPS,
    Server,
    Tiny,
    assert_same,
    assert_whole,
    checkpoint_names,
    finish,
    forget_after,
    newest,
    rewound,
)

EVERY_STEP = ("--checkpoint.every", "1", "--checkpoint.keep_last", "99")


@pytest.mark.parametrize(
    "step",
    [
        *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2 * EPOCH_STEPS, 11)),
        *(EPOCH_STEPS, EPOCH_STEPS + 1),
    ],
)
def test_resumed_anywhere_in_an_epoch(
    step: int, server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """In the first epoch, exactly between two epochs, in the second, in the third."""
    epochs = json.loads((whole / "metrics.jsonl").read_text().splitlines()[step - 1])["data/epochs"]
    assert epochs == step / EPOCH_STEPS
    run = rewound(whole, tmp_path / "run", step)
    shown = finish(server, tiny.arguments(run, *EVERY_STEP)).outputs[0]
    assert f"from step {step} " in shown
    assert f"step {step + 1}/{STEPS} |" in shown
    assert f"step {step}/{STEPS} |" not in shown
    assert_same(run, whole)


def test_clock_that_jumps_back_has_no_influence(
    server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """File times have no influence either: the last checkpoint looks the oldest."""
    run = rewound(whole, tmp_path / "run", 9)
    for age, path in enumerate(sorted(run.rglob("*"))):
        os.utime(path, (1e9 - age, 1e9 - age))
    for step, days in ((9, -400), (11, 0)):
        forget_after(run, step)
        arguments = tiny.arguments(run, *EVERY_STEP)
        shown = finish(server, arguments, clock=86400.0 * days).outputs[0]
        assert f"from step {step} " in shown
        assert_same(run, whole)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        times = [json.loads(line)["time"] for line in lines]
        assert times == sorted(times)


def test_debris_is_removed_and_foreign_files_are_left_alone(
    server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    run = rewound(whole, tmp_path / "run", 6)
    root, outside = run / "checkpoints", tmp_path / "outside"
    shutil.copytree(newest(whole), outside)
    for name in (".tmp_step_00000009", ".trash_step_00000003"):
        shutil.copytree(newest(run), root / name)
    foreign = {"notes.txt", "link", "step_00000098", "step_00000099", "step_abc", ".trash_mine"}
    (root / "notes.txt").write_text("mine")
    (root / "step_00000099").write_text("a file")
    (root / "step_abc").mkdir()
    (root / ".trash_mine").write_text("mine")
    (root / "link").symlink_to(outside)
    (root / "step_00000098").symlink_to(outside)  # a checkpoint of another run
    shown = finish(server, tiny.arguments(run)).outputs[0]
    assert "from step 6 " in shown
    assert foreign <= {path.name for path in root.iterdir()}
    assert not list(root.glob(".t*_step_*"))
    assert (root / "notes.txt").read_text() == "mine"
    assert len(list(outside.iterdir())) == len(list(newest(whole).iterdir()))
    for name in foreign - {"step_abc"}:
        (root / name).unlink()
    assert checkpoint_names(run) == ["step_00000010", "step_00000012"]
    assert_same(run, whole)


def test_two_runs_in_one_folder(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        answer = server.launch(tiny.arguments(run))
        assert answer.codes == [6]
        assert f"in use by process {os.getpid()} on {os.uname().nodename}" in answer.outputs[0]
    assert not list(run.iterdir())
    finish(server, tiny.arguments(run))


@pytest.mark.slow
def test_two_processes_end_when_their_folder_is_renamed(
    server: Server, tiny: Tiny, tmp_path: Path
) -> None:
    """The folder is renamed while both sleep before step 6."""
    run, moved = tmp_path / "run", tmp_path / "moved"

    def rename() -> None:
        while not (run / "checkpoints" / "step_00000004").exists():
            time.sleep(0.01)
        run.rename(moved)

    renaming = threading.Thread(target=rename, daemon=True)
    renaming.start()
    pause = [{"ACCEL_GPT_FAULT": "step:6=sleep"}] * 2
    answer = server.launch(tiny.arguments(run), 2, environment=pause)
    renaming.join()
    assert answer.codes[0] == 6, answer.outputs
    assert answer.codes[1] in (6, 70), answer.outputs
    assert f"out_dir {run} was removed or renamed" in answer.outputs[0]
    assert not run.exists()
    finish(server, [str(moved / "config.yaml")], 2)
    assert_whole(moved)


@pytest.mark.parametrize("name", ["file", "x" * 300, "/proc/run"], ids=lambda n: n[:9])
def test_out_dir_that_cannot_be_ends_at_once(
    name: str, server: Server, tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    answer = server.launch(tiny.arguments(tmp_path / name))
    assert answer.codes == [2], answer.outputs
    assert "cannot be written" in answer.outputs[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
