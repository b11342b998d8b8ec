"""The lock of a run's folder, and the error of a process whose peers have gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from accel_gpt.errors import BusyError, PeerError, UserError
from accel_gpt.run.guards import locked, peers


@pytest.mark.slow
def test_a_folder_has_one_run(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        code = (
            "import sys; from accel_gpt.run.guards import locked; from pathlib import Path\n"
            "with locked(Path(sys.argv[1])): pass"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BusyError" in done.stderr
        assert f"is in use by process {os.getpid()} on " in done.stderr
    with locked(tmp_path / "run"):
        pass  # free again
    assert BusyError.exit_code == 6


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"out_dir .*file/run cannot be written: Not a directory"
    with pytest.raises(UserError, match=message), locked(tmp_path / "file" / "run"):
        pass


def test_lost_peers_are_told_and_other_errors_are_left_alone() -> None:
    with pytest.raises(PeerError, match=r"has gone or does not answer .*closed by peer"), peers(2):
        raise RuntimeError("[gloo/pair.cc:5] Connection closed by peer [127.0.0.1]")
    with pytest.raises(PeerError), peers(2):
        raise dist.DistNetworkError("the store is gone")
    with pytest.raises(RuntimeError, match="shapes"), peers(2):
        raise RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="gloo"), peers(1):
        raise RuntimeError("gloo")
    assert PeerError.exit_code == 70
