"""TensorBoard beside a run, in a process that ends with it.

    python -m accel_gpt.training.dashboard FOLDER PORT

is that process: it serves the curves in FOLDER on this machine until its standard input ends, as it
does however the run ends, also when it is killed.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from accel_gpt.errors import UserError

NICENESS = 10  # training goes first
ENDING_SECONDS = 5.0  # after which TensorBoard is killed; assumption


class Dashboard:
    """TensorBoard on `port` (None: a free one); logs its address when it listens.

    A run goes on without it if it does not start or ends early.
    """

    def __init__(self, folder: Path, port: int | None, log: Callable[[str], None]) -> None:
        self.folder, self.port, self.log = folder, port or 0, log
        self.ending = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "accel_gpt.training.dashboard"]
        self.process = subprocess.Popen(
            [*command, str(self.folder), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the run
        )
        self.thread = threading.Thread(target=self.listen, name="dashboard", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending = True
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(ENDING_SECONDS)

    def listen(self) -> None:
        """Log the address, and the end of the process."""
        assert self.process.stderr
        last = "it printed nothing"
        with self.process.stderr as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").strip()
                last = text or last
                if found := re.search(r"TensorBoard \S+ at (http://\S+?)/? ", text):
                    self.log(f"dashboard  {found[1]}")
        if not self.ending:
            self.log(f"WARNING: the dashboard ended ({last}); training goes on without it")


def check_port(port: int | None) -> None:
    """Raise `UserError` if the dashboard could not listen on `port`."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorBoard does
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise UserError(
                f"log.dashboard_port is {port}, which cannot be used ({error.strerror}); "
                "set another one, or null for a free one"
            ) from None


def end_with_run() -> None:
    """End this process when its standard input does."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)  # TensorBoard cleans up


def main(argv: Sequence[str]) -> int:
    """Serve until the run is over."""
    os.nice(NICENESS)
    threading.Thread(target=end_with_run, daemon=True).start()
    from tensorboard import default, program

    folder, port = argv
    board = program.TensorBoard(default.get_plugins())
    board.configure(("tensorboard", "--logdir", folder, "--port", port))
    return int(board.main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
