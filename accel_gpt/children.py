"""Start this package as a child process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Literal

from accel_gpt.launcher import SAFE_PATH, STOP_WITH_PARENT

PREFIXES = (  # of the variables that launchers set
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "PET_",
    STOP_WITH_PARENT,
    "SLURM_STEP",  # without them a process is no task of srun
)
LOW_PRIORITY = 10  # niceness; assumption
# torchrun ends with exit code 1; this ends with the code of the first process that failed
TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    sys.exit(error.get_first_failure()[1].exitcode)
"""


def launch_child(
    argv: Sequence[str],
    *,
    module: str = "accel_gpt",
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | IO[str] | None = None,
    stderr: int | IO[bytes] | IO[str] | None = None,
    own_group: bool = False,
    priority: Literal["normal", "low", "idle"] = "normal",
) -> subprocess.Popen[str]:
    """Start `python -m MODULE ARGV ...`, by default `accel-gpt ARGV ...`.

    The child gets this environment without the variables of a launcher, and `environment` on top.
    It imports no file of the working folder. `processes`: torchrun starts more than one.
    `own_group`: a Ctrl-C does not reach the child. `priority`: `low` shares busy cores a little,
    `idle` takes idle ones.
    """
    variables = {SAFE_PATH: "1"}
    for key, value in os.environ.items():
        if key == "ACCELERATE_USE_CPU" or not key.startswith(PREFIXES):  # the user may have set it
            variables.setdefault(key, value)
    command = [sys.executable]
    if processes > 1:
        command += ["-c", TORCHRUN, "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", module, *argv]
    child = subprocess.Popen(
        command,
        env={**variables, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        process_group=0 if own_group else None,
    )
    with contextlib.suppress(OSError):  # the process may have ended already
        if priority == "idle" and hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
        elif priority != "normal":
            os.setpriority(os.PRIO_PROCESS, child.pid, LOW_PRIORITY)
    return child


def run_child(
    argv: Sequence[str],
    *,
    module: str = "accel_gpt",
    environment: Mapping[str, str] | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a child as `launch_child` starts it, and wait for its end.

    Kills the child if the wait is interrupted.
    """
    output = subprocess.PIPE if capture else None
    child = launch_child(argv, module=module, environment=environment, stdout=output, stderr=output)
    with child:
        try:
            printed, errors = child.communicate()
        finally:
            child.kill()  # unless it has ended
            child.wait()
    return subprocess.CompletedProcess(child.args, child.returncode, printed, errors)


def child_error(text: str, code: int | None) -> str:
    """Return the error of a child, the last line of what it printed, or else its exit code."""
    lines = text.strip().splitlines() or [f"exit code {code}"]
    return lines[-1].removeprefix("error: ")
