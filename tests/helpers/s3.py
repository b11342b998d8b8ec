"""An S3 server on the loopback address: moto, which fails as a test asks.

`with S3Server() as s3:` serves moto from a thread and makes the bucket `bucket`; `s3.environment`
points clients to it. `s3.fail("flip", "run/.*/model")` spoils the answers to requests whose path
matches; `s3.heal()` ends all faults. `put` and `names` meet no faults. Tests that use it skip if
moto or s3fs is missing: `require_s3()`.

    refuse   answer `status`, and do not pass the request on
    flip     flip one bit in the middle of the body; its headers stay
    hang     answer nothing until `heal()` or the end
"""

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

HOST = "127.0.0.1"
BUCKET = "bucket"
Mode = Literal["refuse", "flip", "hang"]


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
    """moto as a WSGI application, and the faults before it."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                """Log nothing."""

        self.moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server(HOST, 0, self, threaded=True, request_handler=Quiet)
        self.server.daemon_threads = True  # a request may hang
        self.server.block_on_close = False
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.healed = threading.Event()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> "S3Server":
        from moto.s3.models import s3_backends

        self.contents = s3_backends["123456789012"]["aws"]  # moto's account
        self.contents.reset()
        self.contents.create_bucket(BUCKET, "us-east-1")
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.heal()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that point clients to the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://{HOST}:{self.server.port}",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def point_at(self, patch: pytest.MonkeyPatch) -> None:
        """Let s3fs of this process use the server."""
        from s3fs import S3FileSystem

        for name, value in self.environment.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # it keeps its clients, with their addresses

    def put(self, name: str, content: bytes) -> None:
        """Write an object into the bucket."""
        self.contents.put_object(BUCKET, name, content)

    def names(self) -> list[str]:
        """Return the keys in the bucket, sorted."""
        return sorted(self.contents.buckets[BUCKET].keys)

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
        """Return the fault of a request."""
        with self.lock:
            for fault in self.faults:
                matches = fault.path.search(path) and re.fullmatch(fault.method, method)
                if matches and fault.left != 0:
                    fault.left = None if fault.left is None else fault.left - 1
                    return fault
        return None

    def __call__(self, request: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, as WSGI asks."""
        fault = self.find_fault(request["REQUEST_METHOD"], request["PATH_INFO"])
        if fault and fault.mode == "hang":
            self.healed.wait()
        if fault and fault.mode != "flip":
            text = (
                b"<Error><Code>AccessDenied</Code><Message>AccessDenied of a test</Message></Error>"
            )
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
            answer(f"{fault.status} of a test", headers)
            return [text]
        content = b"".join(self.moto(request, answer))
        if fault and content:
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            content = content[:middle] + flipped + content[middle + 1 :]
        return [content]
