"""Read and write the copies of a run in a folder, behind an fsspec URL or on the Hub.

    {checkpoint.copy_to}/launch_000003_1f2e3d4c/    a launch of the run, see `lease.py`
        lease.json                       what says that the launch is alive
        step_00001000/                   a copy that the launch made
            model.safetensors, ...       the files of a checkpoint
            run.zip                      the records: metrics, launches, samples, the run's name
            manifest.json                written last: size and SHA-256 of each file above

A launch writes only into its own folder. A copy without a manifest is incomplete and is never used.
On the Hub, each copy is one commit.
"""

import contextlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.remote import Store, store_errors
from accel_gpt.errors import CheckpointError
from accel_gpt.files import fault_point, sha256, sync, write_file
from accel_gpt.hub import SCHEME, parse_url
from accel_gpt.runs.checkpoint import (
    SavedFile,
    read_manifest,
    set_aside,
    verify_checkpoint,
    write_json,
)
from accel_gpt.runs.folder import RUN_NAME, SAMPLES, RunFolder, step_name, steps_in
from accel_gpt.runs.state import FORMAT

MANIFEST = "manifest.json"
RECORDS = "run.zip"
RECORD_FILES = (RUN_NAME, "run.json", "metrics.jsonl", "metrics.csv")  # the name first
TRIES = 3  # of a download whose bits flip on the way; assumption
LAUNCH = re.compile(r"launch_[0-9]{6}_[0-9a-f]{8}")


class Copy(NamedTuple):
    """A copy in the store. Later copies are greater."""

    launch: str
    """Name of the folder of the launch that made it."""
    step: int

    @property
    def path(self) -> str:
        """Return its path in the store."""
        return f"{self.launch}/{step_name(self.step)}"


