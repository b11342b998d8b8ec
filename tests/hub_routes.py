"""What a Hugging Face Hub holds and answers, in memory: `Hub().answer(Request(...))`.

Of models, named `user/name`, what pushing and loading them needs. `hub_server.py` serves it.
"""

import base64
import codecs
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, unquote

import yaml

LFS_NAMES = re.compile(r"\.(safetensors|bin|png|pkl|distcp)$|tfevents")
LFS_BYTES = 1_000_000  # larger files are LFS whatever they hold


class Refusal(Exception):
    """An error of the Hub; `code` is its X-Error-Code, where it has one."""

    def __init__(self, status: int, message: str, code: str = "", **more: Any) -> None:
        super().__init__(message)
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = (status, {"error": message, **more}, self.headers)


@dataclass(frozen=True)
class Blob:
    """A file's content, kept in git or in LFS."""

    data: bytes
    lfs: bool

    @cached_property
    def sha1(self) -> str:
        """The id of what git keeps."""
        kept = f"lfs pointer to {self.oid}".encode() if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @cached_property
    def oid(self) -> str:
        """What the client compares its own file with; also the ETag."""
        return hashlib.sha256(self.data).hexdigest() if self.lfs else self.sha1

    def entry(self, path: str) -> dict[str, Any]:
        """As a tree and as a model's `siblings` list it."""
        size = len(self.data)
        reply = {"type": "file", "path": path, "rfilename": path, "size": size}
        reply |= {"oid": self.sha1, "blobId": self.sha1}
        if self.lfs:
            reply["lfs"] = {"oid": self.oid, "sha256": self.oid, "size": size, "pointerSize": 130}
        return reply


@dataclass(frozen=True)
class Commit:
    """Every file of one moment; `history` are commit ids, from this one back."""

    title: str
    message: str
    files: Mapping[str, Blob]
    history: tuple[str, ...]


@dataclass
class Repo:
    """Commits by id, branches and tags that point at them, LFS objects by SHA-256."""

    private: bool = False
    all: dict[str, Commit] = field(default_factory=dict)
    branch: dict[str, str] = field(default_factory=dict)
    tag: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

    def find(self, revision: str) -> str:
        """The commit id of a branch, a tag or a commit id."""
        found = self.branch.get(revision) or self.tag.get(revision) or revision
        if found not in self.all:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def at(self, revision: str) -> Commit:
        """The commit of a branch, a tag or a commit id."""
        return self.all[self.find(revision)]

    def commit(self, branch: str, title: str, files: Mapping[str, Blob], message: str = "") -> str:
        """The id of a new commit with exactly these files."""
        before = self.at(branch).history if branch in self.branch else ()
        reply = [before, len(self.all), title, [(p, blob.oid) for p, blob in files.items()]]
        made = hashlib.sha1(json.dumps(reply).encode()).hexdigest()
        self.all[made] = Commit(title, message, dict(files), (made, *before))
        self.branch[branch] = made
        self.objects |= {blob.oid: blob.data for blob in files.values() if blob.lfs}
        return made


def is_lfs(path: str, sample: bytes, size: int) -> bool:
    """Whether the Hub keeps a file in LFS; `sample` are its first bytes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return True
    return bool(LFS_NAMES.search(path)) or size > LFS_BYTES or b"\0" in sample


# --------------------------------------------------------------------------- answers

DATE = "2026-01-01T00:00:00.000Z"
API = r"/api/models/(?P<name>[^/]+/[^/]+)"
WEB = r"/(?P<name>[^/]+/[^/]+?)"
REVISION = "/(?P<revision>[^/]+)"
ROUTES = (  # method, path, who may ask, method of Answers
    ("GET", "/api/whoami-v2", "writer", "whoami"),
    ("POST", "/api/validate-yaml", "anyone", "validate_yaml"),
    ("POST", "/api/repos/create", "writer", "create"),
    ("GET", f"{API}(/revision{REVISION})?", "reader", "info"),
    ("GET", f"{API}/tree{REVISION}(/(?P<path>.+))?", "reader", "tree"),
    ("GET", f"{API}/refs", "reader", "refs"),
    ("POST", f"{API}/preupload{REVISION}", "writer", "preupload"),
    ("POST", f"{API}/commit{REVISION}", "writer", "commit"),
    ("POST", f"{API}/branch/(?P<ref>[^/]+)", "writer", "create_branch"),
    ("POST", f"{API}/tag{REVISION}", "writer", "create_tag"),
    ("DELETE", f"{API}/tag/(?P<ref>[^/]+)", "writer", "delete_tag"),
    ("POST", rf"{WEB}\.git/info/lfs/objects/batch", "writer", "lfs_batch"),
    ("POST", rf"{WEB}\.git/info/lfs/verify", "writer", "lfs_verify"),
    ("PUT", f"/storage{WEB}/(?P<oid>[0-9a-f]{{64}})", "anyone", "lfs_upload"),
    ("GET", f"{WEB}/resolve{REVISION}/(?P<path>.+)", "reader", "resolve"),
)
Reply = tuple[int, Any, dict[str, str]]  # status, body (bytes, or what becomes JSON), headers


@dataclass
class Request:
    """What a client asks; `path` is quoted and without query."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""
    token: str = ""


