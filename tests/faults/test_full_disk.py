"""A full disk: existing files stay, and training continues.

Needs no root, only a Linux that lets a process mount a disk in a namespace of its own.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_gpt.runs.checkpoint import verify_checkpoint
from tests.faults.harness import (
    Server,
    Tiny,
    assert_same,
    checkpoint_names,
    debris,
    finish,
    newest,
    rewound,
)
from tests.test_launch import PLAIN, ROOT

pytestmark = pytest.mark.slow
NO_DISK = 99
# a tmpfs with the files of $1, and 200,000 bytes of room: a checkpoint takes more; $2 gets them
ON_DISK = """
mount -t tmpfs -o size=16m none "$2" || exit 99
cp -a "$1"/. "$2"
head -c "$(($(df --output=avail -B1 "$2" | tail -n 1) - 200000))" /dev/zero > "$2/filler"
"${@:4}"
code=$?
cp -a "$2/run" "$3"
exit $code
"""

TRAINS = """
import sys
from accel_gpt.commands import train
from accel_gpt.console import run_main
from accel_gpt.runs import saving
saving.LAST_RETRY_SECONDS = 0.0
sys.exit(run_main(train.main, sys.argv[1:]))
"""


def test_full_disk_harms_no_checkpoint_and_leaves_no_debris(
    server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """Resumed from step 6 of 12, its only checkpoint, without room for another one."""
    before = rewound(whole, tmp_path / "before" / "run", 6)
    for name in checkpoint_names(before)[:-1]:
        shutil.rmtree(before / "checkpoints" / name)
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    train = tiny.arguments(disk / "run", "--checkpoint.keep_last", "99")
    places = [str(tmp_path / "before"), str(disk), str(left)]
    command = ["unshare", "-rm", "bash", "-c", ON_DISK, "bash", *places]
    done = subprocess.run(
        [*command, sys.executable, "-c", TRAINS, *train],
        cwd=ROOT,
        env={**PLAIN, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == NO_DISK or not left.exists():
        pytest.skip(f"this machine lets no process mount a disk: {done.stderr}")
    assert "from step 6 " in done.stderr
    assert done.returncode == 4, done.stderr
    assert re.search(r"it needs [\d,]+ bytes", done.stderr)
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr  # instead of torch's message
    for step in (8, 10, 12):  # it trained to the end
        assert done.stderr.count(f"WARNING: the checkpoint of step {step} could") == 1
    assert "; step 6 is the newest checkpoint before it" in done.stderr
    assert checkpoint_names(left) == ["step_00000006"]
    verify_checkpoint(newest(left))
    assert debris(left) == []
    finish(server, tiny.arguments(left))  # with space again
    assert_same(left, whole)
