"""TensorBoard beside a run, in a process that ends when the run does.

    python -m accel_gpt.training.dashboard FOLDER PORT

is that process: it serves the curves in FOLDER on this machine until its standard input ends,
which it does however the run ends, also when it is killed.
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

NICENESS = 10  # the curves can wait, training cannot
ENDING_SECONDS = 5.0  # which TensorBoard has to end by itself; assumption


class Dashboard:
    """TensorBoard on a free port, or on `port`; tells its address when it listens.

    A run goes on without it where it does not start, or ends before the run.
    """

    def __init__(self, folder: Path, port: int | None, say: Callable[[str], None]) -> None:
        self.folder, self.port, self.say = folder, port or 0, say
        self.ending = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "accel_gpt.training.dashboard",
                str(self.folder),
                str(self.port),
            ],
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
        """Tell the address, and when there is none any more."""
        assert self.process.stderr
        last = "it said nothing"
        with self.process.stderr as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").strip()
                last = text or last
                if found := re.search(r"TensorBoard \S+ at (http://\S+?)/? ", text):
                    self.say(f"dashboard  {found[1]}")
        if not self.ending:
            self.say(f"WARNING: the dashboard ended ({last}); training goes on without it")


def check_port(port: int | None) -> None:
    """Raise `UserError` where the dashboard could not listen on `port`."""
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
