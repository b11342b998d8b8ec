"""Read the files of a folder behind a URL: fsspec, with one sentence for each failure."""

import contextlib
import errno
import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from accel_gpt.errors import AccelGPTError, DataError, MachineError, UserError, one_line
from accel_gpt.files import Patient, http_status, is_refusal
from accel_gpt.hub import SCHEME

TIMEOUT_SECONDS = 60.0  # without a byte, of http
FULL = (errno.ENOSPC, errno.EDQUOT)
# They have no folders: `makedirs` would create a missing bucket, such as a misspelled one
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
CONTENT_TAGS = ("ETag", "etag", "md5Hash", "blob_id")  # as the stores of fsspec name them
TIMES = ("mtime", "LastModified", "Last-Modified", "created")


def is_repository(url: str) -> bool:
    """Return whether `url` is in a repository of the Hub; a bucket has no commits and is not."""
    return url.startswith(SCHEME) and not url.startswith(f"{SCHEME}buckets/")


@contextlib.contextmanager
def store_errors(problem: str) -> Iterator[None]:
    """Raise any error of a store in the block as a `UserError` that begins with `problem`."""
    try:
        yield
    except AccelGPTError:
        raise
    except Exception as error:  # of botocore, huggingface_hub, OSError, ...
        raise UserError(f"{problem}: {one_line(error)}") from None


class FileInfo(NamedTuple):
    """What is known of a file before it is downloaded."""

    size: int
    sha256: str | None = None
    tag: str = ""
    """Changes with the content alone; empty: the store has none."""
    changed: str = ""
    """When the file changed, for stores without tags."""


class Unreachable(Exception):
    """A failure that may be gone at the next try."""


class Missing(DataError):
    """There is no such file; some files are optional."""


class Store:
    """A folder behind a URL. Its methods raise `Unreachable`, or a `UserError` for what stays."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.full_url = url
        self.options = options or {}  # of the file system
        self.url = url.partition("?")[0].rstrip("/")
        self.protocol = url.partition("://")[0].lower()
        self.is_http = self.protocol in ("http", "https")

    @cached_property
    def system(self) -> tuple[Any, str]:
        """File system and path of the folder; `UserError` if its package is missing."""
        from fsspec.core import url_to_fs

        options: dict[str, Any] = dict(self.options)
        if self.is_http:
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {
                "timeout": ClientTimeout(
                    total=None, sock_connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS
                ),
                "trust_env": True,  # proxies
                "headers": {"Accept-Encoding": "identity"},
            }
        try:
            system, path = url_to_fs(self.full_url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"{self.url} cannot be read: {one_line(error)}") from None
        return system, str(path)

    @property
    def files(self) -> Patient:
        """Return the file system; a call that fails in a way that may pass is repeated."""
        return Patient(self.system[0])

    @property
    def root(self) -> str:
        """Return the path of the folder in its file system."""
        return self.system[1].rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders in the folder, or one in it, sorted.

        Raises whatever the file system raises, as the methods below do.
        """
        self.files.invalidate_cache()
        try:
            entries = self.files.ls(f"{self.root}/{folder}".rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if there is none."""
        self.files.invalidate_cache()
        try:
            return bytes(self.files.cat_file(self.locate(name)[1]))
        except FileNotFoundError:
            return None

    def locate(self, name: str) -> tuple[Any, str]:
        """File system and path of a file; the query of a URL stays at its end."""
        system, path = self.system
        folder, mark, query = path.partition("?")
        return system, f"{folder.rstrip('/')}/{name}{mark}{query}"

    def make_folder(self, path: str) -> None:
        """Make a folder, by its path in the file system, unless the store has none."""
        if self.protocol not in OBJECT_STORES:
            self.files.makedirs(path, exist_ok=True)

    def list(self) -> dict[str, FileInfo]:
        """List the files right in the folder."""
        if self.is_http:
            raise UserError(
                f"{self.url} has no dataset.json, and shards without one cannot be listed over http"
            )
        with self.explained():
            system, path = self.system
            entries = system.ls(path.rstrip("/"), detail=True)
            files = [entry for entry in entries if entry["type"] == "file"]
            return {entry["name"].rpartition("/")[2]: file_info(entry) for entry in files}

    def download(self, name: str, target: Path) -> None:
        """Download a file, without a progress bar."""
        from fsspec.callbacks import TqdmCallback

        with self.explained(name):
            system, path = self.locate(name)
            system.get_file(path, str(target), callback=TqdmCallback({"disable": True}))

    def info(self, name: str) -> dict[str, Any]:
        """Return what fsspec says of a file before it is downloaded; see `file_info`."""
        with self.explained(name):
            system, path = self.locate(name)
            info: dict[str, Any] = system.info(path)
            return info

    @contextlib.contextmanager
    def explained(self, name: str = "") -> Iterator[None]:
        """Turn whatever a file system raises into an `Unreachable` or a `UserError`.

        The type of the error and the status of the answer decide.
        """
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of aiohttp, botocore, huggingface_hub, ssl, ...
            status = http_status(error)
            said = one_line(error)
            if isinstance(error, OSError) and error.errno in FULL:
                raise MachineError(f"{where} cannot be stored: {error.strerror}") from None
            if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
                raise Missing(f"{where} does not exist; check the address") from None
            if isinstance(error, PermissionError) or is_refusal(status):
                raise UserError(
                    f"{where} may not be read: {said}; check the address and your login"
                ) from None
            raise Unreachable(said) from None


def file_info(entry: dict[str, Any]) -> FileInfo:
    """Return what fsspec lists of a file."""
    on_hub = entry.get("lfs")
    return FileInfo(
        size=entry.get("size") or 0,
        sha256=on_hub.sha256 if on_hub else None,
        tag=next((str(entry[key]) for key in CONTENT_TAGS if entry.get(key)), ""),
        changed=next((str(entry[key]) for key in TIMES if entry.get(key)), ""),
    )


def short_hash(text: str) -> str:
    """Return the first 16 digits of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
