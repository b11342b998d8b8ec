"""A job array of `configs/slurm/train.sbatch` under a real Slurm with two nodes on this machine.

Skips without Slurm's programs (on Debian: apt-get install slurm-wlm).
"""

import getpass
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import thorough
from tests.faults.launches import config, steps_told, until
from tests.helpers.ports import free_port
from tests.test_launch import PLAIN, ROOT
from tests.test_train import records

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
SYSTEM = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
MISSING = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM) is None]
pytestmark = [
    thorough,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
]
NODES = ("n1", "n2")
# No munge, no cgroups, no accounting: nothing that needs a service or a right of its own. A job
# that is queued again starts when its old credential has expired, by default after two minutes.
SETTINGS = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4\n"
# the options of a task, as a script of the user's would give them
COMMAND = """#!/bin/sh
own="--seed=$SLURM_ARRAY_TASK_ID --out_dir=run_$SLURM_ARRAY_TASK_ID"
exec {python} -m accel_gpt "$@" $own
"""


class Cluster:
    """A controller and two nodes, as processes of this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in PLAIN.items() if not k.startswith("SLURM")}
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join([str(folder), SYSTEM]),
            "MASTER_ADDR": "127.0.0.1",  # the names of the nodes have no address
            "GLOO_SOCKET_IFNAME": "lo",
        }
        text = SETTINGS.format(folder=folder, user=getpass.getuser(), port=free_port())
        for name in NODES:
            text += NODE.format(name=name, port=free_port())
        text += f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "accel-gpt").write_text(COMMAND.format(python=sys.executable))
        (folder / "accel-gpt").chmod(0o755)
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        for words in (["slurmctld"], *(["slurmd", "-N", name] for name in NODES)):
            with (self.folder / f"{'_'.join(words)}.log").open("wb") as log:
                daemon = subprocess.Popen(
                    [words[0], "-D", *words[1:]], env=self.environment, stdout=log, stderr=log
                )
            self.daemons.append(daemon)
        until(lambda: self.call("sinfo", "-h", "-o", "%D %t", check=False) == "2 idle\n", 60)

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        until(lambda: not self.call("squeue", "-h", check=False), 60)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)

    def call(self, *words: str, check: bool = True) -> str:
        """Run a program of Slurm in the folder; return its output."""
        done = subprocess.run(
            words, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, text=True,
            check=check,
        )  # fmt: skip
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, as `scontrol show job` prints it."""
        match = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        assert match
        return match[1]

    def wait(self, job: str, name: str, value: str) -> None:
        """Wait until a field of a job has a value."""

        def reached() -> bool:
            time.sleep(0.2)
            return self.field(job, name) == value

        until(reached, 240)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_the_preempted_task_of_an_array_alone_is_queued_again_and_resumes(
    cluster: Cluster, prepared: Path, tmp_path: Path
) -> None:
    script = str(ROOT / "configs" / "slurm" / "train.sbatch")
    options = ["--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--array=1-2"]
    path = str(config(tmp_path, prepared / "corpus", steps=200))
    said = cluster.call("sbatch", *options, "--output=%a.txt", script, path)
    array = said.split()[-1]
    kept, preempted = f"{array}_1", f"{array}_2"
    assert cluster.field(preempted, "JobId") == array  # as Slurm numbers the last task
    until(lambda: min(steps_told(tmp_path / f"run_{task}") for task in (1, 2)) > 5, 120)
    cluster.call("scancel", "--signal=USR1", preempted)  # as three minutes before the end
    cluster.wait(preempted, "Restarts", "1")
    for job in (kept, preempted):
        cluster.wait(job, "JobState", "COMPLETED")
    assert [cluster.field(job, "Restarts") for job in (kept, preempted)] == ["0", "1"]
    shown = [(tmp_path / f"{task}.txt").read_text() for task in (1, 2)]
    assert f"job {preempted} is queued again" in shown[1]
    assert ["resuming" in text for text in shown] == [False, True]
    for task in (1, 2):
        assert [record["step"] for record in records(tmp_path / f"run_{task}")] == [*range(1, 201)]
