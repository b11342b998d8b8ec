"""Processes that `srun` starts: which of them form a group, and what Slurm's variables mean."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from accel_gpt import launcher
from accel_gpt.errors import UserError
from accel_gpt.launcher import (
    available_cores,
    shared_cores,
    use_slurm_variables,
    world_size,
)
from tests.test_launch import PLAIN

Arguments = Callable[..., list[str]]
JOB = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TASK = {
    **JOB,
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "7",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[01,7],other",
}
TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Join a step in an environment that has only `variables` of launchers."""

    def joined(variables: Mapping[str, str]) -> dict[str, str]:
        environment = {k: v for k, v in PLAIN.items() if not k.startswith("SLURM_")} | variables
        monkeypatch.setattr("os.environ", environment)
        use_slurm_variables()
        return {name: environment[name] for name in TORCH if name in environment}

    return joined


def test_a_task_of_srun_gets_the_variables_of_torchrun(
    join: Callable[[Mapping[str, str]], dict[str, str]],
) -> None:
    expected = ("2", "0", "4", "2", "node01", "23463")
    assert join(TASK) == dict(zip(TORCH, expected, strict=True))
    assert world_size() == 4
    assert (launcher.rank(), launcher.local_rank()) == (2, 0)
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "WORLD_SIZE": "1"}
    assert join(TASK | chosen) == dict(zip(TORCH, expected, strict=True)) | chosen | {
        "WORLD_SIZE": "4"
    }


@pytest.mark.parametrize(
    "variables",
    [
        JOB,
        {**TASK, "SLURM_STEP_ID": "4294967291"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "RANK": "0"},
    ],
    ids=["batch script", "batch step", "one task", "another launcher"],
)
def test_other_processes_of_a_job_are_left_alone(
    variables: dict[str, str], join: Callable[[Mapping[str, str]], dict[str, str]]
) -> None:
    assert join(variables) == {k: v for k, v in variables.items() if k in TORCH}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "srun started accelerate launch once for each"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE is 'two'"),
        ({"SLURM_LOCALID": "-1"}, "SLURM_LOCALID is '-1'"),
    ],
)
def test_a_step_that_cannot_be_joined_is_an_error(
    variables: dict[str, str],
    message: str,
    join: Callable[[Mapping[str, str]], dict[str, str]],
) -> None:
    with pytest.raises(UserError, match=message):
        join(TASK | variables)


def test_a_task_takes_the_cores_that_srun_gives_it(
    join: Callable[[Mapping[str, str]], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not divided again by the processes of the machine."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    join({**TASK, "SLURM_CPUS_PER_TASK": "8"})
    assert shared_cores() == 8
    join(TASK)
    assert shared_cores() == 4


V1 = "33 31 0:30 {} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
"""
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "cores"),
    [
        (V2.format("/"), "0::/\n", {"cpu.max": "300000 100000"}, 3),  # in a container
        (V2.format("/"), "0::/\n", {"cpu.max": "max 100000"}, 8),
        (V2.format("/"), "0::/a/b\n", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 1"}, 2),
        (V2.format("/"), "0::/a/b\n", {"a/cpu.max": "5 1", "a/b/cpu.max": "4 1"}, 4),
        (V2.format("/"), "0::/a\n", {"b/cpu.max": "1 1"}, 8),  # the group of others
        (V2.format("/"), "0::/\n", {"cpu.max": "50000 100000"}, 1),  # half a core
        (V2.format("/"), "0::/\n", {"cpu.max": "1600000 100000"}, 8),  # more than the affinity
        (V2.format("/pod"), "0::/pod/a\n", {"a/cpu.max": "2 1"}, 2),
        (V2.format("/pod"), "0::/../elsewhere\n", {"cpu.max": "2 1"}, 2),
        (
            OTHERS + V1.format("/") + UNIFIED,
            "8:cpuset:/\n2:cpuacct,cpu:/docker/x\n0::/init\n",
            {
                "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            V1.format("/docker/x"),  # the host's path, of which the container sees the end
            "1:cpu,cpuacct:/docker/x\n",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        ("not a table\n", "nor this\n", {}, 8),
        (None, None, {}, 8),  # no /proc
    ],
)
def test_the_quota_of_a_cgroup_limits_the_cores(
    mounts: str | None,
    groups: str | None,
    files: dict[str, str],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    quotas = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (tables | quotas).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores(tmp_path) == cores


CORES = "from accel_gpt.launcher import shared_cores; print(shared_cores())"


def test_a_process_in_a_real_cgroup_takes_the_cores_of_its_quota() -> None:
    """Also in a group below the one with the quota."""
    outer = Path("/sys/fs/cgroup/cpu", f"accel_gpt_{os.getpid()}")
    inner = outer / "inner"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    (outer / "cpu.cfs_quota_us").write_text("100000")
    inner.mkdir()
    enter = f'echo $$ > {inner}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", CORES]
    done = subprocess.run(command, env=PLAIN, capture_output=True, text=True, check=False)
    inner.rmdir()
    outer.rmdir()
    assert (done.stdout, done.stderr) == ("1\n", "")
