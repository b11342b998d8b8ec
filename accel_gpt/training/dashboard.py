"""Serve TensorBoard during a run, in a child process that ends with the run."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from accel_gpt.launch.context import Context

# serves until standard input closes; it closes even if the run is killed. Training has priority.
SERVE = """
nice -n 10 "$0" -P -m tensorboard.main --logdir "$1" --port 0 &
exec 2>/dev/null
cat
kill $!
wait
"""
ENDING_SECONDS = 5.0  # TensorBoard is killed if it takes longer to end; assumption


def open_dashboard(context: Context) -> contextlib.AbstractContextManager[object]:
    """Serve TensorBoard in the block, on rank 0, if `log.dashboard` is set."""
    if not context.config.log.dashboard or not context.accelerator.is_main_process:
        return contextlib.nullcontext()
    return Dashboard(Path(context.config.out_dir, "tensorboard"), context.log)


class Dashboard:
    """Runs TensorBoard on a free port and logs its address.

    If TensorBoard does not start or ends early, training continues without it.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self.folder = folder
        self.log = log
        self.ending = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            ["sh", "-c", SERVE, sys.executable, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the run
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
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.thread.join(ENDING_SECONDS)

    def listen(self) -> None:
        """Log TensorBoard's address, and warn if TensorBoard ends before the run."""
        assert self.process.stderr
        last = "it printed nothing"
        with self.process.stderr as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").strip()
                last = text or last
                found = re.search(r"TensorBoard \S+ at (http://\S+?)/? ", text)
                if found:
                    self.log(f"dashboard  {found[1]}")
        if not self.ending:
            self.log(f"WARNING: the dashboard ended ({last}); training continues without it")
