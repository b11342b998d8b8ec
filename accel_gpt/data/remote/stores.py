"""Folders behind a URL: http(s) through the standard library, all else through fsspec."""

import base64
import email.message
import functools
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from accel_gpt.errors import DataError, UserError
from accel_gpt.redact import redact_url

BLOCK = 1 << 24  # bytes that fsspec asks a store for at once
CONTENT_TAGS = ("ETag", "etag", "md5Hash", "blob_id")  # as the stores of fsspec name them
TIMES = ("mtime", "LastModified", "created")
LATER = frozenset((408, 425, 429))  # of the statuses below 500, those that ask to come again


class About(NamedTuple):
    """What is known of a file before it is fetched."""

    size: int | None = None
    sha256: str | None = None
    version: str = ""
    """A tag that changes with the content; empty: the store gives none."""


class Opened(NamedTuple):
    """A transfer that has begun, at byte `begins`."""

    begins: int
    read: Callable[[int], bytes]
    close: Callable[[], None]


class Unreachable(Exception):
    """A fault that may be gone in a while; `wait`: seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Missing(DataError):
    """There is no such file; told apart because some files are optional."""


class Refused(UserError):
    """The store wants other credentials; some also answer so for what they do not have."""


class Remote(Protocol):
    """A folder behind a URL. What its methods raise is made sense of by `explain`."""

    @property
    def shown(self) -> str:
        """The URL without user, password and query."""

    def about(self, name: str) -> About:
        """Size and hash of a file, as far as the store tells."""

    def open(self, name: str, start: int) -> Opened:
        """Read a file from byte `start`, or from its first byte where that cannot be had."""

    def list(self) -> dict[str, About]:
        """Each file, with the size and what else a listing tells of the content."""

    def explain(self, error: Exception, name: str) -> Exception:
        """`Unreachable` for what may pass, else a `UserError`."""


def open_remote_folder(url: str, timeout: float) -> Remote:
    """The folder at `url`; nothing is asked of it yet."""
    http_ = re.match(r"https?://", url, re.IGNORECASE)
    return HttpFolder(url, timeout) if http_ else FsspecFolder(url)


def reason(error: BaseException) -> str:
    """An error in one line, without what could be a secret in a URL."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"://[^\s/@'\"]*@", "://", text)
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


@contextmanager
def explained(remote: Remote, name: str) -> Iterator[None]:
    """Turn whatever a store raises into an `Unreachable` or a `UserError`."""
    try:
        yield
    except (UserError, Unreachable):
        raise
    except Exception as error:  # of urllib, http, ssl, fsspec, botocore, httpx, huggingface_hub
        raise remote.explain(error, name) from None


# --------------------------------------------------------------------------- http(s)


class HttpFolder:
    """A folder of a web server, which cannot be listed."""

    def __init__(self, url: str, timeout: float) -> None:
        self.parts = urllib.parse.urlsplit(url)
        self.shown, self.timeout = redact_url(url), timeout

    def ask(self, method: str, name: str, start: int = 0) -> http.client.HTTPResponse:
        """The answer of the server, its body unread."""
        path = f"{self.parts.path.rstrip('/')}/{name}"
        request = http_request(self.parts._replace(path=path), method)
        if start:
            request.add_header("Range", f"bytes={start}-")
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout)
        return answer

    def about(self, name: str) -> About:
        """Size of a file; its version is the server's ETag, or else when it was changed."""
        try:
            answer = self.ask("HEAD", name)
        except urllib.error.HTTPError as error:
            if error.code not in (405, 501):
                raise
            error.close()
            answer = self.ask("GET", name)
        with answer:
            size = answer.headers.get("Content-Length")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            return About(int(size) if size else None, None, version or "")

    def open(self, name: str, start: int) -> Opened:
        """Read from byte `start` where the server can do that."""
        try:
            answer = self.ask("GET", name, start)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not start:
                raise
            error.close()
            answer = self.ask("GET", name)
        begins = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range") or "")
        at = int(begins[1]) if answer.status == 206 and begins else 0
        return Opened(at, answer.read1, answer.close)

    def list(self) -> dict[str, About]:
        """No web server can be asked for the names of its files."""
        raise UserError(
            f"{self.shown} has no dataset.json that can be read, and a web folder cannot be "
            "listed; give the URL of a folder made by data.prepare, or shards on hf://, s3:// or "
            "gs://"
        )

    def explain(self, error: Exception, name: str) -> Exception:
        """By the status of the answer; without an answer it may pass."""
        if not isinstance(error, urllib.error.HTTPError):
            return Unreachable(reason(error))
        error.close()
        what = f"{self.shown}/{name} was answered with {error.code} {error.reason}"
        if error.code in (404, 410):
            return Missing(f"{what}; check the address")
        if error.code in LATER or error.code >= 500:
            return Unreachable(f"{error.code} {error.reason}", retry_after(error.headers))
        kind = Refused if error.code == 403 else UserError
        return kind(f"{what}; check the address and the credentials in it")


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


def retry_after(headers: email.message.Message) -> float:
    """Seconds that the server asks to wait, where it gives them as a number."""
    asked = headers.get("Retry-After") or ""
    return float(asked) if re.fullmatch("[0-9]{1,9}", asked) else 0.0


# --------------------------------------------------------------------------- fsspec


def told(info: dict[str, Any], tags: Sequence[str]) -> About:
    """What fsspec says of a file; its version is the first of `tags` that there is."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    version = next((str(info[tag]) for tag in tags if info.get(tag)), "")
    return About(info.get("size"), sha256, version)


class FsspecFolder:
    """A folder of any store that fsspec knows; each but the local ones needs a package."""

    def __init__(self, url: str) -> None:
        self.url, self.shown = url, redact_url(url)
        self.protocol = url.partition("://")[0]

    @functools.cached_property
    def place(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` where its package is missing."""
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        try:
            system, path = url_to_fs(self.url)
        except ImportError:
            package = str(known_implementations[self.protocol]["class"]).partition(".")[0]
            raise UserError(
                f"{self.shown} needs the package {package}; pip install {package}"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.shown} cannot be read: {reason(error)}") from None
        return system, str(path).rstrip("/")

    def about(self, name: str) -> About:
        """What the store tells; of files of the Hub that is SHA-256 as well."""
        system, path = self.place
        return told(system.info(f"{path}/{name}"), (*CONTENT_TAGS, *TIMES))

    def open(self, name: str, start: int) -> Opened:
        """Every such store can be read from any byte."""
        system, path = self.place
        file = system.open(f"{path}/{name}", "rb", block_size=BLOCK)
        file.seek(start)
        return Opened(start, file.read, file.close)

    def list(self) -> dict[str, About]:
        """Files right in the folder; of versions only those that are made from the content."""
        system, path = self.place
        found = system.ls(path, detail=True)
        files = [entry for entry in found if entry["type"] == "file"]
        return {entry["name"].rpartition("/")[2]: told(entry, CONTENT_TAGS) for entry in files}

    def explain(self, error: Exception, name: str) -> Exception:
        """By type, and by the status that the clients of HTTP keep in `response`."""
        where = f"{self.shown}/{name}".rstrip("/")
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
