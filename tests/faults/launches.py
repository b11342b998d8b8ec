"""Start a tiny run as real processes: by a launcher, or two processes directly, like srun.

Direct processes are forked by a server that has imported everything, which saves seconds.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.helpers.ports import free_port
from tests.test_launch import MARK, PLAIN, ROOT, TORCHRUN, TRAIN, marked

TWO = [*TORCHRUN, "--nproc_per_node", "2"]


def config(folder: Path, corpus: Path, steps: int = 40) -> Path:
    """Config of a tiny run of two processes: about 10 ms a step, frequent saves."""
    path = folder / "two.yaml"
    path.write_text(
        f"""
out_dir: {folder / "run"}
data: {{train: {corpus}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, dropout: 0.1}}
train: {{tokens_per_step: 256, micro_batch_size: 4, max_steps: {steps}}}
optim: {{lr: 1e-2}}
schedule: {{warmup_steps: 2}}
eval: {{every: 5, tokens: 2016}}
sample: {{every: 5, max_new_tokens: 8}}
checkpoint: {{every: 8, keep_best: false}}
log: {{every: 1, trackers: []}}
"""
    )
    return path


@dataclass(frozen=True)
class Answer:
    """How the processes of a launch ended."""

    codes: list[int]  # exit code, or the negative number of a signal
    outputs: list[str]  # output of each


class Server:
    """A fork server of training processes (see `server.py`)."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> Self:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.server"],
                cwd=ROOT, env={**inherited, "PYTHONPATH": paths},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.communicate()  # the server ends at the end of its input

    def ask(self, **question: Any) -> Any:
        """Send a line, return the answer."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def launch(
        self,
        arguments: Sequence[str],
        processes: int = 1,
        environment: Sequence[Mapping[str, str]] = (),
        kill_after: float | None = None,
        kill: int = 0,
        **asked: Any,
    ) -> Answer:
        """Train until all processes have ended; kill the process `kill` after some seconds."""
        own = dict(enumerate(environment))
        launch = Direct(self, self.log.parent, arguments, processes, environment=own, **asked)
        if kill_after is not None:
            due = time.monotonic() + kill_after
            while not launch.poll() and time.monotonic() < due:
                time.sleep(0.01)
            launch.send(signal.SIGKILL, kill)
        codes = launch.wait()
        return Answer(codes, [launch.shown(rank) for rank in range(processes)])


class Direct:
    """Processes of one run started without a launcher."""

    counter = itertools.count()

    def __init__(
        self,
        server: Server,
        folder: Path,
        argv: Sequence[str],
        processes: int = 2,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        own_argv: Mapping[int, list[str]] | None = None,
        command: bool = False,
        clock: float = 0.0,
    ) -> None:
        """`command`: the arguments are those of `accel-gpt`, else of training."""
        self.server = server
        number, variables = next(self.counter), {"ACCELERATE_USE_CPU": "true"}
        variables["OMP_NUM_THREADS"] = "1"
        if processes > 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            variables |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        self.files = [folder / f"shown_{number}_{rank}.txt" for rank in range(processes)]
        self.pids = []
        for rank, file in enumerate(self.files):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            pid = server.ask(
                arguments=[*argv, *(own_argv or {}).get(rank, [])],
                output=str(file),
                environment={**variables, **ranks, **(environment or {}).get(rank, {})},
                folder=str(folder),
                of_command=command,
                clock=clock,
            )
            self.pids.append(pid)
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
                self.codes[rank] = self.server.ask(poll=self.pids[rank])
        return None not in self.codes

    def wait(self, seconds: float = 60) -> list[int]:
        """Return the exit codes; processes that are late print their stacks and fail the test."""
        try:
            until(self.poll, seconds)
        except AssertionError as error:
            self.send(signal.SIGABRT, *range(len(self.pids)))
            time.sleep(1)
            shown = "\n".join(self.shown(rank) for rank in range(len(self.pids)))
            raise AssertionError(shown) from error
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
