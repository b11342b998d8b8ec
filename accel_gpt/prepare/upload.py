"""Prepare a data folder that may lie behind a URL: in the user's cache first, then upload it.

    {cache}/prepared/{hash of the URL}/    the data folder until it is uploaded

The index is uploaded last, so the folder at the URL is complete or has no index. A file UPLOADING
is there until then. After an interruption, the same command resumes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel_gpt.config.data import PrepareConfig
from accel_gpt.console import run_process, write_err, write_out
from accel_gpt.data.index import INDEX
from accel_gpt.data.remote import Store, is_repository, short_hash, store_errors
from accel_gpt.errors import UserError, require
from accel_gpt.files import cache_folder, is_url, locked_file
from accel_gpt.hub import parse_url
from accel_gpt.prepare.prepare import is_ready, prepare
from accel_gpt.prepare.sources import select
from accel_gpt.training.display import Progress

MARK = "UPLOADING"
CHILD_SETTINGS = "ACCEL_GPT_PREPARE"  # environment variable, see `main`


def prepare_at(config: PrepareConfig, out: str, keep_changed: bool = False) -> bool:
    """Prepare the data folder at `out`, a local folder or a URL; see `prepare`.

    Also raises `UserError` if the URL cannot be read or written.
    """
    if not is_url(out):
        return prepare(config, Path(out), keep_changed)
    if is_prepared(config, out, keep_changed):
        return False
    folder = cache_folder() / "prepared" / short_hash(out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    notice = f"another process is preparing {out}; waiting for it\n"
    with locked_file(folder.with_name(f"{folder.name}.upload.lock"), notice=notice):
        if is_prepared(config, out, keep_changed):
            return False
        if folder.exists():
            write_err(f"{folder} is kept from an upload that did not end")
        else:
            select(config)  # raises before anything is written
        begin_upload(out)
        prepare(config, folder, keep_changed)
        upload(folder, out)
        shutil.rmtree(folder)
    write_out(f"uploaded it to {out}\n")
    return True


def has_index(out: str) -> bool:
    """Return whether there is a data folder at `out`, a local folder or a URL."""
    return read_remote_index(out) is not None if is_url(out) else Path(out, INDEX).exists()


def read_remote_index(url: str) -> bytes | None:
    """Read the index of the data folder at a URL; None if there is none."""
    with store_errors(f"{url}/{INDEX} cannot be read"):
        return Store(url).read(INDEX)


def is_prepared(config: PrepareConfig, url: str, keep_changed: bool) -> bool:
    """Return whether the data folder at a URL was prepared with these settings; see `is_ready`.

    Raises `UserError` if the folder holds something else.
    """
    index = read_remote_index(url)
    if index is None:
        with store_errors(f"{url} cannot be read"):
            names = Store(url).names()
        require(
            not names or MARK in names,
            f"{url} has no {INDEX} but {''.join(names[:1])}, so it is not a data folder",
        )
        return False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, INDEX).write_bytes(index)
        try:
            return is_ready(config, Path(folder), keep_changed)
        except UserError as error:
            raise type(error)(str(error).replace(folder, url)) from None


def begin_upload(url: str) -> None:
    """Write the first file of a data folder, or make its repository of the Hub.

    Before the text is prepared, since that may take hours: raises `UserError` if it fails.
    """
    with store_errors(f"{url} cannot be written"):
        if is_repository(url):
            from huggingface_hub import HfApi

            place = parse_url(url)
            HfApi().create_repo(place.id, repo_type=place.type, private=True, exist_ok=True)
            return
        store = Store(url)
        store.make_folder(store.root)
        store.files.pipe_file(f"{store.root}/{MARK}", b"")


def upload(folder: Path, url: str) -> None:
    """Upload a data folder, its index last; to a repository of the Hub, as one commit."""
    files = sorted(folder.iterdir(), key=lambda path: (path.name == INDEX, path.name))
    with store_errors(f"{url} cannot be written"):
        if is_repository(url):
            from huggingface_hub import HfApi

            place = parse_url(url)
            HfApi().upload_folder(
                repo_id=place.id,
                folder_path=folder,
                path_in_repo=place.path_in_repo or None,
                repo_type=place.type,
                revision=place.revision,
            )
            return
        store = Store(url)
        total = sum(path.stat().st_size for path in files)
        with Progress("uploading", "bytes", total=total) as progress:
            for path in files:
                store.files.put_file(str(path), f"{store.root}/{path.name}")
                progress.advance(path.stat().st_size)
        store.files.rm_file(f"{store.root}/{MARK}")


# --------------------------------------------------------------------------- child of a run


def main(_: Sequence[str]) -> int:
    """Prepare the folder that the environment names; see `missing_data.py`.

        ACCEL_GPT_PREPARE='{"out": "data/x", "source": "text", ...}' python -m ...

    The settings are not on the command line, because every user of a machine can read it.
    """
    values = json.loads(os.environ.pop(CHILD_SETTINGS))
    out = values.pop("out")
    prepare_at(PrepareConfig(**values), out, keep_changed=True)
    return 0


if __name__ == "__main__":
    run_process(main)