class Hub:
    """The repos, who may write, and what was uploaded."""

    user = "tester"

    def __init__(self, url: str) -> None:
        self.url = url
        self.token = "hf_" + "t" * 34
        self.repos: dict[str, Repo] = {}
        self.lfs_uploads: list[tuple[str, int]] = []
        self.refused = 0

    def create(self, name: str, private: bool = False) -> Repo:
        """A repo with the one file and the one commit that the Hub begins with."""
        made = self.repos[name] = Repo(private)
        made.commit("main", "initial commit", {".gitattributes": Blob(b"*.bin -text\n", False)})
        return made

    def answer(self, request: Request) -> Reply:
        """What the Hub says to a request, an error too."""
        try:
            return Answers(self, request).dispatch()
        except Refusal as error:
            return error.reply


class Answers:
    """One request; the methods that ROUTES names return the reply."""

    def __init__(self, hub: Hub, request: Request) -> None:
        self.hub, self.request, self.name = hub, request, ""
        self.query = {key: values[-1] for key, values in parse_qs(request.query).items()}

    def dispatch(self) -> Reply:
        method = "GET" if self.request.method == "HEAD" else self.request.method
        for verb, pattern, who, answer in ROUTES:
            match = re.fullmatch(pattern, self.request.path)
            if match and verb == method:
                named = {k: unquote(v) for k, v in match.groupdict().items() if v}
                self.name = named.pop("name", "")
                self.admit(who)
                reply: Reply = getattr(self, answer)(**named)
                return reply
        raise Refusal(404, f"The test Hub does not know {method} {self.request.path}.")

    def admit(self, who: str) -> None:
        """Refuses whoever may not ask this."""
        given, refused = self.request.token, self.hub.refused
        reads = who != "writer" or self.request.method == "GET"
        if given and (given != self.hub.token or (refused == 401 and who == "writer")):
            raise Refusal(401, "Invalid credentials in Authorization header")
        if refused and not reads:
            raise Refusal(
                refused, "Forbidden: you must use a write token to upload to a repository."
            )
        if who == "writer" and not given:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound" if self.name else "")
        there = self.hub.repos.get(self.name)
        if self.name and (not there or (there.private and who == "reader" and not given)):
            if given:
                raise Refusal(404, "Repository not found", "RepoNotFound")
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")

    @property
    def repo(self) -> Repo:
        return self.hub.repos[self.name]

    @property
    def asked(self) -> Any:
        return json.loads(self.request.body)

    # ----------------------------------------------------------------------- reading

    def whoami(self) -> Reply:
        token = {"role": "read" if self.hub.refused else "write", "displayName": "test"}
        auth = {"type": "access_token", "accessToken": token}
        name = self.hub.user
        reply = {"type": "user", "id": name, "name": name, "fullname": name, "orgs": []}
        return 200, {**reply, "auth": auth}, {}

    def info(self, revision: str = "main") -> Reply:
        files = self.repo.at(revision).files
        shown = ("rfilename", "size", "blobId", "lfs") if "blobs" in self.query else ("rfilename",)
        entries = [blob.entry(path) for path, blob in files.items()]
        siblings = [{key: entry[key] for key in shown if key in entry} for entry in entries]
        reply = {"id": self.name, "modelId": self.name, "author": self.hub.user, "tags": []}
        reply |= {"sha": self.repo.find(revision), "private": self.repo.private, "gated": False}
        reply |= {"lastModified": DATE, "createdAt": DATE, "downloads": 0, "likes": 0}
        return 200, {**reply, "siblings": siblings}, {}

    def listed(self, revision: str) -> dict[str, dict[str, Any]]:
        """Entries of all files and folders."""
        found = {}
        for path, blob in sorted(self.repo.at(revision).files.items()):
            for end in (i for i, letter in enumerate(path) if letter == "/"):
                oid = hashlib.sha1(path[:end].encode()).hexdigest()
                found[path[:end]] = {"type": "directory", "path": path[:end], "oid": oid, "size": 0}
            found[path] = blob.entry(path)
        return found

    def tree(self, revision: str, path: str = "") -> Reply:
        found, above = self.listed(revision), f"{path}/" if path else ""
        if path and path not in found:
            raise Refusal(404, f"{path} does not exist on {revision}", "EntryNotFound")
        deep = self.query.get("recursive") == "true"
        inside = {name: entry for name, entry in found.items() if name.startswith(above)}
        kept = [e for name, e in inside.items() if deep or "/" not in name[len(above) :]]
        return 200, kept, {}

    def refs(self) -> Reply:
        def reply(names: dict[str, str], folder: str) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
                for name, commit in names.items()
            ]

        branches, tags = reply(self.repo.branch, "heads"), reply(self.repo.tag, "tags")
        return 200, {"branches": branches, "tags": tags, "converts": [], "pullRequests": []}, {}

    def resolve(self, revision: str, path: str) -> Reply:
        made = self.repo.find(revision)
        blob = self.repo.all[made].files.get(path)
        if blob is None:
            error = Refusal(404, "Entry not found", "EntryNotFound")
            error.headers["X-Repo-Commit"] = made
            raise error
        headers = {"ETag": f'"{blob.oid}"', "X-Repo-Commit": made}
        if blob.lfs:
            size = str(len(blob.data))
            headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": size}
        return 200, blob.data, headers

    # ----------------------------------------------------------------------- writing

    def validate_yaml(self) -> Reply:
        """Metadata of a model card."""
        found = re.match(r"---\n(.*?)\n---", self.asked["content"], re.DOTALL)
        if not found:
            warning = {"message": "empty or missing yaml metadata in repo card"}
            return 200, {"errors": [], "warnings": [warning]}, {}
        try:
            good = isinstance(yaml.safe_load(found[1]), dict)
            message = "" if good else "metadata must be a mapping"
        except yaml.YAMLError as error:
            message = str(error)
        reply = {"errors": [{"message": message}] if message else [], "warnings": []}
        return 400 if message else 200, reply, {}

    def create(self) -> Reply:
        asked = self.asked
        owner = asked.get("organization") or self.hub.user
        name = f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            raise Refusal(409, f"You already created this model repo: {name}", url=url)
        self.hub.create(name, asked.get("visibility") == "private" or asked.get("private", False))
        return 200, {"url": url, "name": name}, {}

    def preupload(self, revision: str) -> Reply:
        there, reply = self.repo.at(revision).files, []
        for file in self.asked["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"])
            mode = "lfs" if is_lfs(path, sample, file["size"]) else "regular"
            reply.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
            if path in there:
                reply[-1]["oid"] = there[path].oid
        return 200, {"files": reply}, {}

    def lfs_batch(self) -> Reply:
        objects, headers = [], {"Content-Type": "application/vnd.git-lfs+json"}
        verify = {"href": f"{self.hub.url}/{self.name}.git/info/lfs/verify"}
        for asked in self.asked["objects"]:
            reply = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.repo.objects:
                upload = {"href": f"{self.hub.url}/storage/{self.name}/{asked['oid']}"}
                reply["actions"] = {"upload": upload, "verify": verify}
            objects.append(reply)
        return 200, {"transfer": "basic", "objects": objects}, headers

    def lfs_upload(self, oid: str) -> Reply:
        """Needs no token: the address is the permission, as in a storage bucket."""
        data = self.request.body
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refusal(400, f"These {len(data)} bytes are not the object {oid}")
        self.repo.objects[oid] = data
        self.hub.lfs_uploads.append((oid, len(data)))
        return 200, b"", {"ETag": f'"{oid}"'}

    def lfs_verify(self) -> Reply:
        data = self.repo.objects.get(self.asked["oid"])
        if data is None or len(data) != self.asked["size"]:
            raise Refusal(404, f"No object {self.asked['oid']} of {self.asked['size']} bytes")
        return 200, {}, {}

    def commit(self, revision: str) -> Reply:
        repo, header = self.repo, {}
        if revision not in repo.branch:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = dict(repo.at(revision).files)
        for line in self.request.body.splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                header = item["value"]
            else:
                self.change(files, item["key"], item["value"])
        if header.get("parentCommit", repo.branch[revision]) != repo.branch[revision]:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        made = repo.commit(revision, header["summary"], files, header.get("description", ""))
        url = f"{self.hub.url}/{self.name}/commit/{made}"
        return 200, {"success": True, "commitOid": made, "commitUrl": url}, {}

    def change(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        """One operation of a commit."""
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in self.repo.objects:
                raise Refusal(400, f"The LFS object of {path} was not uploaded")
            files[path] = Blob(self.repo.objects[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                message = f"A file with this name doesn't exist: {path}"
                raise Refusal(404, message, "EntryNotFound")
        else:
            raise Refusal(400, f"The test Hub does not know the operation {key}")

    def create_branch(self, ref: str) -> Reply:
        return self.point("branch", ref, (self.asked or {}).get("startingPoint") or "main")

    def create_tag(self, revision: str) -> Reply:
        return self.point("tag", self.asked["tag"], revision)

    def point(self, sort: str, ref: str, revision: str) -> Reply:
        made, names = self.repo.find(revision), getattr(self.repo, sort)
        if ref in names:
            raise Refusal(409, f"Reference already exists: {ref}")
        names[ref] = made
        return 200, {}, {}

    def delete_tag(self, ref: str) -> Reply:
        del self.repo.tag[ref]
        return 200, b"", {}
