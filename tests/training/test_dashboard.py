"""The dashboard: its address is printed, it ends with the run, it draws charts."""

import contextlib
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.training import dashboard
from accel_gpt.training.dashboard import Dashboard
from tests.helpers.terminals import Terminal, in_python

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"dashboard  (http://localhost:\d+)")
SCENE = """
import os, signal, sys, threading, time
from pathlib import Path
from accel_gpt.training.dashboard import Dashboard

signal.signal(signal.SIGINT, lambda *_: print("Ctrl-C was heard", flush=True))
with Dashboard(Path("curves"), lambda text: print(text, flush=True)) as board:
    while board.thread.is_alive() and sys.stdin.readline() != "end\\n":
        pass
    """


def fetch(url: str) -> Any:
    """Return the JSON at an address; None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError):
        return None


def soon(check: Callable[[], Any], seconds: float = 120) -> Any:
    """Poll `check` until its result is true; return the result."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def ended(shell: Terminal) -> bool:
    """Return whether a shell has ended; type `end` again, as Ctrl-C may discard input."""
    if shell.process.poll() is None:
        with contextlib.suppress(OSError):  # the shell has just ended
            shell.press(b"end\n")
        time.sleep(0.5)
    return shell.process.poll() is not None


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Replace TensorBoard by another program."""
    path = tmp_path / "pretend"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_dashboard_that_does_not_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tmp_path, 'sys.exit("ModuleNotFoundError: No module")')
    said: list[str] = []
    with Dashboard(tmp_path / "curves", said.append):
        soon(lambda: said)
    why = "(ModuleNotFoundError: No module)"
    assert said == [f"WARNING: the dashboard ended {why}; training continues without it"]


@pytest.mark.parametrize(("code", "ending"), [("", 0), ("signal.signal(15, signal.SIG_IGN)", -9)])
def test_its_address_is_printed_and_it_ends_in_silence(
    code: str, ending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends it, or SIGKILL if it ignores SIGTERM."""
    address = "NOTE: noise\nTensorBoard 2 at http://localhost:77/ (Press\n"
    serve = f"import signal; {code}\nsys.stderr.write({address!r})\nsys.stderr.flush()\n"
    pretend(monkeypatch, tmp_path, serve + "for _ in range(100): time.sleep(0.1)")
    monkeypatch.setattr(dashboard, "ENDING_SECONDS", 0.5 if ending else 60.0)
    printed: list[str] = []
    with Dashboard(tmp_path / "curves", printed.append) as board:
        soon(lambda: printed)
        assert board.process.poll() is None
    assert printed == ["dashboard  http://localhost:77"]
    assert board.process.poll() == ending


ENDS = {
    "error": "raise ValueError",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.slow
def test_it_ends_however_the_run_ends_and_outlives_a_ctrl_c(tmp_path: Path) -> None:
    """All cases run at the same time, since each waits for TensorBoard to start."""
    with contextlib.ExitStack() as stack:
        shells = {
            end: stack.enter_context(
                Terminal(in_python(SCENE + code), cwd=tmp_path, PYTHONPATH=str(ROOT))
            )
            for end, code in ENDS.items()
        }
        for end, shell in shells.items():
            shell.wait_for("dashboard  http")
            found = ADDRESS.search(shell.written.decode())
            assert found
            url = f"{found[1]}/data/environment"
            shell.press(b"\x03")
            shell.wait_for("Ctrl-C was heard")
            assert fetch(url), end
            soon(lambda shell=shell: ended(shell))  # type: ignore[misc]
            shell.finish()
            soon(lambda url=url: fetch(url) is None)  # type: ignore[misc]
            assert b"WARNING" not in shell.written
