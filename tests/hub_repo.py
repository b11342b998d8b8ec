"""What a Hugging Face Hub keeps: files, commits, branches and tags, in memory."""

import codecs
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
        told = {"type": "file", "path": path, "rfilename": path, "size": size}
        told |= {"oid": self.sha1, "blobId": self.sha1}
        if self.lfs:
            told["lfs"] = {"oid": self.oid, "sha256": self.oid, "size": size, "pointerSize": 130}
        return told


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
        told = [before, len(self.all), title, [(p, blob.oid) for p, blob in files.items()]]
        made = hashlib.sha1(json.dumps(told).encode()).hexdigest()
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
