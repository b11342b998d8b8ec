"""The guards of every test: a changed setting fails it, and it reaches no other machine."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hermetic import kept_settings, read_settings, restore_settings

ROOT = Path(__file__).resolve().parents[1]


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
