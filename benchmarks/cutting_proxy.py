"""An S3 server on the loopback address, and a proxy before it that cuts connections.

    python benchmarks/cutting_proxy.py server
    python benchmarks/cutting_proxy.py proxy PORT --log FILE [--cut 0.1] [--seed 1]
    python benchmarks/cutting_proxy.py check [--cut 0.1] [--seed 1]

`server` serves moto. `proxy` passes requests on to the server at PORT, and cuts the connection of
a share of them at a random place:

    before   nothing is passed on
    body     in the middle of the request's body, which never arrives whole
    after    the server has carried the request out, and none of its answer comes back
    answer   in the middle of the answer

Both print their port and run until they are killed. The proxy writes two JSON lines a request to
FILE: a `begin` when its head has arrived, an `end` when it is over. `who` is the access key that
signed it, so each client is told by a key. Times are seconds of `time.monotonic()`.

`check` copies files through both with s3fs, and exits with code 1 if one differs, or if a kind of
cut never happened.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HOST = "127.0.0.1"
BUCKET = "bucket"
PLACES = ("before", "body", "after", "answer")
LARGEST_HEAD = 2**20  # bytes
CHECK_FILES = 60
CHECK_BYTES = 300_000  # of the largest file of `check`
Headers = dict[str, str]


def main() -> None:
    """Serve, pass on, or check both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("server", "proxy", "check"))
    parser.add_argument("port", type=int, nargs="?", help="of the server, for proxy")
    parser.add_argument("--log", type=Path, help="file for a line at a request's begin and end")
    parser.add_argument("--cut", type=float, default=0.1, help="share of requests")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.part == "server":
        serve_moto()
    elif args.part == "proxy":
        asyncio.run(Proxy(args.port, args.log, args.cut, args.seed).serve())
    elif not check(args.cut, args.seed):
        sys.exit(1)


def serve_moto() -> None:
    """Serve moto with an empty bucket `bucket` at a free port, which is printed."""
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            """Log nothing."""

    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")  # moto's account
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(HOST, 0, application, threaded=True, request_handler=Quiet)
    print(server.port, flush=True)
    server.serve_forever()


# --------------------------------------------------------------------------- the proxy


class Proxy:
    """Pass requests on to a server, and cut a share of them."""

    def __init__(self, port: int, log: Path, cut: float, seed: int) -> None:
        self.port = port
        self.cut = cut
        self.chance = random.Random(seed)
        self.numbers = itertools.count(1)
        self.log = log.open("a", buffering=1, encoding="utf-8")

    async def serve(self) -> None:
        """Listen at a free port, which is printed."""
        server = await asyncio.start_server(self.connect, HOST, 0, limit=LARGEST_HEAD)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on the requests of a connection until one side closes it, or it is cut."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self.exchange(reader, writer):
                pass
        writer.close()

    def tell(self, number: int, event: str, **more: object) -> None:
        """Write a line of the log."""
        line = {"id": number, "event": event, "time": time.monotonic(), **more}
        self.log.write(json.dumps(line) + "\n")

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass on a request and its answer; return whether the connection stays open."""
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        method, target, _ = first.split(" ", 2)
        path, _, query = target.partition("?")
        who = re.search("Credential=([^/]+)/", headers.get("authorization", ""))
        number = next(self.numbers)
        self.tell(
            number,
            "begin",
            who=who[1] if who else "",
            method=method,
            path=unquote(path),
            query=query,
        )
        length = int(headers.get("content-length", 0))
        place = None
        if self.chance.random() < self.cut:
            places = [one for one in PLACES if length or one != "body"]
            place = self.chance.choice(places)
        end: dict[str, Any] = {"cut": place, "status": None, "received": 0, "sent": 0}
        try:
            if place == "before":
                writer.transport.abort()
                return False
            if headers.pop("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            headers["connection"] = "close"  # so that the end of the answer is the end of the file
            passed = int(length * self.chance.random()) if place == "body" else length
            body = await reader.readexactly(passed)
            if place != "body" and headers.get("transfer-encoding", "").lower() == "chunked":
                body = await read_chunked(reader)
            end["received"] = len(body)
            answer = await self.ask(write_head(first, headers) + body, whole=place != "body")
            if place == "body":
                writer.transport.abort()
                return False
            status, answer = keep_alive(answer, method)
            end["status"] = status
            if place == "after":
                writer.transport.abort()
                return False
            if place == "answer":
                answer = answer[: self.chance.randrange(1, len(answer))]
            writer.write(answer)
            await writer.drain()
            end["sent"] = len(answer)
            return place is None
        finally:
            self.tell(number, "end", **end)

    async def ask(self, request: bytes, whole: bool) -> bytes:
        """Send a request to the server and return the answer; b"" if the request is not whole."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read() if whole else b""
        finally:
            writer.close()


