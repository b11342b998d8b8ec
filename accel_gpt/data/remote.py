"""Folders behind a URL that fsspec knows: what files they have, and their bytes."""

import contextlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from accel_gpt.errors import DataError, UserError

BLOCK, CHUNK = 1 << 24, 1 << 18  # bytes requested from a store and read at once
TIMEOUT = 60.0  # seconds without a byte, of http
CONTENT_TAGS = ("ETag", "etag", "md5Hash", "blob_id")  # as the stores of fsspec name them
TIMES = ("mtime", "LastModified", "Last-Modified", "created")
TRY_AGAIN = frozenset((408, 425, 429))  # of the statuses below 500


class FileInfo(NamedTuple):
    """What is known of a file before it is downloaded."""

    size: int | None = None
    sha256: str | None = None
    tag: str = ""
    """Changes with the content alone; empty: the store has none."""
    changed: str = ""
    """When the file changed, for stores without tags."""

    @property
    def version(self) -> str:
        """Another after each change, as far as the store tells."""
        return self.tag or self.changed


class Unreachable(Exception):
    """A failure that may be gone at the next try."""


class Missing(DataError):
    """There is no such file; some files are optional."""


class Refused(UserError):
    """The store wants other credentials; some also answer so for files that do not exist."""


class Store:
    """A folder behind a URL. Its methods raise `Unreachable`, or a `UserError` for what stays."""

    def __init__(self, url: str) -> None:
        self.full_url = url
        self.url = url.partition("?")[0].rstrip("/")
        self.protocol = url.partition("://")[0].lower()
        self.http = self.protocol in ("http", "https")

    @cached_property
    def system(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` where its package is missing."""
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        options: dict[str, Any] = {}
        if self.http:
            from aiohttp import ClientTimeout

            wait = ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
            options = {"client_kwargs": {"timeout": wait, "trust_env": True}}  # proxies
        try:
            system, path = url_to_fs(self.full_url, **options)
        except ImportError:
            package = str(known_implementations[self.protocol]["class"]).partition(".")[0]
            raise UserError(
                f"{self.url} needs the package {package}; pip install {package}"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.url} cannot be read: {reason(error)}") from None
        return system, str(path)

    def locate(self, name: str) -> tuple[Any, str]:
        """File system and path of a file; the query of a URL stays at its end."""
        system, path = self.system
        folder, mark, query = path.partition("?")
        return system, f"{folder.rstrip('/')}/{name}{mark}{query}"

    def info(self, name: str) -> FileInfo:
        """What the store knows of a file."""
        with self.explained(name):
            system, path = self.locate(name)
            return file_info(system.info(path))

    def list(self) -> dict[str, FileInfo]:
        """Files right in the folder."""
        if self.http:
            raise UserError(
                f"{self.url} has no dataset.json that can be read, and a web folder cannot be "
                "listed; give the URL of a folder made by data.prepare, or shards on hf://, s3:// "
                "or gs://"
            )
        with self.explained(""):
            system, path = self.system
            entries = system.ls(path.rstrip("/"), detail=True)
            files = [entry for entry in entries if entry["type"] == "file"]
            return {entry["name"].rpartition("/")[2]: file_info(entry) for entry in files}

    def read(self, name: str, start: int, size: int | None) -> Iterator[tuple[int, bytes]]:
        """Pieces of a file and their positions, from `start` on, or 0 if a server has no ranges."""
        with self.explained(name):
            system, path = self.locate(name)
            if self.http:  # as a stream: `seek` fails where the server has no ranges
                headers = {"Accept-Encoding": "identity"}
                headers |= {"Range": f"bytes={start}-"} if start else {}
                file = system.open(path, "rb", block_size=0, size=size, headers=headers)
                start = start if file.r.status == 206 else 0
            else:
                file = system.open(path, "rb", block_size=BLOCK)
                file.seek(start)
            with file:
                while data := file.read(CHUNK):
                    yield start, data
                    start += len(data)
        if size is not None and start < size:
            raise Unreachable(f"it broke off after {start} of {size} bytes")

    @contextlib.contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Turn whatever a file system raises into an `Unreachable` or a `UserError`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of aiohttp, botocore, huggingface_hub, ssl, ...
            raise self.explain(error, f"{self.url}/{name}".rstrip("/")) from None

    def explain(self, error: BaseException, where: str) -> Exception:
        """By type, and by the status of the answer."""
        if self.http and isinstance(error, FileNotFoundError):
            error = error.__cause__ or error  # fsspec takes every failure of HEAD for this
        causes = [one for one in (error, error.__cause__, error.__context__) if one is not None]
        answers = [getattr(one, "response", one) for one in causes]
        codes = [getattr(one, "status_code", getattr(one, "status", None)) for one in answers]
        status = next((code for code in codes if isinstance(code, int)), 0)
        if self.protocol == "hf":
            from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

            if status in (401, 403) or any(isinstance(c, RepositoryNotFoundError) for c in causes):
                return UserError(
                    f"{where} is not on the Hub, or private; check its name, and log in with "
                    "`hf auth login` or set HF_TOKEN"
                )
            if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
                return UserError(f"{where} has a revision that is not on the Hub; check it")
        if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
            return Missing(f"{where} does not exist; check the address")
        if isinstance(error, PermissionError) or (400 <= status < 500 and status not in TRY_AGAIN):
            return Refused(
                f"{where} may not be read: {reason(error)}; check the address and your credentials"
            )
        return Unreachable(reason(error))


def reason(error: BaseException) -> str:
    """An error in one line, without the long queries of the URLs that a store redirects to."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def file_info(info: dict[str, Any]) -> FileInfo:
    """What fsspec knows of a file; of files of the Hub that is SHA-256 as well."""
    lfs = info.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    tag, changed = (
        next((str(info[key]) for key in keys if info.get(key)), "")
        for keys in (CONTENT_TAGS, TIMES)
    )
    return FileInfo(info.get("size"), digest, tag, changed)
