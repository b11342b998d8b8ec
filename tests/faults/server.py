"""Train in processes that start fast: import torch once, then fork for each launch.

    python -m tests.faults.server

Reads a `Request` from each line of stdin and answers with an `Answer`, a line of JSON, on stdout.
`{"start": a Request, "output": file}` starts one process and answers with its id;
`{"poll": id}` answers with its exit code, or null while it runs.
It uses one thread, since a fork copies only one. The first request for a number of processes finds
out what they import late. The server imports that too, so later requests need not.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from accel_gpt import cli
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
from accel_gpt.data import loader
from accel_gpt.launch import machine
from accel_gpt.runs import saving
from tests.faults.disk import Disk
from tests.helpers.hermetic import sync_nothing
from tests.helpers.ports import free_port

PR_SET_PDEATHSIG = 1  # prctl(2)
CHUNK = 4096  # sequences are prefetched in small chunks: a launch reads few
ABORT_SECONDS = 5.0
FACTS = ("commit", "package_versions", "device_name")  # facts of the machine, read once


@dataclass(frozen=True)
class Request:
    """One launch: the same arguments for all its processes."""

    arguments: list[str]
    environment: list[dict[str, str]] = field(default_factory=lambda: [{}])  # one for each process
    kill_after: float | None = None  # seconds
    kill: int | str = "all"  # the process to kill
    timeout: float = 60.0  # seconds after which the launch counts as hung and is killed
    clock: float = 0.0  # seconds added to `time.time`
    disk: dict[str, Any] | None = None  # fields of a `Disk`
    command: bool = False  # the arguments are of `accel-gpt`, else of training
    folder: str = "."  # the current folder


@dataclass(frozen=True)
class Answer:
    """How the processes of a launch ended."""

    codes: list[int]  # exit code, or the negative number of a signal
    seconds: list[float]  # from the start to the end of each
    outputs: list[str]  # output of each
    hung: bool = False


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
    warm: set[tuple[int, str, bool]] = set()  # processes, the command, whether FSDP
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the second thread"
        asked = json.loads(line)
        if "start" in asked or "poll" in asked:
            reply(answers, poll(asked["poll"]) if "poll" in asked else start(**asked))
            continue
        with tempfile.TemporaryDirectory() as folder:
            request = Request(**asked)
            kind = (
                len(request.environment),
                request.arguments[0] if request.command else "train",
                "FSDP_VERSION" in request.environment[0],
            )
            answer = serve(request, Path(folder), kind in warm)
            if kind not in warm and not any(answer.codes):
                preload(Path(folder))
                warm.add(kind)
        reply(answers, asdict(answer))


def reply(answers: IO[str], content: Any) -> None:
    """Write a line of JSON."""
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def start(start: dict[str, Any], output: str) -> int:
    """Start one process; return its id."""
    request, file = Request(**start), Path(output)
    file.touch()
    return fork(request, request.environment[0], file, warm=True)


def poll(pid: int) -> int | None:
    """Return the exit code of a process; None if it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve(request: Request, folder: Path, warm: bool) -> Answer:
    """Start the processes of a request, kill the requested one, wait for the rest."""
    places = group(len(request.environment))
    files = [folder / f"output_{rank}" for rank in range(len(places))]
    for file in files:
        file.touch()
    start, pids = time.monotonic(), []
    for place, own, output in zip(places, request.environment, files, strict=True):
        pids.append(fork(request, place | own, output, warm))
    codes, seconds, hung = watch(request, pids, start)
    return Answer(codes, seconds, [file.read_text() for file in files], hung)


def group(size: int) -> list[dict[str, str]]:
    """Return the environment that a launcher sets for each process."""
    common = {"ACCELERATE_USE_CPU": "true"}
    if size == 1:
        return [common]
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def fork(request: Request, variables: dict[str, str], output: Path, warm: bool) -> int:
    """Start one training process; return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        os.environ.update(variables)
        os.chdir(request.folder)
        code = launch(request, output)
        if not warm and variables.get("RANK", "0") == "0":
            (output.parent / "modules").write_text("\n".join(sys.modules))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(request: Request, output: Path) -> int:
    """Train, then end like an interpreter: join threads first."""
    if request.clock:
        right = time.time
        time.time = lambda: right() + request.clock
    disk = Disk(**request.disk).mounted() if request.disk else contextlib.nullcontext()

    def on_disk(arguments: Any) -> int:
        with disk:
            code = run_main(cli.dispatch if request.command else command.main, arguments)
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                if not thread.daemon:
                    thread.join()
            return code

    return run_main(on_disk, request.arguments)


def watch(request: Request, pids: list[int], start: float) -> tuple[list[int], list[float], bool]:
    """Kill on time and wait; return codes, seconds, and whether the time ran out."""
    codes, seconds = [0] * len(pids), [0.0] * len(pids)
    deadline, hung = start + request.timeout, False
    kill_at = None if request.kill_after is None else start + request.kill_after
    with selectors.DefaultSelector() as running:
        for rank, pid in enumerate(pids):
            running.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)
        while running.get_map():
            until = deadline if kill_at is None else min(kill_at, deadline)
            for key, _ in running.select(max(0.0, until - time.monotonic())):
                running.unregister(key.fileobj)
                os.close(key.fd)
                codes[key.data] = os.waitstatus_to_exitcode(os.waitpid(pids[key.data], 0)[1])
                seconds[key.data] = time.monotonic() - start
            left = [key.data for key in running.get_map().values()]
            now = time.monotonic()
            if kill_at is not None and now >= kill_at:
                kill([pids[rank] for rank in left if request.kill in ("all", rank)])
                kill_at = None
            if left and now >= deadline:  # the first signal makes them print their stacks
                kill([pids[rank] for rank in left], signal.SIGKILL if hung else signal.SIGABRT)
                hung, deadline = True, now + ABORT_SECONDS
    return codes, seconds, hung


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes that have not been reaped."""
    for pid in pids:
        os.kill(pid, number)


def preload(folder: Path) -> None:
    """Import the modules that a training process imported late."""
    listed = folder / "modules"
    names = listed.read_text().split() if listed.exists() else []
    for name in names:
        if name not in sys.modules:
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
