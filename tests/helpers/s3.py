"""An S3 server on the loopback address: moto, behind a proxy that fails as a test asks.

`with S3Server() as s3:` starts moto as a child process and makes the bucket `bucket`. Clients reach
it through the proxy, at the address in `s3.environment`. `s3.fail("flip", "run/.*/model")` spoils
the answers to requests whose path matches; `s3.heal()` ends all faults. `files`, `put` and `remove`
do not go through the proxy. Tests that use it skip if moto or s3fs is missing: `require_s3()`.

    refuse   answer `status` (default 503), and do not pass the request on
    cut      send half of the body, then close the connection
    slow     send the body at 2,000 bytes a second
    flip     flip one bit in the middle of the body; its headers stay
    hang     answer nothing until `heal()` or the end
"""

import contextlib
import http.client
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import quote, unquote
from xml.etree import ElementTree

import pytest

from tests.helpers.ports import free_port

HOST = "127.0.0.1"
BUCKET = "bucket"
START_SECONDS = 60.0
SLOW_PIECE_BYTES = 200
SLOW_PIECE_SECONDS = 0.1
NOT_FORWARDED = ("connection", "transfer-encoding", "server", "date")
REFUSALS = {403: "AccessDenied", 404: "NoSuchKey", 503: "SlowDown", 507: "StorageFull"}
# moto lets nobody without a signature remove an object; it does not check one
SIGNED = "AWS4-HMAC-SHA256 Credential=tester/20260101/us-east-1/s3/aws4_request"
Mode = Literal["refuse", "cut", "slow", "flip", "hang"]


def require_s3() -> None:
    """Skip the test if moto's server or s3fs is not installed."""
    for package in ("moto.server", "flask_cors", "s3fs"):
        pytest.importorskip(package)


@dataclass
class Fault:
    """What happens to matching requests; `left` counts how many more, None means all."""

    mode: Mode
    path: re.Pattern[str]
    method: str
    status: int
    left: int | None


class S3Server:
    """moto, and the proxy before it. `requests` are (method, path without query) in order."""

    def __init__(self) -> None:
        self.moto_port = free_port()
        self.proxy = ProxyServer((HOST, 0), ProxyHandler)
        self.proxy.s3 = self
        self.url = f"http://{HOST}:{self.proxy.server_address[1]}"
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.healed = threading.Event()
        self.thread = threading.Thread(target=self.proxy.serve_forever, args=(0.01,))
        self.moto: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "S3Server":
        self.moto = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.moto_port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.thread.start()
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.ask("PUT", f"/{BUCKET}")
                return self
            if self.moto.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError("moto did not start")
            time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop both servers: clients are refused the connection."""
        self.heal()
        if self.thread.is_alive():
            self.proxy.shutdown()
            self.thread.join()
            self.proxy.server_close()
        if self.moto:
            self.moto.kill()
            self.moto.wait()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that point clients to the proxy."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def point_at(self, patch: pytest.MonkeyPatch) -> None:
        """Let s3fs of this process use the proxy."""
        for name, value in self.environment.items():
            patch.setenv(name, value)
        forget_clients()

    # ----------------------------------------------------------------------- faults

    def fail(
        self,
        mode: Mode,
        path: str = "",
        method: str = "GET|HEAD|PUT|POST|DELETE",
        status: int = 503,
        times: int | None = None,
    ) -> None:
        """Spoil the answers to requests whose path (`/bucket/key`) and `method` match."""
        with self.lock:
            self.healed.clear()
            self.faults.append(Fault(mode, re.compile(path), method, status, times))

    def heal(self) -> None:
        """End all faults."""
        with self.lock:
            self.faults.clear()
            self.healed.set()

    def find_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of a request, and note the request."""
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                matches = fault.path.search(path) and re.fullmatch(fault.method, method)
                if matches and fault.left != 0:
                    fault.left = None if fault.left is None else fault.left - 1
                    return fault
        return None

    # ----------------------------------------------------------------------- contents

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request to moto itself; return the body of its answer."""
        connection = http.client.HTTPConnection(HOST, self.moto_port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Authorization": SIGNED})
            answer = connection.getresponse()
            content = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content!r}")
        return content

    def names(self) -> list[str]:
        """Return the keys in the bucket, sorted; the server lists 1,000 at most."""
        listing = ElementTree.fromstring(self.ask("GET", f"/{BUCKET}?list-type=2"))
        return sorted(key.text or "" for key in listing.iter() if key.tag.endswith("}Key"))

    def files(self) -> dict[str, bytes]:
        """Return all objects in the bucket by key."""
        return {name: self.ask("GET", f"/{BUCKET}/{quote(name)}") for name in self.names()}

    def put(self, name: str, content: bytes) -> None:
        """Write an object into the bucket."""
        self.ask("PUT", f"/{BUCKET}/{quote(name)}", content)

    def remove(self, name: str) -> None:
        """Remove an object from the bucket."""
        self.ask("DELETE", f"/{BUCKET}/{quote(name)}")


def forget_clients() -> None:
    """Let s3fs read the environment anew: it keeps its clients, with their addresses."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


# --------------------------------------------------------------------------- the proxy


class ProxyServer(ThreadingHTTPServer):
    """The server of `S3Server.proxy`."""

    daemon_threads = True
    block_on_close = False
    s3: S3Server

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that hang up."""


class ProxyHandler(BaseHTTPRequestHandler):
    """Pass a request on to moto, and its answer back; or spoil it."""

    protocol_version = "HTTP/1.1"
    server: ProxyServer

    def handle_request(self) -> None:
        """Answer a request of any method."""
        path = unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.s3.find_fault(self.command, path)
        if fault and fault.mode == "hang":
            self.server.s3.healed.wait()
            self.close_connection = True
            return
        if fault and fault.mode == "refuse":
            name = REFUSALS.get(fault.status, "InternalError")
            text = f"<Error><Code>{name}</Code><Message>{name} of a test</Message></Error>"
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
            self.answer(fault.status, headers, text.encode())
            return
        status, headers, content = self.ask_moto(body)
        if fault is None or not content:
            self.answer(status, headers, content)
        elif fault.mode == "flip":
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            self.answer(status, headers, content[:middle] + flipped + content[middle + 1 :])
        elif fault.mode == "cut":
            self.answer(status, headers, content[: len(content) // 2])
            self.close_connection = True
        else:
            self.answer(status, headers, b"")
            for start in range(0, len(content), SLOW_PIECE_BYTES):
                self.wfile.write(content[start : start + SLOW_PIECE_BYTES])
                self.server.s3.healed.wait(SLOW_PIECE_SECONDS)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def ask_moto(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of moto's answer."""
        connection = http.client.HTTPConnection(HOST, self.server.s3.moto_port, timeout=60)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
        headers = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in NOT_FORWARDED
        ]
        names = {name.lower() for name, _ in headers}
        if self.command != "HEAD" and "content-length" not in names:
            headers.append(("Content-Length", str(len(content))))
        return answer.status, headers, content

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        """Send an answer; `content` may be less than the headers say."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base names it
        """Log nothing."""
