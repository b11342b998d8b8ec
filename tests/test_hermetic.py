"""The guards of every test: a changed setting fails it, and it reaches no other machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hermetic import kept_settings, read_settings, restore_settings

ROOT = Path(__file__).resolve().parents[1]
LEAKS = """
import os
import socket
import pytest
import torch

@pytest.mark.parametrize("change", [
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    lambda: os.environ.update(LEAKED="1"),
    lambda: os.chdir("/"),
])
def test_leaks(change):
    change()

def test_leaks_nothing(monkeypatch):
    monkeypatch.setenv("LEAKED", "1")
    monkeypatch.setattr(torch.backends.cudnn, "fp32_precision", "ieee")

@pytest.mark.gpu
def test_needs_a_card():
    raise AssertionError
"""


@pytest.fixture
def before() -> Iterator[None]:
    """Restore settings, since a test may fail before it does so."""
    with kept_settings():
        yield


@pytest.mark.usefixtures("before")
def test_changed_settings_are_named_and_put_back() -> None:
    settings = read_settings()
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    os.environ["LEAKED"] = "1"
    changed = restore_settings(settings)
    assert [line.partition(":")[0] for line in changed] == [
        *("float32 matmul precision", "fp32_precision of the backends"),
        *("default dtype", "flush denormal", "environment"),
    ]
    assert changed[0].endswith("'highest' -> 'high'")
    assert changed[-1] == "environment: LEAKED None -> '1'"
    assert read_settings() == settings
    assert restore_settings(settings) == []


def test_other_machines_are_out_of_reach() -> None:
    with socket.socket() as plain:
        with pytest.raises(OSError, match="unreachable"):
            plain.connect(("192.0.2.1", 80))
        assert plain.connect_ex(("192.0.2.1", 80)) != 0
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("example.org", 443)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=10).close()


@pytest.mark.slow
def test_a_test_that_leaves_a_setting_changed_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "5 passed, 1 skipped, 4 errors" in done.stdout
    assert "attention backends: cudnn True -> False" in done.stdout
    assert "environment: LEAKED None -> '1'" in done.stdout
