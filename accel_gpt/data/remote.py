"""Folders behind a URL: what files they have, and their bytes from any position on.

http(s) by the standard library, whose errors and redirects are known; all else by fsspec.
"""

import base64
import functools
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from accel_gpt.errors import DataError, UserError
from accel_gpt.redact import redact_url

BLOCK = 1 << 24  # bytes that fsspec requests from a store at once
CONTENT_TAGS = ("ETag", "etag", "md5Hash", "blob_id")  # as the stores of fsspec name them
TIMES = ("mtime", "LastModified", "created")
TRY_AGAIN = frozenset((408, 425, 429))  # of the statuses below 500


class FileInfo(NamedTuple):
    """What is known of a file before it is downloaded."""

    size: int | None = None
    sha256: str | None = None
    version: str = ""
    """A tag that changes with the content; empty: the store has none."""


class Unreachable(Exception):
    """A failure that may be gone at the next try."""


class Missing(DataError):
    """There is no such file; some files are optional."""


class Refused(UserError):
    """The store wants other credentials; some also answer so for files that do not exist."""


class Store(Protocol):
    """A folder behind a URL; `explain` makes sense of what the other methods raise."""

    url: str
    """Without user, password and query."""

    def info(self, name: str) -> FileInfo:
        """Size and hash of a file, as far as the store knows them."""

    def open(self, name: str, start: int) -> tuple[BinaryIO, int]:
        """A stream of a file, and the byte at which it begins: `start`, or else 0."""

    def list(self) -> dict[str, FileInfo]:
        """All files."""

    def explain(self, error: Exception, name: str) -> Exception:
        """`Unreachable` for what may pass, else a `UserError`."""


def is_url(path: str) -> bool:
    """Whether `path` is a URL (scheme://...) and not a folder of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def open_store(url: str, timeout: float) -> Store:
    """The folder at `url`; nothing is requested yet. `timeout`: seconds without a byte."""
    http = re.match(r"https?://", url, re.IGNORECASE)
    return HttpStore(url, timeout) if http else FsspecStore(url)


def reason(error: BaseException) -> str:
    """An error in one line, without what could be a secret in a URL."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"://[^\s/@'\"]*@", "://", text)
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


class HttpStore:
    """A folder of a web server, which cannot be listed."""

    def __init__(self, url: str, timeout: float) -> None:
        self.parts = urllib.parse.urlsplit(url)
        self.url, self.timeout = redact_url(url), timeout

    def request(self, name: str, start: int = 0, method: str = "GET") -> Any:
        """The response of the server, its body unread."""
        path = f"{self.parts.path.rstrip('/')}/{name}"
        request = http_request(self.parts._replace(path=path), method)
        if start:
            request.add_header("Range", f"bytes={start}-")
        return urllib.request.urlopen(request, timeout=self.timeout)

    def info(self, name: str) -> FileInfo:
        """Size of a file; its version is the server's ETag, or else when it was changed."""
        with self.request(name, method="HEAD") as response:
            size = response.headers.get("Content-Length")
            version = response.headers.get("ETag") or response.headers.get("Last-Modified")
            return FileInfo(int(size) if size else None, None, version or "")

    def open(self, name: str, start: int) -> tuple[BinaryIO, int]:
        """A stream from `start` where the server knows ranges."""
        response = self.request(name, start)
        begins = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
        return response, int(begins[1]) if response.status == 206 and begins else 0

    def list(self) -> dict[str, FileInfo]:
        """Impossible."""
        raise UserError(
            f"{self.url} has no dataset.json that can be read, and a web folder cannot be "
            "listed; give the URL of a folder made by data.prepare, or shards on hf://, s3:// or "
            "gs://"
        )

    def explain(self, error: Exception, name: str) -> Exception:
        """By the status of the response; without a response it may pass."""
        if not isinstance(error, urllib.error.HTTPError):
            return Unreachable(reason(error))
        error.close()
        answer = f"{self.url}/{name} was answered with {error.code} {error.reason}"
        if error.code in (404, 410):
            return Missing(f"{answer}; check the address")
        if error.code in TRY_AGAIN or error.code >= 500:
            return Unreachable(f"{error.code} {error.reason}")
        kind = Refused if error.code == 403 else UserError
        return kind(f"{answer}; check the address and the credentials in it")


def http_request(parts: urllib.parse.SplitResult, method: str = "GET") -> urllib.request.Request:
    """A request for a URL, whose user and password go to its server alone."""
    user, _, host = parts.netloc.rpartition("@")
    url = urllib.parse.urlunsplit(parts._replace(netloc=host, fragment=""))
    headers = {"User-Agent": "accel_gpt", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers, method=method)
    if user:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


class FsspecStore:
    """A folder of any store that fsspec knows; each but the local ones needs a package."""

    def __init__(self, url: str) -> None:
        self.full_url, self.url = url, redact_url(url)
        self.protocol = url.partition("://")[0]

    @functools.cached_property
    def folder(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` where its package is missing."""
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        try:
            system, path = url_to_fs(self.full_url)
        except ImportError:
            package = str(known_implementations[self.protocol]["class"]).partition(".")[0]
            raise UserError(
                f"{self.url} needs the package {package}; pip install {package}"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.url} cannot be read: {reason(error)}") from None
        return system, str(path).rstrip("/")

    def info(self, name: str) -> FileInfo:
        """What the store knows; of files of the Hub that is SHA-256 as well."""
        system, path = self.folder
        return file_info(system.info(f"{path}/{name}"), (*CONTENT_TAGS, *TIMES))

    def open(self, name: str, start: int) -> tuple[BinaryIO, int]:
        """A stream from `start`."""
        system, path = self.folder
        file = system.open(f"{path}/{name}", "rb", block_size=BLOCK)
        file.seek(start)
        return cast(BinaryIO, file), start

    def list(self) -> dict[str, FileInfo]:
        """Files right in the folder; of versions only those that are made from the content."""
        system, path = self.folder
        files = [entry for entry in system.ls(path, detail=True) if entry["type"] == "file"]
        return {entry["name"].rpartition("/")[2]: file_info(entry, CONTENT_TAGS) for entry in files}

    def explain(self, error: Exception, name: str) -> Exception:
        """By type, and by the status that the clients of HTTP keep in `response`."""
        where = f"{self.url}/{name}".rstrip("/")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if self.protocol == "hf":
            from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

            causes = (error, error.__cause__, error.__context__)
            if status in (401, 403) or any(isinstance(c, RepositoryNotFoundError) for c in causes):
                return UserError(
                    f"{where} is not on the Hub, or private; check its name, and log in with "
                    "`hf auth login` or set HF_TOKEN"
                )
            if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
                return UserError(f"{where} has a revision that is not on the Hub; check it")
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Missing(f"{where} does not exist; check the address")
        if isinstance(error, PermissionError) or status in (401, 403):
            return Refused(f"{where} may not be read: {reason(error)}; check your credentials")
        return Unreachable(reason(error))


def file_info(info: dict[str, Any], tags: Sequence[str]) -> FileInfo:
    """What fsspec knows of a file; its version is the first of `tags` that there is."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    version = next((str(info[tag]) for tag in tags if info.get(tag)), "")
    return FileInfo(info.get("size"), sha256, version)
