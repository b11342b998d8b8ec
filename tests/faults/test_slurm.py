"""`configs/slurm/train.sbatch`, with stubs for Slurm's programs, which start two processes here."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.faults.launches import config, steps_told, until
from tests.helpers.ports import free_port
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
    "accel-gpt": f'exec {sys.executable} -m accel_gpt "$@"',
}


class Slurm:
    """A cluster of one node, and the job."""

    def __init__(self, folder: Path) -> None:
        self.stubs = folder / "stubs"
        self.stubs.mkdir()
        for name, body in STUBS.items():
            (self.stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (self.stubs / name).chmod(0o755)

    def submit(self, *argv: str, **environment: str) -> "subprocess.Popen[str]":
        """Run the job script."""
        job = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "MASTER_PORT": str(free_port()),
        }
        path = f"{self.stubs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["sbatch", str(ROOT / "configs" / "slurm" / "train.sbatch"), *argv],
            env={**PLAIN, **job, **environment, "PATH": path, "STUBS": str(self.stubs)},
            cwd=self.stubs,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def requeued(self) -> list[str]:
        """Return the jobs that were queued again."""
        said = self.stubs / "said"
        return re.findall("requeue (.*)", said.read_text()) if said.exists() else []


def test_a_task_of_an_array_alone_is_queued_again_until_its_run_is_done(
    prepared: Path, tmp_path: Path
) -> None:
    """The last task of an array has the id of the whole array."""
    slurm, path = Slurm(tmp_path), str(config(tmp_path, prepared / "corpus", steps=60))
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    job = slurm.submit(path, **task)
    until(lambda: steps_told(tmp_path / "run") > 5, 120)
    for rank in (0, 1):
        os.kill(int((slurm.stubs / f"pid_{rank}").read_text()), signal.SIGUSR1)
    shown, _ = job.communicate(timeout=60)
    assert "SIGUSR1: saved at step" in shown
    assert job.returncode == 75
    assert slurm.requeued() == ["7_2"]
    job = slurm.submit(path, **task)
    shown, _ = job.communicate(timeout=120)
    assert "resuming" in shown
    assert job.returncode == 0, shown
    assert slurm.requeued() == ["7_2"]
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, 61))


def test_job_with_a_mistake_is_not_queued_again(prepared: Path, tmp_path: Path) -> None:
    slurm, path = Slurm(tmp_path), str(config(tmp_path, prepared / "corpus"))
    job = slurm.submit(path, "--train.step_timeout", "soon")
    shown, _ = job.communicate(timeout=120)
    assert job.returncode == 2
    assert "error: train.step_timeout is 'soon'; write a time above 0 and at most 1000d" in shown
    assert slurm.requeued() == []


DUMP = """
import json, os
from pathlib import Path
names = ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
found = {key: value for key, value in os.environ.items() if key.startswith(names)}
Path(os.environ["DUMPED"]).write_text(json.dumps(found))
"""


def test_a_sharded_job_sets_the_variables_of_accelerate_launch(tmp_path: Path) -> None:
    """FSDP itself needs GPUs; each process writes its variables instead of training."""
    slurm, dump = Slurm(tmp_path), tmp_path / "dump.py"
    dump.write_text(DUMP)
    (slurm.stubs / "accel-gpt").write_text(f"#!/usr/bin/env bash\nexec {sys.executable} {dump}\n")
    job = slurm.submit("quickstart", DISTRIBUTION="hsdp", DUMPED=str(tmp_path / "job"))
    shown, _ = job.communicate(timeout=60)
    assert job.returncode == 0, shown
    config = yaml.safe_load((ROOT / "configs" / "accelerate" / "hsdp_2x8.yaml").read_text())
    config |= {"num_processes": 2, "num_machines": 1}
    config["parallelism_config"] = {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 2,
    }
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(tmp_path / "accelerate.yaml"), str(dump)]
    environment = {**PLAIN, "DUMPED": str(tmp_path / "launched")}
    subprocess.run(launch, env=environment, check=True, capture_output=True, timeout=120)
    set_by_job = json.loads((tmp_path / "job").read_text())
    launched = json.loads((tmp_path / "launched").read_text())
    assert set_by_job.items() <= launched.items()
    assert set_by_job["ACCELERATE_USE_FSDP"] == "true"
    assert set_by_job["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"
