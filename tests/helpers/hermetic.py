"""No test reaches the network, and none leaves a global setting changed.

A plugin of pytest, which `conftest.py` registers where tests run. The network is cut for this
process and its forks. If permitted, `.ci/run` cuts it for all processes.
"""

import contextlib
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Generator, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt.runs import saving

LOOPBACK_NAMES = ("", "localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname())
TEST_VARIABLE = "PYTEST_CURRENT_TEST"  # pytest's own
BEFORE = pytest.StashKey[dict[str, Any]]()
# parents before children, since children inherit values
FP32_PRECISION: dict[str, Any] = {
    "": torch.backends,
    "cuda.matmul": torch.backends.cuda.matmul,
    "cudnn": torch.backends.cudnn,
    "cudnn.conv": torch.backends.cudnn.conv,
    "cudnn.rnn": torch.backends.cudnn.rnn,
    "mkldnn": torch.backends.mkldnn,
    "mkldnn.matmul": torch.backends.mkldnn.matmul,
    "mkldnn.conv": torch.backends.mkldnn.conv,
    "mkldnn.rnn": torch.backends.mkldnn.rnn,
}
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # backends of torch.backends.cuda


# --------------------------------------------------------------------------- the plugin


def start(threads: int) -> None:
    """Prepare this process before any test."""
    cut_network()
    sync_nothing()
    saving.LAST_RETRY_SECONDS = 0.0  # a last save that fails is not tried again
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests if there is no GPU."""
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Note the global settings before any fixture."""
    item.stash[BEFORE] = read_settings()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Restore the global settings after all fixtures; fail a test that left one changed."""
    try:
        result = yield
    finally:
        changed = restore_settings(item.stash[BEFORE])
    if changed:
        pytest.fail("\n".join(["global settings were left changed", *changed]), pytrace=False)
    return result


# --------------------------------------------------------------------------- network


def is_here(host: Any) -> bool:
    """Return whether an address or a name is this machine."""
    try:
        address = ip_address(str(host).partition("%")[0])
    except ValueError:
        return host is None or host in LOOPBACK_NAMES
    return address.is_loopback or address.is_unspecified


def cut_network() -> None:
    """Let sockets of this process reach only this machine; others raise network errors."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    getaddrinfo = socket.getaddrinfo

    def outside(sock: socket.socket, address: Any) -> bool:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and not is_here(address[0])

    def guarded_connect(sock: socket.socket, address: Any) -> None:
        if outside(sock, address):
            raise OSError(101, f"Network is unreachable: tests must not connect to {address}")
        connect(sock, address)

    def guarded_connect_ex(sock: socket.socket, address: Any) -> int:
        return 101 if outside(sock, address) else connect_ex(sock, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        if not is_here(host.decode() if isinstance(host, bytes) else host):
            message = f"Temporary failure in name resolution: tests must not look up {host!r}"
            raise socket.gaierror(socket.EAI_AGAIN, message)
        return getaddrinfo(host, *args, **options)

    socket.socket.connect = guarded_connect  # type: ignore[method-assign,assignment]
    socket.socket.connect_ex = guarded_connect_ex  # type: ignore[method-assign,assignment]
    socket.getaddrinfo = guarded_getaddrinfo


# --------------------------------------------------------------------------- disk


def sync_nothing() -> None:
    """Make syncs do nothing: they take half of the time of tests that prepare data.

    Written data survives a kill without a sync, and no test cuts the power.
    """
    connect = sqlite3.connect

    def connect_unsynced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        with contextlib.suppress(sqlite3.DatabaseError):  # not a database
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    os.fsync = lambda _: None
    sqlite3.connect = connect_unsynced  # type: ignore[assignment]


# --------------------------------------------------------------------------- global settings


def flushes_denormals() -> bool:
    """Return the setting by an experiment: torch has no function that reads it."""
    return sys.float_info.min / 2 == 0.0


def environ() -> dict[str, str]:
    """Return all variables, except internal ones of pytest, torch.compile and scikit-learn."""
    own = (TEST_VARIABLE, "_TORCHINDUCTOR", "TRITON_", "KMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def import_paths() -> list[str]:
    """Return `sys.path` without the entries of setuptools, which torch.compile imports."""
    return [path for path in sys.path if not path.endswith("setuptools/_vendor")]


def set_environ(variables: dict[str, str]) -> None:
    for name in environ().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def matmul_precision() -> str:
    """Return the setting; None if a backend has a value that torch cannot express."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def fp32_precision() -> dict[str, str]:
    return {name: backend.fp32_precision for name, backend in FP32_PRECISION.items()}


def set_fp32_precision(precisions: dict[str, str]) -> None:
    for name, precision in precisions.items():
        FP32_PRECISION[name].fp32_precision = precision


def attention_backends() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION}


def set_attention_backends(enabled: dict[str, bool]) -> None:
    for name, on in enabled.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def set_deterministic(mode: int) -> None:
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


Setting = tuple[Callable[[], Any], Callable[[Any], object]]
SETTINGS: dict[str, Setting] = {
    "float32 matmul precision": (matmul_precision, torch.set_float32_matmul_precision),
    "fp32_precision of the backends": (fp32_precision, set_fp32_precision),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "attention backends": (attention_backends, set_attention_backends),
    "deterministic mode": (torch.get_deterministic_debug_mode, set_deterministic),
    "flush denormal": (flushes_denormals, torch.set_flush_denormal),
    "gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "environment": (environ, set_environ),
    "working directory": (Path.cwd, os.chdir),
    "sys.path": (import_paths, lambda paths: sys.path.__setitem__(slice(None), paths)),
    "socket timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}


def read_settings() -> dict[str, Any]:
    """Return every global setting by name."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def restore_settings(before: dict[str, Any]) -> list[str]:
    """Restore global settings; return the changed ones with both values."""
    now = read_settings()  # read all before writing any: some affect others
    changed = [name for name in SETTINGS if now[name] != before[name]]
    for name in changed:
        SETTINGS[name][1](before[name])
    return [f"{name}: {difference(before[name], now[name])}" for name in changed]


def difference(before: Any, now: Any) -> str:
    """Return both values; for dictionaries only the entries that differ."""
    if isinstance(before, dict):
        names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        return ", ".join(f"{n} {before.get(n)!r} -> {now.get(n)!r}" for n in names)
    return f"{before!r} -> {now!r}"


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Restore global settings afterwards."""
    before = read_settings()
    try:
        yield
    finally:
        restore_settings(before)