class CopyStore(Store):
    """The folder or URL of `checkpoint.copy_to`.

    The first access raises `UserError` if the fsspec package for the URL is missing.
    """

    def __init__(self, url: str) -> None:
        # s3fs would raise its own error for altered objects; manifests have hashes for all stores
        unchecked = {"config_kwargs": {"response_checksum_validation": "when_required"}}
        options = unchecked if url.startswith(("s3://", "s3a://")) else {}
        super().__init__(url if "://" in url else str(Path(url).resolve()), options)

    @cached_property
    def hub(self) -> Any:
        """Return the repository, if the Hub has the copies; None for its buckets."""
        place = parse_url(self.url) if self.url.startswith(SCHEME) else None
        return place if place and place.is_repo else None  # a bucket has no commits

    # ----------------------------------------------------------------------- list

    def launches(self) -> list[str]:
        """Return the launches of the run, the one that owns the copies last."""
        return [name for name in self.names() if LAUNCH.fullmatch(name)]

    def all_copies(self) -> list[Copy]:
        """Return all copies, complete or not, the newest last."""
        return [
            Copy(launch, step)
            for launch in self.launches()
            for step in steps_in(self.names(launch))
        ]

    def copies(self) -> list[Copy]:
        """Return the copies that have a manifest, the newest last."""
        return [copy for copy in self.all_copies() if self.is_complete(copy)]

    def is_complete(self, copy: Copy) -> bool:
        """Return whether a copy has a manifest."""
        return MANIFEST in self.names(copy.path)

    # ----------------------------------------------------------------------- write

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the store."""
        if self.hub:
            self.create_repo()
            self.commit(name.partition("/")[0], {name: content}, obsolete=[])
        else:
            self.make_folder(f"{self.root}/{name}".rpartition("/")[0])
            self.files.pipe_file(f"{self.root}/{name}", content)

    def add(
        self, checkpoint: Path, copy: Copy, obsolete: Sequence[str], check: Callable[[], None]
    ) -> None:
        """Copy the files of a checkpoint, its manifest last; remove the `obsolete` folders.

        `check` is called before the manifest is written and before folders are removed, and raises
        an error if another launch owns the copies.
        """
        listed = read_manifest(checkpoint)
        files: dict[str, Path | bytes] = {name: checkpoint / name for name in sorted(listed)}
        with tempfile.TemporaryDirectory(prefix=".copy_", dir=checkpoint.parent) as temporary:
            records = Path(temporary, RECORDS)
            pack_records(checkpoint.parent.parent, records)
            record = SavedFile(records.stat().st_size, sha256(records))
            write_manifest(Path(temporary), {**listed, RECORDS: record})
            files |= {RECORDS: records, MANIFEST: Path(temporary, MANIFEST)}
            if self.hub:
                named = {f"{copy.path}/{name}": path for name, path in files.items()}
                check()
                self.commit(checkpoint.name, named, obsolete)
                return
            target = f"{self.root}/{copy.path}"
            self.make_folder(target)
            if self.files.exists(f"{target}/{MANIFEST}"):  # this step was trained again
                self.files.rm_file(f"{target}/{MANIFEST}")
            for name, path in files.items():
                fault_point("copy.file")
                if name == MANIFEST:
                    check()
                self.files.put_file(str(path), f"{target}/{name}")
            if obsolete:
                check()  # another launch may be restoring one of them
            for folder in obsolete:
                with contextlib.suppress(FileNotFoundError):  # an incomplete copy has no manifest
                    self.files.rm_file(f"{self.root}/{folder}/{MANIFEST}")
                self.files.rm(f"{self.root}/{folder}", recursive=True)

    # ----------------------------------------------------------------------- restore

    def restore(self, copy: Copy, run: Path) -> list[Path]:
        """Download a copy into the folder of a run: the checkpoint, and the records.

        The folder's own checkpoints of this step and later ones are set aside; returns where.
        Raises `CheckpointError` with the address of the object that is missing or altered.
        """
        folder = run / "checkpoints"
        temporary = folder / f".tmp_{step_name(copy.step)}"
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            self.download_copy(copy, temporary)
            listed = dict(read_manifest(temporary))
            if listed.pop(RECORDS, None):
                unpack_records(temporary / RECORDS, run)
                write_manifest(temporary, listed)
                (temporary / RECORDS).unlink()
            later = [path for step, path in RunFolder(run).checkpoints.items() if step >= copy.step]
            aside = [set_aside(path, "superseded") for path in later]
            temporary.rename(folder / step_name(copy.step))
            sync(folder)
            return aside
        except CheckpointError as error:
            address = f"{self.url}/{copy.path}"
            raise CheckpointError(str(error).replace(str(temporary), address)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def download_copy(self, copy: Copy, to: Path) -> None:
        """Download the files of a copy; those that arrive damaged once more, see `TRIES`."""
        for tries_left in reversed(range(TRIES)):
            try:
                self.download_file(copy, to / MANIFEST)
                for name, saved in read_manifest(to).items():
                    if find_damage([Expected(to / name, saved.size, saved.sha256)]):
                        self.download_file(copy, to / name)
                verify_checkpoint(to)
                return
            except CheckpointError:
                if not tries_left:
                    raise

    def download_file(self, copy: Copy, file: Path) -> None:
        """Download an object of a copy if it exists; raise `UserError` if it cannot be read now."""
        name = f"{copy.path}/{file.name}"
        with store_errors(f"{self.url}/{name} cannot be downloaded"):
            try:
                self.files.get_file(f"{self.root}/{name}", str(file))
                sync(file)
            except FileNotFoundError:
                file.unlink(missing_ok=True)

    # ----------------------------------------------------------------------- on the Hub

    def create_repo(self) -> None:
        """Create the private repository if there is none."""
        from huggingface_hub import HfApi

        assert self.hub is not None
        HfApi().create_repo(self.hub.id, repo_type=self.hub.type, private=True, exist_ok=True)

    def commit(
        self, title: str, files: Mapping[str, Path | bytes], obsolete: Sequence[str]
    ) -> None:
        """Add files and remove the `obsolete` folders in one commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        assert self.hub is not None
        folder = f"{self.hub.path_in_repo}/".lstrip("/")
        operations: list[Any] = []
        for name, content in files.items():
            operations.append(CommitOperationAdd(f"{folder}{name}", content))
        for name in obsolete:
            if name.partition("/")[0] in obsolete and "/" in name:
                continue  # with its launch
            operations.append(CommitOperationDelete(f"{folder}{name}/", is_folder=True))
        HfApi().create_commit(
            repo_id=self.hub.id,
            operations=operations,
            commit_message=title,
            repo_type=self.hub.type,
            revision=self.hub.revision,
        )


# --------------------------------------------------------------------------- records


def pack_records(run: Path, file: Path) -> None:
    """Write the records of a run to a ZIP file. They may be newer than the checkpoint.

    A launch removes the records after the step that it resumes from.
    """
    names = [*RECORD_FILES, *(f"samples/{path.name}" for path in RunFolder(run).samples.values())]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as records:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a user may have removed one
                records.writestr(name, (run / name).read_bytes())


def unpack_records(file: Path, run: Path) -> None:
    """Write the records in a ZIP file into the folder of a run, and nothing else."""
    (run / "samples").mkdir(exist_ok=True)
    with zipfile.ZipFile(file) as records:
        for name in records.namelist():
            folder, _, last = name.rpartition("/")
            if name in RECORD_FILES or (folder == "samples" and SAMPLES.fullmatch(last)):
                write_file(run / name, [records.read(name)])


def write_manifest(folder: Path, files: Mapping[str, SavedFile]) -> None:
    """Write a manifest of these files."""
    listed = {name: asdict(file) for name, file in sorted(files.items())}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": listed})
