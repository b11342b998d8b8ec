"""Ports for the processes of tests."""

import contextlib
import secrets
import socket


def free_port() -> int:
    """Return a port that nobody listens on.

    It is below the ports that systems give to clients and to listeners on port 0, so no other
    process of the tests is likely to take it before the caller listens.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
