"""A Hugging Face Hub on the loopback address, for the real `huggingface_hub` client.

`with HubServer() as hub:` serves what `hub_routes.py` answers, and fails as the test asks. A client
that has hf_xet uses it without asking what the server offers, so HF_HUB_DISABLE_XET must be set:
`point_at` does that for this process, `environment` for another one.
"""

import importlib
import json
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.hub_routes import Blob, Hub, Request, is_lfs


class HubServer(Hub):
    """The Hub, what was asked of it, and what goes wrong next.

    `requests` are (method, path without query) in order; `lfs_uploads` are (SHA-256, bytes) of
    every object that arrived whole; `upload_delay` is in seconds, for each object.
    """

    def __init__(self) -> None:
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.hub = self
        super().__init__(f"http://127.0.0.1:{self.server.server_address[1]}")
        self.requests: list[tuple[str, str]] = []
        self.upload_delay = 0.0
        self.drops: list[int] = []
        self.failures: list[tuple[int, str, dict[str, str]]] = []
        self.lock = threading.RLock()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> "HubServer":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Goes away: connections end and new ones are refused."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()
            for connection in list(self.server.connections):
                self.server.shutdown_request(connection)

    # ----------------------------------------------------------------------- contents

    def add(self, repo: str, files: Mapping[str, bytes], revision: str = "main") -> None:
        """Commits files to a branch; makes the repo and the branch where they are missing."""
        there = self.repos.get(repo) or self.create(repo)
        there.branch.setdefault(revision, there.branch["main"])
        blobs = {p: Blob(data, is_lfs(p, data[:512], len(data))) for p, data in files.items()}
        there.commit(revision, "Add files", {**there.at(revision).files, **blobs})

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """What was put there: all but the `.gitattributes` with which the Hub begins a repo."""
        found = self.repos[repo].at(revision).files
        return {path: blob.data for path, blob in found.items() if path != ".gitattributes"}

    def branches(self, repo: str) -> dict[str, str]:
        return dict(self.repos[repo].branch)

    def tags(self, repo: str) -> dict[str, str]:
        return dict(self.repos[repo].tag)

    def refs(self, repo: str) -> dict[str, str]:
        """Branches and tags -> commit ids."""
        return self.branches(repo) | self.tags(repo)

    def commits(self, repo: str, revision: str = "main") -> list[str]:
        """Titles, newest first; the last is the Hub's own `initial commit`."""
        there = self.repos[repo]
        return [there.all[made].title for made in there.at(revision).history]

    @property
    def private(self) -> dict[str, bool]:
        return {name: repo.private for name, repo in self.repos.items()}

    # ----------------------------------------------------------------------- faults

    def drop_next_upload(self, after_bytes: int, times: int = 1) -> None:
        """Hangs up after so many bytes of the next LFS uploads."""
        self.drops += [after_bytes] * times

    def fail_next(self, status: int, times: int, containing: str = "", **headers: str) -> None:
        """The next requests whose path contains the text get this status.

        0 does what was asked and hangs up without an answer. Headers as `Retry_After="3"`.
        """
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures += [(status, containing, named)] * times

    def refuse(self, status: int) -> None:
        """What writes gets 401 (a wrong token) or 403 (one that may only read); 0 ends it."""
        self.refused = status


class Server(ThreadingHTTPServer):
    """Knows its connections, so that they end with it."""

    daemon_threads = True
    block_on_close = False
    hub: HubServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests; a bug of this server is not."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        hub, (path, _, query) = self.server.hub, self.path.partition("?")
        fault, headers = self.fault(unquote(path))
        fails = fault not in (None, 0)
        body = self.receive(as_upload=self.command == "PUT" and not fails)
        if body is None:
            self.hang_up()
        elif fault:
            self.respond(fault, {"error": f"The test asked for {fault}"}, headers)
        else:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            with hub.lock:
                reply = hub.answer(Request(self.command, path, query, body, token))
            if fault is None:
                self.respond(*reply)
            else:
                self.hang_up()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def fault(self, path: str) -> tuple[int | None, dict[str, str]]:
        """Notes the request, and takes the failure that was ordered for it."""
        hub = self.server.hub
        with hub.lock:
            hub.requests.append((self.command, path))
            for i, (status, text, headers) in enumerate(hub.failures):
                if text in path:
                    del hub.failures[i]
                    return status, headers
        return None, {}

    def receive(self, as_upload: bool) -> bytes | None:
        """The body, read as slowly as the test asked; none where it asked for a part of it."""
        hub, size = self.server.hub, int(self.headers.get("Content-Length") or 0)
        with hub.lock:
            drop = hub.drops.pop(0) if as_upload and hub.drops else None
        left, pieces = size if drop is None else min(size, drop), []
        while left:
            pieces.append(self.rfile.read(min(left, 1 << 16)))
            if not pieces[-1]:
                raise ConnectionResetError("the client hung up")
            left -= len(pieces[-1])
            if as_upload:
                time.sleep(hub.upload_delay * len(pieces[-1]) / size)
        return b"".join(pieces) if drop is None else None

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def respond(self, status: int, body: Any, headers: Mapping[str, str]) -> None:
        """Sends a body of bytes, or anything else as JSON."""
        binary = isinstance(body, bytes)
        data = body if binary else json.dumps(body).encode()
        kind = "application/octet-stream" if binary else "application/json"
        self.send_response(status)
        told = {"Content-Length": str(len(data)), "Content-Type": kind}
        for name, value in {**told, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


# --------------------------------------------------------------------------- the client


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    """Variables for a process that talks to this Hub, with an empty cache in `home`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }


def point_at(monkeypatch: pytest.MonkeyPatch, hub: HubServer, home: Path) -> None:
    """Makes this process's client use this Hub, whoever calls it, and the processes it starts.

    The client reads its environment once, at import, so its constants are set too.
    """
    from huggingface_hub import close_session, constants, hf_api

    bars = importlib.import_module("huggingface_hub.utils.tqdm")  # there is a class of this name

    for name, value in environment(hub, home).items():
        monkeypatch.setenv(name, value)
    set_to: dict[str, Any] = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    for name, constant in set_to.items():
        monkeypatch.setattr(constants, name, constant)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # create_repo() and the like
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    close_session()  # its connections, and the proxies it was made with
    # huggingface_hub's LFS upload calls its HTTP library in a deprecated way
    warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)


def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Takes the pauses out of the client's retries; returns the seconds it asks for."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    pauses: list[float] = []
    clock = types.SimpleNamespace(sleep=pauses.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return pauses
