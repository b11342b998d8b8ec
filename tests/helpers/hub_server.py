"""A Hugging Face Hub on the loopback address, for the real `huggingface_hub` client.

`with HubServer() as hub:` keeps models and data sets, named `user/name`, in memory, answers the
requests that push and load them, and fails as the test asks. A client that has hf_xet
uses it without asking what the server offers, so HF_HUB_DISABLE_XET must be set: `point_at`
does that for this process, `environment` for another one.
"""

import base64
import hashlib
import importlib
import json
import re
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import yaml

LFS = re.compile(r"\.(safetensors|bin|npy|png|pkl)$|tfevents")
API, REVISION = r"/api/(?:models|datasets)/(?P<name>[^/]+/[^/]+)", "(?P<revision>[^/]+)"
ROUTES = (  # method, path, method of Handler; all but GET and /storage/ need the token
    ("GET", rf"{API}(?:/revision/{REVISION})?", "info"),
    ("GET", rf"{API}/tree/{REVISION}(?:/(?P<folder>.+))?", "tree"),
    ("GET", rf"{API}/refs", "refs"),
    ("GET", rf"/(?:datasets/)?(?P<name>[^/]+/[^/]+)/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("POST", "/api/repos/create", "create_repo"),
    ("POST", rf"{API}/preupload/{REVISION}", "preupload"),
    ("POST", rf"{API}/commit/{REVISION}", "commit"),
    ("POST", rf"{API}/tag/{REVISION}", "create_tag"),
    ("POST", r"/(?:datasets/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", r"/(?:datasets/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/verify", "lfs_verify"),
    ("PUT", r"/storage/(?P<name>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
)
Files = dict[str, bytes]
Reply = tuple[int, Any, dict[str, str]]  # status, body (bytes, or what becomes JSON), headers


class Refusal(Exception):
    """An error of the Hub; `code` is its X-Error-Code, if any."""

    def __init__(self, status: int, message: str, code: str = "", **more: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = status, {"error": message, **more}, headers


def oid(path: str, data: bytes) -> str:
    """Return the id that the client compares its file with: LFS's or git's."""
    if LFS.search(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """A repo with the branch main: files by commit id, titles of commits, ids of tags."""

    private: bool = False
    files: dict[str, Files] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)  # newest last
    head: str = ""  # of main
    tags: dict[str, str] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)  # LFS objects by SHA-256

    def find(self, revision: str) -> str:
        """Return the commit id of main, a tag or a commit id."""
        found = self.head if revision == "main" else self.tags.get(revision, revision)
        if found not in self.files:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def commit(self, title: str, files: Files) -> None:
        """Add a commit with exactly these files to main."""
        self.titles.append(title)
        self.head = hashlib.sha1(json.dumps(self.titles).encode()).hexdigest()
        self.files[self.head] = files


class HubServer:
    """A server with repos, write tokens, a record of requests, and planned faults.

    `requests` are (method, path without query) in order; `lfs_uploads` are (SHA-256, bytes) of
    every object that arrived whole; `upload_delay` is in seconds, for each object.
    """

    def __init__(self) -> None:
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.token = "hf_" + "t" * 34
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.lfs_uploads: list[tuple[str, int]] = []
        self.upload_delay, self.refused = 0.0, 0
        self.drops: list[int] = []
        self.failures: list[tuple[int, str]] = []
        self.lock = threading.RLock()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> "HubServer":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop: end connections and reject new ones."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()
            for connection in list(self.server.connections):
                self.server.shutdown_request(connection)

    # ----------------------------------------------------------------------- contents

    def create(self, name: str, private: bool = False) -> Repo:
        """Create a repo with the file and the commit that the Hub starts with."""
        made = self.repos[name] = Repo(private)
        made.commit("initial commit", {".gitattributes": b"*.bin -text\n"})
        return made

    def add(self, repo: str, files: Mapping[str, bytes]) -> None:
        """Commit files to main; create the repo if it is missing."""
        there = self.repos.get(repo) or self.create(repo)
        there.commit("Add files", there.files[there.head] | dict(files))

    def files(self, repo: str, revision: str = "main") -> Files:
        """Return all files except the `.gitattributes` that the Hub creates."""
        there = self.repos[repo]
        found = there.files[there.find(revision)]
        return {path: data for path, data in found.items() if path != ".gitattributes"}

    def commits(self, repo: str) -> list[str]:
        """Return the titles on main, newest first; the last is the Hub's `initial commit`."""
        return self.repos[repo].titles[::-1]

    def tags(self, repo: str) -> dict[str, str]:
        """Return the commit ids of tags."""
        return dict(self.repos[repo].tags)

    # ----------------------------------------------------------------------- faults

    def drop_next_upload(self, after_bytes: int, times: int = 1) -> None:
        """Hang up after `after_bytes` bytes of the next LFS uploads."""
        self.drops += [after_bytes] * times

    def fail_next(self, status: int, times: int, containing: str = "") -> None:
        """Answer the next requests whose path contains the text with this status.

        Status 0 does the request and hangs up without an answer.
        """
        self.failures += [(status, containing)] * times

    def refuse(self, status: int) -> None:
        """Answer writes with 401 (wrong token) or 403 (read-only token); 0 ends that."""
        self.refused = status


class Server(ThreadingHTTPServer):
    """Keeps its connections, to end them with the server."""

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
        """Ignore clients that hang up; raise bugs of this server."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection; the methods that ROUTES names return the reply."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""

    def handle_any(self) -> None:
        hub, path = self.server.hub, unquote(self.path.partition("?")[0])
        upload = self.command == "PUT"
        with hub.lock:
            hub.requests.append((self.command, path))
            due = [i for i, (_, text) in enumerate(hub.failures) if text in path]
            status = hub.failures.pop(due[0])[0] if due else None
            drop = hub.drops.pop(0) if upload and hub.drops and not status else None
        self.body = self.receive(drop, hub.upload_delay if upload else 0.0)
        if status:
            self.respond(status, {"error": f"The test asked for {status}"}, {})
        elif drop is None:
            with hub.lock:
                reply = self.answer(path)
            if status is None:
                self.respond(*reply)
        if status == 0 or drop is not None:  # hang up
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def receive(self, drop: int | None, seconds: float) -> bytes:
        """Read the body, or a number of its bytes, over a number of seconds."""
        size, pieces = int(self.headers.get("Content-Length") or 0), []
        left = size if drop is None else min(size, drop)
        while left:
            pieces.append(self.rfile.read(min(left, 1 << 16)))
            if not pieces[-1]:
                raise ConnectionResetError("the client hung up")
            left -= len(pieces[-1])
            time.sleep(seconds * len(pieces[-1]) / size)
        return b"".join(pieces)

    def respond(self, status: int, body: Any, headers: Mapping[str, str]) -> None:
        """Send bytes, or any other value as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        self.send_response(status)
        sizes = {"Content-Length": str(len(data)), "Content-Type": kind}
        for name, value in {**sizes, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer(self, path: str) -> Reply:
        """Return the reply to a request, or to its error."""
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for verb, pattern, answer in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and verb == method:
                    named = {key: value for key, value in match.groupdict().items() if value}
                    self.name = named.pop("name", "")
                    if verb != "PUT":  # an upload address needs no token
                        self.admit(writes=verb != "GET")
                    reply: Reply = getattr(self, answer)(**named)
                    return reply
            raise Refusal(404, f"The test Hub does not know {method} {path}.")
        except Refusal as error:
            return error.reply

    def admit(self, writes: bool) -> None:
        """Reject requests without permission, and unknown repos."""
        hub, token = self.server.hub, self.headers.get("Authorization", "").removeprefix("Bearer ")
        if writes and hub.refused:
            raise Refusal(hub.refused, "Forbidden: you must use a write token to upload.")
        if token not in (hub.token, "") or (writes and not token):
            raise Refusal(401, "Invalid credentials in Authorization header")
        there = hub.repos.get(self.name)
        if self.name and (not there or (there.private and not token)):
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")

    @property
    def repo(self) -> Repo:
        return self.server.hub.repos[self.name]

    @property
    def given(self) -> Any:
        return json.loads(self.body)

    # ----------------------------------------------------------------------- reading

    def info(self, revision: str = "main") -> Reply:
        made = self.repo.find(revision)
        siblings = [{"rfilename": path} for path in self.repo.files[made]]
        reply = {"id": self.name, "sha": made, "private": self.repo.private, "tags": []}
        return 200, {**reply, "downloads": 0, "likes": 0, "siblings": siblings}, {}

    def entries(self, revision: str) -> dict[str, dict[str, Any]]:
        """Return the Hub's entry of each file and folder, by path."""
        found: dict[str, dict[str, Any]] = {}
        for path, data in sorted(self.repo.files[self.repo.find(revision)].items()):
            for parent in PurePosixPath(path).parents[:-1]:
                found[str(parent)] = {"type": "directory", "path": str(parent), "oid": "0" * 40}
            found[path] = {"type": "file", "path": path, "size": len(data), "oid": oid(path, data)}
            if LFS.search(path):
                lfs = {"oid": oid(path, data), "size": len(data), "pointerSize": 130}
                found[path]["lfs"] = lfs
        return found

    def tree(self, revision: str, folder: str = "") -> Reply:
        """Return the files and folders in a folder, or all files below it."""
        query = parse_qs(self.path.partition("?")[2])
        recursive = query.get("recursive", [""])[0].lower() == "true"
        found = []
        for path, entry in self.entries(revision).items():
            parents = [str(parent) for parent in PurePosixPath(path).parents]
            inside = (folder or ".") in (parents if recursive else parents[:1])
            if inside and not (recursive and entry["type"] == "directory"):
                found.append(entry)
        if folder and not found:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        return 200, found, {}

    def refs(self) -> Reply:
        tags = [
            {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit}
            for name, commit in self.repo.tags.items()
        ]
        return 200, {"branches": [], "tags": tags, "converts": [], "pullRequests": []}, {}

    def resolve(self, revision: str, path: str) -> Reply:
        made = self.repo.find(revision)
        data = self.repo.files[made].get(path)
        if data is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        headers = {"ETag": f'"{oid(path, data)}"', "X-Repo-Commit": made}
        if LFS.search(path):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and data:
            first = int(wanted[1])
            last = min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return 206, data[first : last + 1], headers
        return 200, data, headers

    # ----------------------------------------------------------------------- writing

    def validate_yaml(self) -> Reply:
        """Check the metadata of a model card: the Hub rejects anything but a mapping."""
        found = re.match(r"---\n(.*?)\n---\n", self.given["content"], re.DOTALL)
        good = found and isinstance(yaml.safe_load(found[1]), dict)
        errors = [] if good else [{"message": "metadata must be a mapping"}]
        return 400 if errors else 200, {"errors": errors, "warnings": []}, {}

    def create_repo(self) -> Reply:
        hub, given = self.server.hub, self.given
        name = f"{given.get('organization', 'tester')}/{given['name']}"
        url = f"{hub.url}/{name}"
        if name in hub.repos:
            raise Refusal(409, f"You already created this model repo: {name}", url=url)
        hub.create(name, given.get("visibility") == "private" or given.get("private", False))
        return 200, {"url": url, "name": name}, {}

    def preupload(self, revision: str) -> Reply:
        there = self.repo.files[self.repo.find(revision)]
        reply: list[dict[str, Any]] = []
        for path in (file["path"] for file in self.given["files"]):
            mode = "lfs" if LFS.search(path) else "regular"
            reply.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
            if path in there:
                reply[-1]["oid"] = oid(path, there[path])
        return 200, {"files": reply}, {}

    def lfs_batch(self) -> Reply:
        objects, url = [], self.server.hub.url
        for wanted in self.given["objects"]:
            reply: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.repo.objects:
                upload = {"href": f"{url}/storage/{self.name}/{wanted['oid']}"}
                verify = {"href": f"{url}/{self.name}.git/info/lfs/verify"}
                reply["actions"] = {"upload": upload, "verify": verify}
            objects.append(reply)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        return 200, {"transfer": "basic", "objects": objects}, headers

    def lfs_upload(self, oid: str) -> Reply:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, f"These {len(self.body)} bytes are not the object {oid}")
        self.repo.objects[oid] = self.body
        self.server.hub.lfs_uploads.append((oid, len(self.body)))
        return 200, b"", {"ETag": f'"{oid}"'}

    def lfs_verify(self) -> Reply:
        assert len(self.repo.objects[self.given["oid"]]) == self.given["size"]
        return 200, {}, {}

    def commit(self, revision: str) -> Reply:
        assert revision == "main"
        repo, title = self.repo, ""
        files = dict(repo.files[repo.head])
        for line in self.body.splitlines():
            kind, value = (json.loads(line)[key] for key in ("key", "value"))
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit", repo.head) != repo.head:
                    raise Refusal(412, "A commit has happened since")
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = repo.objects[value["oid"]]
            elif kind == "deletedFolder":
                kept = {n: data for n, data in files.items() if not n.startswith(value["path"])}
                assert len(kept) < len(files)
                files = kept
            else:
                assert kind == "deletedFile"
                del files[value["path"]]
        repo.commit(title, files)
        url = f"{self.server.hub.url}/{self.name}/commit/{repo.head}"
        return 200, {"success": True, "commitOid": repo.head, "commitUrl": url}, {}

    def create_tag(self, revision: str) -> Reply:
        tag = self.given["tag"]
        if tag in self.repo.tags:
            raise Refusal(409, f"Reference already exists: {tag}")
        self.repo.tags[tag] = self.repo.find(revision)
        return 200, {}, {}


# --------------------------------------------------------------------------- the client


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    """Return variables for a process that uses this Hub, with an empty cache in `home`."""
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
    """Make the client of this process and its children use this Hub.

    The client reads its environment once, at import, so its constants are set too.
    """
    from huggingface_hub import HfFileSystem, close_session, constants, hf_api

    bars = importlib.import_module("huggingface_hub.utils.tqdm")  # a class has the same name

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
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # for create_repo() and similar functions
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    close_session()  # drop its connections and proxies
    HfFileSystem.clear_instance_cache()  # type: ignore[no-untyped-call]  # fsspec has no types
    # huggingface_hub's LFS upload calls its HTTP library in a deprecated way
    warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)


def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Remove the pauses from the client's retries; return the requested seconds."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    pauses: list[float] = []
    clock = types.SimpleNamespace(sleep=pauses.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return pauses
