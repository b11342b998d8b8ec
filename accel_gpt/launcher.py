"""What `accelerate launch`, `torchrun` and `srun` put into the environment of each process."""

import os
import re
import signal

from accel_gpt.errors import require

PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # stop a run
PREFIXES = (  # of the variables that launchers set
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ACCELERATE_", "TORCHELASTIC_", "FSDP_", "PARALLELISM_CONFIG_", "PET_"),
)


def rank() -> int:
    """The rank of this process over all machines."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shared_cores() -> int:
    """Cores that this process may use, divided by the number of ranks on the machine.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS=1; a trainer wants them all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_world_size())


def requested_threads() -> int | None:
    """The threads that the user asks for with OMP_NUM_THREADS; None for none, and not a number.

    A launcher sets the variable itself if the user does not. torchrun, and `accelerate launch` with
    GPUs, set 1. `accelerate launch` on a CPU sets 1, or the physical cores divided by the
    processes. Such a number is not taken for the user's.
    """
    match = re.match(r"\s*([1-9][0-9]{0,3})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    if match is None:
        return None
    threads = int(match[1])  # of the outer parallel regions, where the variable is a list
    if not started_by_launcher():
        return threads
    return None if threads in (1, threads_of_accelerate()) else threads


def threads_of_accelerate() -> int:
    """The threads that `accelerate launch` sets for a process on a CPU."""
    import psutil

    return int((psutil.cpu_count(logical=False) or 1) / local_world_size())


def starts_on_gpus() -> bool:
    """Whether `accelerate launch` started this process as one on a GPU; torchrun does not say.

    Of one process without a precision this is not known: accelerate_config.yaml, which suits a CPU
    too, starts the same.
    """
    environment = os.environ
    return (
        "TORCHELASTIC_RUN_ID" in environment
        and "ACCELERATE_MIXED_PRECISION" in environment
        and (world_size() > 1 or launcher_precision() != "no")
    )


def world_size() -> int:
    """The number of processes over all machines.

    Raises `UserError` where the launcher does not say how they connect: each would train alone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    require(
        not missing or (size == 1 and "LOCAL_RANK" not in os.environ),  # else torch looks for them
        f"WORLD_SIZE is {size} but {', '.join(missing)} are not set; start with accelerate launch "
        "or with torchrun",
    )
    return size


def main_address() -> str:
    """The address of rank 0, where all ranks meet."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def is_main() -> bool:
    """Whether this is rank 0; known before the process group exists."""
    return rank() == 0


def launcher_precision() -> str:
    """The precision that `accelerate launch` asks for: no, bf16, fp16 or fp8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def started_by_launcher() -> bool:
    """Whether `accelerate launch` or `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def environment_without_launcher() -> dict[str, str]:
    """A copy of the environment for processes that do not belong to this process group."""
    return {key: value for key, value in os.environ.items() if not key.startswith(PREFIXES)}
