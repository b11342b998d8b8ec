"""Train in processes that start fast: import torch once, then fork for each of them.

    python -m tests.faults.server

Reads a line of JSON from stdin for each request and answers with a line on stdout. `{"arguments":
..., "output": file, ...}`, the arguments of `start`, starts a process and is answered with its id;
`{"poll": id}` is answered with its exit code, or null while it runs. The server has one thread,
since a fork copies only one.
"""

import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from accel_gpt import cli
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
from accel_gpt.data import loader
from accel_gpt.launch import machine
from accel_gpt.runs import saving
from tests.helpers.hermetic import sync_nothing

PR_SET_PDEATHSIG = 1  # prctl(2)
CHUNK = 4096  # sequences are prefetched in small chunks: a process reads few
FACTS = ("commit", "package_versions", "device_name")  # facts of the machine, read once
# what a process would import late
LATE = (
    *("filelock", "numpy.random", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "accel_gpt.commands.inspect"),
    *("accel_gpt.commands.plan", "accel_gpt.commands.sample"),
)


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with answers
    for name in FACTS:
        setattr(machine, name, functools.cache(getattr(machine, name)))
    loader.CHUNK_BYTES = CHUNK
    saving.LAST_RETRY_SECONDS = 0.0
    sync_nothing()
    machine.commit(), machine.package_versions()
    for name in LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the second thread"
        asked = json.loads(line)
        answers.write(f"{json.dumps(poll(**asked) if 'poll' in asked else start(**asked))}\n")
        answers.flush()


def poll(poll: int) -> int | None:
    """Return the exit code of a process; None if it runs."""
    ended, status = os.waitpid(poll, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def start(
    arguments: Sequence[str],
    output: str,
    environment: Mapping[str, str],
    folder: str,
    of_command: bool,
    clock: float,
) -> int:
    """Start one process; return its id.

    `of_command`: the arguments are of `accel-gpt`, else of training. `clock`: seconds added to
    `time.time`.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        os.environ.update(environment)
        os.chdir(folder)
        if clock:
            right = time.time
            time.time = lambda: right() + clock
        code = run_main(cli.dispatch if of_command else command.main, arguments)
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            if not thread.daemon:  # as an interpreter ends
                thread.join()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
