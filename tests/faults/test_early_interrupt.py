"""Ctrl-C before the first step: one sentence and an exit code, while data is prepared; nothing
is left behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.launches import until
from tests.test_launch import MARK, PLAIN, TRAIN, marked

Arguments = Callable[..., list[str]]
pytestmark = pytest.mark.slow


def start(argv: list[str], folder: Path, mark: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, TRAIN, *argv],
        cwd=folder,
        env={**PLAIN, MARK: mark},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_while_data_is_prepared(small_run: Arguments, tmp_path: Path) -> None:
    number = signal.SIGTERM
    mark = f"preparing {number.name}"
    options = ["--data.train", "data", "--data.prepare.source", "text"]
    (tmp_path / "text").mkdir()
    for part in range(4):
        (tmp_path / "text" / f"{part}.txt").write_text("some words of a text\n" * 400_000)
    process = start(small_run(*options), tmp_path, mark)
    until(lambda: len(marked(mark)) > 1)
    os.killpg(process.pid, number)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"{number.name}: stopped" in shown
    assert "Traceback" not in shown
    assert "interrupted" not in shown
    assert not marked(mark)
