"""Read the variables that launchers set.

`accelerate launch`, `torchrun` and `srun` put variables into the environment of each process.
Under `srun`, `use_slurm_variables` sets the variables that torchrun would set.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from accel_gpt.errors import UserError, require

PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again
# that stop a run
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# The process of a run with this variable stops if its parent dies, whose id is the value.
STOP_WITH_PARENT = "ACCEL_GPT_STOP_WITH_PARENT"
# A Python process with this variable does not look for modules in the working folder or the folder
# of its script. Its children inherit the variable.
SAFE_PATH = "PYTHONSAFEPATH"
LAUNCHER_WORDS = (b"torch", b"accel")  # in a launcher's command line
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PRECISIONS = ("no", "bf16", "fp16", "fp8")  # that training supports; no: float32
FIRST_PORT = 20000  # below the ports that Linux gives to clients, from 32,768 on
PORTS = 10000
# slurm.h: a batch script, the shell of salloc and others have numbers close to 2**32
FIRST_SPECIAL_STEP = 2**32 - 16
# in a line of mountinfo: the folder of the file system that is mounted, where, the version of
# cgroups ("2" or "") and the options, which name the controllers of version 1
CGROUP_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup(2?) \S+ (\S+)$", re.MULTILINE)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: without SIGHUP if it is ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return [number for number in SIGNALS if number != signal.SIGHUP]
    return list(SIGNALS)


def rank() -> int:
    """Return the rank of this process over all machines."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, by its affinity and the quota of its cgroup.

    `root`: the folder that holds proc and the mounted cgroups.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # rounded down, as std::thread::available_parallelism of Rust does: one thread above the quota
    # stops all threads for the rest of each period
    return max(1, math.floor(min([cores, *cgroup_quotas(root)])))


def cgroup_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroups and the groups above them.

    `docker --cpus`, Kubernetes and systemd set them. cgroups(7), proc_pid_mountinfo(5).
    """
    try:
        mounts = (root / "proc/self/mountinfo").read_text(errors="replace")
        groups = (root / "proc/self/cgroup").read_text(errors="replace")
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}  # controller, or "" for version 2 -> path of the group
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(.*)$", groups, re.MULTILINE):
        for controller in controllers.split(","):
            paths[controller] = path
    for shown, point, version, options in CGROUP_MOUNT.findall(mounts):
        controller = "" if version else "cpu"
        if controller not in ("", *options.split(",")) or controller not in paths:
            continue
        top = root / point.lstrip("/")
        # a container may see only the part of the tree below `shown`
        group = top / os.path.relpath(paths[controller], shown)
        if ".." in group.parts:  # the group is not in this part
            group = top
        for folder in (group, *group.parents):
            yield from cgroup_quota(folder)
            if folder == top:
                break


def cgroup_quota(folder: Path) -> Iterator[float]:
    """Yield the CPU quota of a cgroup in cores, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # "max": no quota
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:  # -1: no quota
            yield int(quota) / int(period)


def shared_cores() -> int:
    """Return the cores that this process may use, divided by the ranks on the machine.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS=1; a trainer wants all cores.
    """
    cores = available_cores()
    if is_slurm_task() and not started_by_launcher() and "SLURM_CPUS_PER_TASK" in os.environ:
        return min(cores, slurm_number("SLURM_CPUS_PER_TASK"))  # srun may bind each to its own
    return max(1, cores // local_world_size())


def world_size() -> int:
    """Return the number of processes over all machines.

    Raises `UserError` if the launcher does not say how they connect: each would train alone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    require(
        not missing or (size == 1 and "LOCAL_RANK" not in os.environ),  # else torch looks for them
        f"WORLD_SIZE is {size} but {', '.join(missing)} are not set; start with accelerate launch, "
        "torchrun or srun",
    )
    return size


def is_main() -> bool:
    """Return whether this is rank 0; known before the process group exists."""
    return rank() == 0


def launcher_precision() -> str:
    """Return the precision that `accelerate launch` asks for: no, bf16, fp16 or fp8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def started_by_launcher() -> bool:
    """Return whether `accelerate launch` or `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def stops_with_parent() -> bool:
    """Return whether this process stops if its parent dies: a launcher, or a series of runs."""
    return started_by_launcher() or STOP_WITH_PARENT in os.environ


def die_with_launcher() -> None:
    """Make the kernel send SIGTERM to this process when its launcher dies.

    Does nothing if a shell started the process, since nohup must keep it alive. Linux only:
    prctl(2).
    """
    if sys.platform != "linux" or not stops_with_parent():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = os.getppid()
    if STOP_WITH_PARENT in os.environ:
        died = parent != int(os.environ[STOP_WITH_PARENT])
    else:  # in a container, process 1 may be the launcher
        first = Path("/proc/1/cmdline")
        died = parent == 1 and not any(word in first.read_bytes() for word in LAUNCHER_WORDS)
    if died:  # before the call of prctl
        os.kill(os.getpid(), signal.SIGTERM)


# --------------------------------------------------------------------------- Slurm


def use_slurm_variables() -> None:
    """Set torchrun's variables from Slurm's variables, if `srun` started this process.

    Called before anything reads them. Changes nothing if a launcher or the user has set RANK.
    Raises `UserError` if `srun` started `accelerate launch` for each process, and for variables
    that Slurm does not write.
    """
    if "RANK" in os.environ or not is_slurm_task():
        return
    require(
        not started_by_launcher(),
        "srun started accelerate launch once for each process; start srun accel-gpt train, or one "
        "accelerate launch on each node",
    )
    tasks_of_nodes = tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = slurm_number("SLURM_NODEID")
    if node >= len(tasks_of_nodes):
        raise slurm_error("SLURM_STEP_TASKS_PER_NODE")
    # two steps of a job may share a node, where each needs a port
    number = slurm_number("SLURM_JOB_ID") + slurm_number("SLURM_STEP_ID")
    os.environ.update(
        RANK=str(slurm_number("SLURM_PROCID")),
        LOCAL_RANK=str(slurm_number("SLURM_LOCALID")),
        WORLD_SIZE=str(slurm_number("SLURM_STEP_NUM_TASKS")),
        LOCAL_WORLD_SIZE=str(tasks_of_nodes[node]),
    )
    # Slurm writes the hosts as `node[01-03,7],other`
    hosts = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
    os.environ.setdefault("MASTER_ADDR", hosts.partition(",")[0])
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def is_slurm_task() -> bool:
    """Return whether `srun` started this process as one of several.

    Returns False in a batch script and in the shell of `salloc`.
    """
    if "SLURM_STEP_ID" not in os.environ or "SLURM_PROCID" not in os.environ:
        return False
    special = slurm_number("SLURM_STEP_ID") >= FIRST_SPECIAL_STEP
    return slurm_number("SLURM_STEP_NUM_TASKS") > 1 and not special


def slurm_number(name: str) -> int:
    """Return the number in a variable of Slurm; raises `UserError` without one."""
    text = os.environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise slurm_error(name)
    return int(text)


def slurm_error(name: str) -> UserError:
    """Return the error for a variable of Slurm that cannot be read."""
    return UserError(f"{name} is {os.environ.get(name)!r}, which srun does not write")


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, which Slurm writes as `2(x3),1`; [] for other text."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
