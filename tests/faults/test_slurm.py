"""`configs/slurm/train.sbatch`, with stubs for Slurm's programs, which start two processes here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launches import config, free_port, steps_told, until
from tests.test_launch import PLAIN, ROOT
from tests.test_train import records

pytestmark = pytest.mark.slow

SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
export SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  echo $! > "$STUBS/pid_$rank"
done
highest=0
for rank in 0 1; do
  wait "$(cat "$STUBS/pid_$rank")"
  code=$?
  [ $code -gt $highest ] && highest=$code
done
exit $highest
"""
SCONTROL = """
echo "$@" >> "$STUBS/said"
"""
STUBS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "sbatch": 'exec bash "$@"',
    "accel-gpt": f'exec {sys.executable} -m accel_gpt.cli "$@"',
}


class Slurm:
    """A cluster of one node, and the job."""

    def __init__(self, folder: Path) -> None:
        self.stubs = folder / "stubs"
        self.stubs.mkdir()
        for name, body in STUBS.items():
            (self.stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (self.stubs / name).chmod(0o755)

    def submit(self, *argv: str) -> "subprocess.Popen[str]":
        """Run the job script."""
        job = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "MASTER_PORT": str(free_port()),
        }
        path = f"{self.stubs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["sbatch", str(ROOT / "configs" / "slurm" / "train.sbatch"), *argv],
            env={**PLAIN, **job, "PATH": path, "STUBS": str(self.stubs)}, cwd=self.stubs,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def requeued(self) -> int:
        """Return how often the job was requeued."""
        said = self.stubs / "said"
        return said.read_text().count("requeue ") if said.exists() else 0


def test_job_is_queued_again_until_the_run_is_done(prepared: Path, tmp_path: Path) -> None:
    slurm, path = Slurm(tmp_path), str(config(tmp_path, prepared / "corpus", steps=60))
    job = slurm.submit(path)
    until(lambda: steps_told(tmp_path / "run") > 5, 120)
    for rank in (0, 1):
        os.kill(int((slurm.stubs / f"pid_{rank}").read_text()), signal.SIGUSR1)
    shown, _ = job.communicate(timeout=60)
    assert "SIGUSR1: saved at step" in shown
    assert job.returncode == 75
    assert slurm.requeued() == 1
    job = slurm.submit(path)
    shown, _ = job.communicate(timeout=120)
    assert "resuming" in shown
    assert job.returncode == 0, shown
    assert slurm.requeued() == 1
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, 61))


def test_job_with_a_mistake_is_not_queued_again(prepared: Path, tmp_path: Path) -> None:
    slurm, path = Slurm(tmp_path), str(config(tmp_path, prepared / "corpus"))
    job = slurm.submit(path, "--train.time_limit", "soon")
    shown, _ = job.communicate(timeout=120)
    assert job.returncode == 2
    assert "error: train.time_limit is 'soon'; write a time above 0 as 3h50m, 30m or 90s" in shown
    assert slurm.requeued() == 0
