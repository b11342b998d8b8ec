"""Resume at awkward places of the data, with a clock that jumps, and among foreign files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.faults.harness import (
    EPOCH_STEPS,
    STEPS,
    Server,
    Tiny,
    assert_same,
    checkpoint_names,
    finish,
    forget_after,
    newest,
    rewound,
)

pytestmark = pytest.mark.slow
EVERY_STEP = ("--checkpoint.every", "1", "--checkpoint.keep_last", "99")


@pytest.mark.parametrize("step", [EPOCH_STEPS, EPOCH_STEPS + 1])
def test_resumed_anywhere_in_an_epoch(
    step: int, server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """Exactly between two epochs, and within the second."""
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
    for name in (".tmp_step_00000007", ".trash_step_00000077"):
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
