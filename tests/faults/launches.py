"""Start a tiny run as real processes: by a launcher, or two processes directly, like srun.

Direct processes are forked from one that has imported everything, which saves seconds.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.test_launch import ACCELERATE, MARK, PLAIN, TORCHRUN, TRAIN, marked

TWO = {
    "accelerate": [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    "torchrun": [*TORCHRUN, "--nproc_per_node", "2"],
}
SERVER = """
import json, os, sys, traceback
from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main

print("null", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "poll" in asked:
        pid, status = os.waitpid(asked["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    os.setsid()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    shown = os.open(asked["shown"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, handle in ((0, os.open(os.devnull, os.O_RDONLY)), (1, shown), (2, shown)):
        os.dup2(handle, number)
    sys.exit(run_main(command.main, asked["argv"]))
"""


def config(folder: Path, corpus: Path, steps: int = 40) -> Path:
    """Config of a tiny run of two processes: about 10 ms a step, frequent saves."""
    path = folder / "two.yaml"
    path.write_text(
        f"""
out_dir: {folder / "run"}
data: {{train: {corpus}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, dropout: 0.1}}
train: {{tokens_per_step: 256, micro_batch_size: 4, max_steps: {steps}, cpu_threads: 1}}
optim: {{lr: 1e-2}}
schedule: {{warmup_steps: 2}}
eval: {{every: 5, tokens: 2048}}
sample: {{every: 0}}
checkpoint: {{every: 8, keep_best: false}}
log: {{every: 1, trackers: []}}
"""
    )
    return path


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Forks trainers and reports how they end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=PLAIN,
        )  # fmt: skip
        self.answer()  # wait until everything is imported

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Send a line, return the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next line."""
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the server; its children have ended."""
        self.process.communicate(timeout=60)


class Direct:
    """Processes of one run started without a launcher."""

    counter = itertools.count()

    def __init__(
        self,
        server: Server,
        folder: Path,
        argv: list[str],
        processes: int = 2,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        own_argv: Mapping[int, list[str]] | None = None,
    ) -> None:
        self.server, self.began = server, time.monotonic()
        number, group = next(self.counter), {}
        if processes > 1:
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.files = [folder / f"shown_{number}_{rank}.txt" for rank in range(processes)]
        self.pids = [
            server.ask(
                {
                    "folder": str(folder),
                    "shown": str(self.files[rank]),
                    "argv": argv + (own_argv or {}).get(rank, []),
                    "environment": group
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
                    | dict((environment or {}).get(rank, {})),
                }
            )
            for rank in range(processes)
        ]
        self.codes: list[int | None] = [None] * processes

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to the live processes."""
        self.poll()
        for rank in ranks:
            if self.codes[rank] is None:
                os.kill(self.pids[rank], number)

    def poll(self) -> bool:
        """Return whether all have ended."""
        for rank, code in enumerate(self.codes):
            if code is None:
                self.codes[rank] = self.server.ask({"poll": self.pids[rank]})
        return None not in self.codes

    def wait(self, seconds: float = 60) -> list[int]:
        """Return the exit codes; kill late processes and fail the test."""
        try:
            until(self.poll, seconds)
        finally:
            self.send(signal.SIGKILL, *range(len(self.pids)))
        return [code for code in self.codes if code is not None]

    def shown(self, rank: int = 0) -> str:
        """Return the output of a process so far."""
        return self.files[rank].read_text() if self.files[rank].exists() else ""


class Launched:
    """A launcher and the processes that it started."""

    counter = itertools.count()

    def __init__(self, command: list[str], folder: Path, argv: list[str]) -> None:
        self.mark = f"{os.getpid()}.{next(self.counter)}"
        self.file = folder / f"launched_{self.mark}.txt"
        with self.file.open("w") as shown:
            self.process = subprocess.Popen(
                [*command, TRAIN, *argv], cwd=folder, env={**PLAIN, MARK: self.mark},
                stdout=shown, stderr=shown, start_new_session=True,
            )  # fmt: skip

    def workers(self) -> list[int]:
        """Return the started trainers by rank."""
        found = {
            environment["RANK"]: pid
            for pid, environment in marked(self.mark).items()
            if pid != self.process.pid and "RANK" in environment
        }
        return [found[rank] for rank in sorted(found)]

    def wait(self, seconds: float = 90) -> int:
        """Wait until all its processes have ended; return the launcher's exit code."""
        try:
            self.process.wait(seconds)
            until(lambda: not marked(self.mark), 40)
        finally:
            for pid in marked(self.mark):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode

    def shown(self) -> str:
        """Return the output of launcher and processes."""
        return self.file.read_text()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `condition` holds; the test fails if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def steps_told(run: Path) -> int:
    """Return the number of lines of metrics so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0
