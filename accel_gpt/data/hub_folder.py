"""Read data folders in a repository of the Hub: `hf://datasets/user/name[@revision][/folder]`.

All files belong to one commit. Index and tokenizer come into the Hub's cache (HF_HUB_CACHE). Shards
that `hf download` put there are read in place. Other shards come into the cache of the run
(`remote.py`), with Xet if hf_xet is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path

from accel_gpt.data.hub_client import UnreachableError, hub_errors, is_offline, no_progress_bar
from accel_gpt.data.index import INDEX
from accel_gpt.data.remote import Cache, FileInfo, Missing, RemoteFolder, Unreachable
from accel_gpt.errors import UserError

SMALL_FILES = (INDEX, "tokenizer.json", "tokenizer_config.json")


def is_repository(url: str) -> bool:
    """Return whether `url` is in a repository of the Hub; a bucket has no commits and is not."""
    return url.startswith("hf://") and not url.startswith("hf://buckets/")


class HubFolder(RemoteFolder):
    """A data folder in a repository of the Hub, at one commit.

    `commit`: None for the newest commit of the revision in `url`; if the Hub cannot be reached, the
    newest commit in the Hub's cache. Raises `UserError` if the repository or the revision does not
    exist.
    """

    def __init__(self, url: str, cache: Cache, timeout: float, commit: str | None = None) -> None:
        from huggingface_hub.errors import HfUriError
        from huggingface_hub.utils import parse_hf_uri  # type: ignore[attr-defined]  # no __all__

        super().__init__(url, cache, timeout)
        try:
            uri = parse_hf_uri(self.store.url)
        except HfUriError as error:
            raise UserError(f"{url} is not a URL on the Hub: {error}") from None
        self.repo = uri.id
        self.repo_type = uri.type
        self.path_in_repo = uri.path_in_repo
        snapshot = self.at_start(partial(self.download_small_files, commit or uri.revision))
        self.commit = snapshot.name
        self.folder = snapshot / self.path_in_repo

    @property
    def description(self) -> str:
        """Return the name of the folder in the first lines of a run."""
        return f"{self.store.url} at commit {self.commit[:12]}"

    def in_repo(self, name: str) -> str:
        """Return the path of a file in the repository."""
        return f"{self.path_in_repo}/{name}".removeprefix("/")

    def download_small_files(self, revision: str | None) -> Path:
        """Download index and tokenizer; return the folder of the commit in the Hub's cache."""
        from huggingface_hub import snapshot_download

        # every repository has .gitattributes, and huggingface_hub warns if no file matches
        patterns = [".gitattributes", *(escape(self.in_repo(name)) for name in SMALL_FILES)]
        with self.explained(revision=revision):
            snapshot = snapshot_download(
                self.repo,
                repo_type=self.repo_type,
                revision=revision,
                allow_patterns=patterns,
                tqdm_class=no_progress_bar(),
            )
        return Path(snapshot)

    def download(self, name: str, target: Path) -> None:
        """Download a file to `target`."""
        self.download_into(self.shards / "hub", name).replace(target)

    def download_into(self, folder: Path | None, name: str) -> Path:
        """Download a file into `folder`, or into the Hub's cache; return its path."""
        from huggingface_hub import hf_hub_download

        with self.explained(name, self.commit):
            path = hf_hub_download(
                self.repo,
                self.in_repo(name),
                repo_type=self.repo_type,
                revision=self.commit,
                local_dir=folder,
                tqdm_class=no_progress_bar(),
            )
        return Path(path)

    @contextmanager
    def explained(self, name: str = "", revision: str | None = None) -> Iterator[None]:
        """Turn errors of `huggingface_hub` into an `Unreachable` or a `UserError`."""
        from huggingface_hub.errors import RemoteEntryNotFoundError

        try:
            with hub_errors(self.repo, "read", revision, self.repo_type):
                try:
                    yield
                except RemoteEntryNotFoundError:
                    where = f"{self.store.url}/{name}".rstrip("/")
                    raise Missing(f"{where} does not exist; check the address") from None
        except UnreachableError as error:
            raise Unreachable(str(error)) from None

    def list(self) -> dict[str, FileInfo]:
        """List the files of the folder; if offline, list its files in the Hub's cache."""
        self.infos.update(
            self.list_cached() if is_offline() else self.at_start(self.list_repository)
        )
        return self.infos

    def list_repository(self) -> dict[str, FileInfo]:
        """List the files of the folder on the Hub."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        found = {}
        with self.explained(revision=self.commit):
            for entry in HfApi().list_repo_tree(
                self.repo,
                self.path_in_repo or None,
                revision=self.commit,
                repo_type=self.repo_type,
            ):
                if isinstance(entry, RepoFile):
                    sha256 = entry.lfs.sha256 if entry.lfs else None
                    name = entry.path.rpartition("/")[2]
                    found[name] = FileInfo(entry.size, sha256, tag=entry.blob_id)
        return found

    def list_cached(self) -> dict[str, FileInfo]:
        """List the files of the folder in the Hub's cache.

        The cache names a blob by its SHA-256 if it is stored with Xet or LFS, else by its git id.
        """
        found = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_file():
                blob = path.resolve().name
                sha256 = blob if len(blob) == 64 else None
                found[path.name] = FileInfo(path.stat().st_size, sha256, tag=blob)
        return found

    def fetch_small_file(self, name: str) -> Path:
        """Return the path of a file, after downloading it if needed."""
        path = self.folder / name
        if path.exists():
            return path
        if name in SMALL_FILES:  # already downloaded if the repository has it
            raise Missing(f"{self.store.url}/{name} does not exist; check the address")
        return self.at_start(partial(self.download_into, None, name), name)

    def path(self, name: str) -> Path:
        """Return the path of a shard: in the Hub's cache if it is there, else in the run's."""
        path = self.folder / name
        return path if path.exists() else super().path(name)

    def room_needed(self, name: str) -> int:
        """Return the bytes that a shard needs in the cache of the run."""
        return 0 if (self.folder / name).exists() else super().room_needed(name)