def parse_head(head: bytes) -> tuple[str, Headers]:
    """Return the first line of a request or answer, and its headers by lower-case names."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return first, {name.lower(): value.strip() for name, value in pairs}


def write_head(first: str, headers: Mapping[str, str]) -> bytes:
    """Return the first line and the headers as they are sent."""
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    """Read a body in chunks as it is written: with their sizes and the trailers."""
    read = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        read += line
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            break
        read += await reader.readexactly(size + 2)
    while line != b"\r\n":
        line = await reader.readuntil(b"\r\n")
        read += line
    return read


def keep_alive(answer: bytes, method: str) -> tuple[int, bytes]:
    """Return the status of an answer, and the answer for a connection that stays open.

    Raises `ConnectionError` if the server closed the connection without one.
    """
    head, mark, body = answer.partition(b"\r\n\r\n")
    if not mark:
        raise ConnectionError("the server gave no answer")
    first, headers = parse_head(head)
    headers["connection"] = "keep-alive"
    status = int(first.split(" ")[1])
    has_end = "content-length" in headers or "transfer-encoding" in headers
    if not has_end and method != "HEAD" and status not in (204, 304):
        headers["content-length"] = str(len(body))
    return status, write_head(first, headers) + body


# --------------------------------------------------------------------------- both, for a script


@dataclass
class Request:
    """A request that reached the proxy; `end` is None while it is in progress."""

    who: str
    method: str
    path: str
    query: str
    begin: float
    end: float | None = None
    cut: str | None = None
    status: int | None = None
    received: int = 0
    sent: int = 0

    @property
    def took_effect(self) -> bool:
        """Return whether the server carried the request out."""
        return self.status is not None and self.status < 300


class CutS3:
    """The server and the proxy as processes; `requests` has what the proxy saw so far."""

    def __init__(self, log: Path, cut: float, seed: int) -> None:
        self.log = log
        self.cut = cut
        self.log.touch()
        self.place = 0  # bytes of the log that were read
        self.by_number: dict[int, Request] = {}
        self.processes: list[subprocess.Popen[str]] = []
        self.server_port = self.start("server")
        words = ["proxy", str(self.server_port), "--log", str(log)]
        self.port = self.start(*words, "--cut", str(cut), "--seed", str(seed))

    def start(self, *words: str) -> int:
        """Start a part in a session of its own; return its port."""
        process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    def close(self) -> None:
        """Kill both."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def environment(self, who: str) -> dict[str, str]:
        """Return the variables that point a client to the proxy; `who`: its name in the log."""
        return {
            "AWS_ENDPOINT_URL": f"http://{HOST}:{self.port}",
            "AWS_ACCESS_KEY_ID": who,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def open(self, port: int, who: str) -> Any:
        """Return a file system of s3fs at a port: `port`, or `server_port` to meet no cuts."""
        from s3fs import S3FileSystem

        return S3FileSystem(
            key=who,
            secret="secret",
            endpoint_url=f"http://{HOST}:{port}",
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def requests(self) -> list[Request]:
        """Return all requests so far, in the order of their begins."""
        with self.log.open("rb") as file:
            file.seek(self.place)
            written = file.read()
        written = written[: written.rfind(b"\n") + 1]
        self.place += len(written)
        for line in map(json.loads, written.splitlines()):
            number, event, moment = line.pop("id"), line.pop("event"), line.pop("time")
            if event == "begin":
                self.by_number[number] = Request(begin=moment, **line)
            else:
                request = self.by_number[number]
                request.end = moment
                for key, value in line.items():
                    setattr(request, key, value)
        return list(self.by_number.values())


@contextlib.contextmanager
def cut_s3(log: Path, cut: float, seed: int) -> Iterator[CutS3]:
    """Run the server and the proxy, with an empty bucket `bucket`."""
    s3 = CutS3(log, cut, seed)
    try:
        yield s3
    finally:
        s3.close()


# --------------------------------------------------------------------------- a check of both


def check(cut: float, seed: int) -> bool:
    """Copy files through the proxy and back; print what was cut, and return whether all is well."""
    chance = random.Random(seed)
    errors = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, cut_s3(Path(folder, "log"), cut, seed) as s3:
        through = s3.open(s3.port, "check")
        contents = {
            f"{BUCKET}/file_{number}": chance.randbytes(int(CHECK_BYTES * chance.random() ** 3))
            for number in range(CHECK_FILES)
        }
        for name, content in contents.items():
            until_done(lambda n=name, c=content: through.pipe_file(n, c), errors)
        stored = s3.open(s3.server_port, "owner")
        same = {name: stored.cat_file(name) for name in contents} == contents
        fetched = {n: until_done(lambda n=n: through.cat_file(n), errors) for n in contents}
        listed = until_done(lambda: through.ls(BUCKET, detail=False), errors)
        requests = s3.requests()
    cuts = Counter(one.cut for one in requests if one.cut)
    halves = [one.path for one in requests if one.cut == "body" and one.took_effect]
    print(f"{len(requests)} requests, cut: {dict(cuts)}; errors of s3fs: {dict(errors)}")
    print(f"stored as sent: {same}; fetched as sent: {fetched == contents}")
    well = same and fetched == contents and sorted(listed) == sorted(contents) and not halves
    return well and set(cuts) == set(PLACES)


def until_done(work: Any, errors: Counter[str]) -> Any:
    """Repeat what s3fs gives up on; count its errors."""
    while True:
        try:
            return work()
        except Exception as error:
            errors[f"{type(error).__name__}: {error}"[:100]] += 1


if __name__ == "__main__":
    main()
