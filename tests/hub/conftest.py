"""Fixtures of the tests of exports."""

import contextlib
import importlib
import io
import subprocess
from typing import Any

import pytest

from accel_gpt.hub import export as exporting


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison without a fresh process, which takes seconds to start."""

    def run(argv: list[str], module: str, **_: Any) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(module).main(argv)
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    monkeypatch.setattr(exporting, "run_child", run)
