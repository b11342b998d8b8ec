"""Read the variables that launchers set, and start this package as a child process.

`accelerate launch`, `torchrun` and `srun` put variables into the environment of each process.
Under `srun`, `join_slurm_step` sets the variables that torchrun would set.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from accel_gpt.errors import PeerError, UserError, first_line, require

PREEMPTED = 75  # EX_TEMPFAIL: saved, run me again
# that stop a run
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STOP_WITH_PARENT = "ACCEL_GPT_STOP_WITH_PARENT"  # a run with this variable stops if we are killed
PRECISIONS = ("no", "bf16", "fp16", "fp8")  # that training supports; no: float32
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
LONGEST_WAIT = timedelta(days=1)  # for rank 0, without train.init_timeout; assumption
HEARD = timedelta(seconds=5)  # for the other ranks to hear of an error; assumption
LOW_PRIORITY = 10  # niceness; assumption
FIRST_PORT = 20000  # below the ports that Linux gives to clients, from 32,768 on
PORTS = 10000
# slurm.h: a batch script, the shell of salloc and others have numbers close to 2**32
FIRST_SPECIAL_STEP = 2**32 - 16
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


def shared_cores() -> int:
    """Return the cores that this process may use, divided by the ranks on the machine.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS=1; a trainer wants all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    if is_slurm_task() and not started_by_launcher() and "SLURM_CPUS_PER_TASK" in os.environ:
        return min(cores, slurm_number("SLURM_CPUS_PER_TASK"))  # srun may bind each to its own
    return max(1, cores // local_world_size())


def requested_threads() -> int | None:
    """Return the threads that the user requests with OMP_NUM_THREADS; None without a number.

    A launcher sets the variable itself if the user does not. torchrun, and `accelerate launch` with
    GPUs, set 1. `accelerate launch` on a CPU sets 1, or the physical cores divided by the
    processes. Such a number is not taken for the user's.
    """
    match = re.match(r"\s*([1-9][0-9]{0,3})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    if match is None:
        return None
    threads = int(match[1])  # of the outer parallel regions, if the variable is a list
    if started_by_launcher() and threads in (1, threads_of_accelerate()):
        return None
    return threads


def threads_of_accelerate() -> int:
    """Return the threads that `accelerate launch` sets for a process on a CPU."""
    return int((psutil.cpu_count(logical=False) or 1) / local_world_size())


def starts_on_gpus() -> bool:
    """Return whether `accelerate launch` started this process as one on a GPU.

    torchrun does not say. One process without a precision does not count: accelerate_config.yaml,
    which suits a CPU too, starts the same.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return False
    return world_size() > 1 or launcher_precision() != "no"


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


def main_address() -> str:
    """Return the address of rank 0, where all ranks meet."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


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


def environment_without_launcher() -> dict[str, str]:
    """Copy the environment for processes that do not belong to this process group.

    ACCELERATE_USE_CPU stays: the user may have set it, and the children use the same device.
    """
    return {
        key: value
        for key, value in os.environ.items()
        if key == "ACCELERATE_USE_CPU" or not key.startswith(PREFIXES)
    }


# --------------------------------------------------------------------------- before ranks join


def answer_of_main(question: Callable[[], Any], seconds: float | None) -> Any:
    """Return the answer of rank 0, a JSON value, before the ranks have joined; a collective.

    If rank 0 raises an error, the other ranks exit with its code, and rank 0 prints it. Raises
    `PeerError` if a rank does not come within `seconds` (None: `LONGEST_WAIT`). Ctrl-C ends a
    process that waits.
    """
    if world_size() == 1:
        return question()
    from torch.distributed import DistError  # torch takes seconds

    timeout = timedelta(seconds=seconds) if seconds else LONGEST_WAIT
    try:
        with ended_by_ctrl_c():
            store = meeting_store(timeout)
        return exchange_answer(store, question)
    except DistError as error:
        raise PeerError(
            f"another process of the run has ended or does not answer ({first_line(error)}); see "
            "its own error message"
        ) from None


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process while native code waits, where Python calls no handler.

    Another handler than Python's own stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def meeting_store(timeout: timedelta) -> Any:
    """Return the store in which ranks meet; rank 0 may serve it, so it is kept."""
    import torch.distributed as dist  # torch takes seconds

    distributed: Any = dist  # not all of its functions have types
    store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
    return store


def exchange_answer(store: Any, question: Callable[[], Any]) -> Any:
    """Set the answer or the error of rank 0 in the store, or wait for it on another rank."""
    key = f"accel_gpt/answer_{store.add(f'accel_gpt/asked_by_{rank()}', 1)}"
    if not is_main():
        with ended_by_ctrl_c():
            found = json.loads(store.get(key))
        store.set(f"{key}/heard_by_{rank()}", "")
        if "exit_code" in found:
            sys.exit(found["exit_code"])
        return found["answer"]
    try:
        text = json.dumps({"answer": question()})
    except BaseException as error:
        exit_code = getattr(error, "exit_code", PeerError.exit_code)
        store.set(key, json.dumps({"exit_code": exit_code}))
        others = [f"{key}/heard_by_{other}" for other in range(1, world_size())]
        # a late rank learns that rank 0 has ended
        with contextlib.suppress(RuntimeError), ended_by_ctrl_c():
            store.wait(others, HEARD)
        raise
    store.set(key, text)
    return json.loads(text)["answer"]


# --------------------------------------------------------------------------- Slurm


def join_slurm_step() -> None:
    """Set torchrun's variables from Slurm's variables, if `srun` started this process.

    Called before anything reads them. Changes nothing if a launcher or the user has set RANK.
    Raises `UserError` if `srun` started `accelerate launch` for each process, and for variables
    that Slurm does not write.
    """
    if "RANK" in os.environ or not is_slurm_task():
        return
    require(
        not started_by_launcher(),
        "srun started accelerate launch once for each process; start srun accel-gpt train without "
        "it, or one accelerate launch on each node with --num_processes, --num_machines and "
        "--machine_rank",
    )
    tasks_of_nodes = tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = slurm_number("SLURM_NODEID")
    hosts = os.environ.get("SLURM_STEP_NODELIST", "")
    if node >= len(tasks_of_nodes):
        raise slurm_error("SLURM_STEP_TASKS_PER_NODE")
    if not hosts:
        raise slurm_error("SLURM_STEP_NODELIST")
    # two steps of a job may share a node, where each needs a port
    number = slurm_number("SLURM_JOB_ID") + slurm_number("SLURM_STEP_ID")
    os.environ.update(
        RANK=str(slurm_number("SLURM_PROCID")),
        LOCAL_RANK=str(slurm_number("SLURM_LOCALID")),
        WORLD_SIZE=str(slurm_number("SLURM_STEP_NUM_TASKS")),
        LOCAL_WORLD_SIZE=str(tasks_of_nodes[node]),
    )
    os.environ.setdefault("MASTER_ADDR", first_host(hosts))
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def is_slurm_task() -> bool:
    """Return whether `srun` started this process as one of several.

    Returns False in a batch script and in the shells of `salloc` and `srun --pty`.
    """
    if "SLURM_STEP_ID" not in os.environ or "SLURM_PROCID" not in os.environ:
        return False
    special = slurm_number("SLURM_STEP_ID") >= FIRST_SPECIAL_STEP
    return slurm_number("SLURM_STEP_NUM_TASKS") > 1 and not special and not in_pty_step()


def in_pty_step() -> bool:
    """Return whether `srun --pty` started this step, as a shell on a terminal.

    Programs of the shell count too if their streams are redirected, as by nohup. A step that starts
    inside the shell inherits its variables, but its task has no terminal.
    """
    if "SLURM_PTY_PORT" not in os.environ:
        return False
    task = Path("/proc", os.environ.get("SLURM_TASK_PID", "unknown"), "stat")
    try:
        fields = task.read_text(errors="replace").rpartition(")")[2].split()
        return fields[4] != "0"  # tty_nr; proc_pid_stat(5)
    except (OSError, IndexError):
        return True  # the shell has ended


def slurm_number(name: str) -> int:
    """Return the number in a variable of Slurm; raises `UserError` without one."""
    text = os.environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise slurm_error(name)
    return int(text)


def slurm_error(name: str) -> UserError:
    """Return the error for a variable of Slurm that cannot be read."""
    return UserError(
        f"{name} is {os.environ.get(name)!r}, which srun does not write; set RANK, LOCAL_RANK, "
        "WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process yourself"
    )


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, which Slurm writes as `2(x3),1`; [] for other text."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(hosts: str) -> str:
    """Return the first of the hosts that Slurm writes as `node[01-03,7],other`."""
    with_first_numbers = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts)
    return with_first_numbers.partition(",")[0]


# --------------------------------------------------------------------------- child processes


def launch_child(
    argv: Sequence[str],
    *,
    module: str = "accel_gpt.cli",
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
    secret: str | None = None,
    stdout: int | IO[bytes] | IO[str] | None = None,
    stderr: int | IO[bytes] | IO[str] | None = None,
    own_group: bool = False,
    priority: Literal["normal", "low", "idle"] = "normal",
) -> subprocess.Popen[str]:
    """Start `python -m MODULE ARGV ...`, by default `accel-gpt ARGV ...`.

    The child gets this environment without the variables of a launcher, and `environment` on top.
    `processes`: torchrun starts more than one. `secret`: text that the child reads from the file
    that its last argument names, a pipe; every user of a machine can read command lines.
    `own_group`: a Ctrl-C does not reach the child.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-c", TORCHRUN, "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", module, *argv]
    pass_fds: list[int] = []
    with contextlib.ExitStack() as files:
        if secret is not None:
            reading, writing = os.pipe()
            reader = files.enter_context(open(reading, "rb"))
            writer = files.enter_context(open(writing, "wb", buffering=0))
            command.append(f"/dev/fd/{reading}")
            pass_fds = [reading]
        child = subprocess.Popen(
            command,
            env={**environment_without_launcher(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            process_group=0 if own_group else None,
            pass_fds=pass_fds,
        )
        set_priority(child.pid, priority)
        if secret is not None:
            reader.close()
            with contextlib.suppress(BrokenPipeError):  # the child ended early
                writer.write(secret.encode("utf-8", "surrogateescape"))
    return child


def set_priority(pid: int, priority: str) -> None:
    """Lower the priority of a process: `low` shares busy cores a little, `idle` takes idle ones."""
    with contextlib.suppress(OSError):  # the process may have ended already
        if priority == "idle" and hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        elif priority != "normal":
            os.setpriority(os.PRIO_PROCESS, pid, LOW_PRIORITY)


def run_child(
    argv: Sequence[str],
    *,
    module: str = "accel_gpt.cli",
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
        except BaseException:
            child.kill()
            child.wait()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, printed, errors)


def child_error(text: str, code: int | None) -> str:
    """Return the error of a child, the last line of what it printed, or else its exit code."""
    lines = text.strip().splitlines() or [f"exit code {code}"]
    return lines[-1].removeprefix("error: ")
