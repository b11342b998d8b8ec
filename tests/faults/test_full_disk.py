"""A full or read-only disk: existing files stay, and the run continues."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.runs.checkpoint import verify_checkpoint
from tests.faults.disk import NoDiskError
from tests.faults.harness import (
    Answer,
    Server,
    Tiny,
    assert_same,
    checkpoint_names,
    debris,
    finish,
    newest,
    rewound,
)

pytestmark = pytest.mark.slow
SIZE = 16 * 2**20  # bytes of the disk
TIGHT = 200_000  # bytes; a checkpoint takes more


def on_disk(server: Server, arguments: list[str], folder: Path, **asked: Any) -> Answer:
    """Launch with a separate disk over `folder`; skip if that is impossible."""
    folder.mkdir()
    answer = server.launch(arguments, disk={"folder": str(folder), "size": SIZE, **asked})
    if answer.codes == [NoDiskError.exit_code]:
        pytest.skip(answer.outputs[0].strip())
    return answer


def test_full_disk_harms_no_checkpoint_and_leaves_no_debris(
    server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """Resumed from step 6 of 12, its only checkpoint, without room for another one."""
    before = rewound(whole, tmp_path / "before" / "run", 6)
    for name in checkpoint_names(before)[:-1]:
        shutil.rmtree(before / "checkpoints" / name)
    disk, after = tmp_path / "disk", tmp_path / "after"
    answer = on_disk(
        *(server, tiny.arguments(disk / "run", "--checkpoint.keep_last", "99"), disk),
        before=str(tmp_path / "before"), after=str(after), free=TIGHT,
    )  # fmt: skip
    assert "from step 6 " in answer.outputs[0]
    left = after / "run"
    assert answer.codes == [4], answer.outputs
    assert re.search(r"it needs [\d,]+ bytes", answer.outputs[0])
    assert "Traceback" not in answer.outputs[0]
    assert "No space left on device" in answer.outputs[0]  # instead of torch's message
    for step in (8, 10, 12):  # it trained to the end
        assert answer.outputs[0].count(f"WARNING: the checkpoint of step {step} could") == 1
    assert "; step 6 is the newest checkpoint before it" in answer.outputs[0]
    assert checkpoint_names(left) == ["step_00000006"]
    verify_checkpoint(newest(left))
    assert debris(left) == []
    finish(server, tiny.arguments(left))  # with space again
    assert_same(left, whole)


def test_no_room_at_the_start_is_one_sentence(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    answer = on_disk(server, tiny.arguments(disk / "run"), disk, free=0)
    assert answer.codes == [4], answer.outputs
    errors = [line for line in answer.outputs[0].splitlines() if "No space left" in line]
    assert len(errors) == 1
    assert "Traceback" not in answer.outputs[0]


def test_read_only_disk_ends_at_once(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    disk, after = tmp_path / "disk", tmp_path / "after"
    answer = on_disk(
        *(server, tiny.arguments(disk / "run"), disk), after=str(after), read_only=True
    )
    assert answer.codes == [2], answer.outputs
    assert "cannot be written: Read-only file system" in answer.outputs[0]
    assert list(after.iterdir()) == []
