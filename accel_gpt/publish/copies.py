"""Copy checkpoints to another disk, an fsspec URL or the Hub, and restore them from there.

    {checkpoint.copy_to}/owner.json     the run that the copies belong to, and its last launch
    {checkpoint.copy_to}/step_00001000/
        model.safetensors, ...      the files of a checkpoint
        run.zip                     the records of the run: metrics, launches, samples, its name
        manifest.json               written last: size and SHA-256 of each file above

If a run has no checkpoint, it resumes from the newest intact copy, with the records. A copy without
a manifest is incomplete and is never used. On the Hub, each copy is one commit.
"""

import contextlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.remote import Store, reason
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import fault_point, sha256, strict_json, sync, write_file
from accel_gpt.json_files import Count
from accel_gpt.training.checkpoint import SavedFile, read_manifest, verify_checkpoint, write_json
from accel_gpt.training.run_folder import (
    RUN_NAME,
    SAMPLES,
    RunFolder,
    run_name,
    step_name,
    steps_in,
)
from accel_gpt.training.state import FORMAT

MANIFEST = "manifest.json"
RECORDS = "run.zip"
RECORD_FILES = ("run.json", "metrics.jsonl", "metrics.csv", RUN_NAME)
OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    """The launch that writes the copies: the content of owner.json."""

    run: str
    """Its `run_name`."""
    out_dir: str
    host: str
    launch: Count
    """Counts the launches that have used the place."""


def copy_checkpoint(
    checkpoint: Path, url: str, keep_last: int, owner: Mapping[str, Any], if_missing: bool = False
) -> None:
    """Copy a checkpoint, then keep only it and the copies before it, at most `keep_last` in all.

    `owner`: the fields of `Owner`. `if_missing`: do nothing if this step or a later one has a
    complete copy. Raises `UserError` if the store cannot be written, or if another launch owns it.
    """
    try:
        store = CopyStore(url)
        store.claim(Owner(**owner))
        step = int(checkpoint.name.removeprefix("step_"))
        copied = store.steps()
        if if_missing and any(store.is_complete(other) for other in copied if other >= step):
            return
        before = [other for other in copied if other < step]
        kept = [*before, step][-keep_last:]
        store.write(checkpoint, obsolete=[other for other in copied if other not in kept])
    except Exception as error:  # from botocore, huggingface_hub, OSError, ...
        raise UserError(reason(error)) from None


class Copies:
    """The copies of the run in `out_dir`: restored before it starts, claimed when it starts.

    So a launch that is refused for its config takes no copies from the run that makes them.
    """

    def __init__(self, url: str, out_dir: Path, resume: str, log: Callable[[str], None]) -> None:
        self.url = url
        self.out_dir = out_dir
        self.resume = resume  # checkpoint.resume
        self.log = log
        self.before: Owner | None = None  # who owned them when this launch began
        self.restored: list[Path] = []  # what it brought into the folder of the run

    def open(self) -> None:
        """Restore the newest intact copy if the run has no checkpoint.

        Raises `UserError` if the store cannot be opened or read, if it is a file or lies in
        `out_dir`, if it holds copies and `resume` is never, or if the copies belong to another run:
        to one that is training, or to any if `out_dir` holds a run. A run without checkpoints may
        take the place of a run without copies. Raises `CheckpointError` if all copies are damaged.
        An object that cannot be read now is not damaged.
        """
        url = self.url
        store = CopyStore(url)
        require(not Path(url).is_file(), f"checkpoint.copy_to {url} is a file; set a folder")
        require(
            "://" in url or not Path(url).resolve().is_relative_to(self.out_dir.resolve()),
            f"checkpoint.copy_to {url} lies in out_dir {self.out_dir}; set a folder elsewhere",
        )
        run = RunFolder(self.out_dir)
        try:
            self.before = store.read_owner()
            steps = store.steps()
            complete = [step for step in steps if not run.checkpoints and store.is_complete(step)]
        except Exception as error:  # from botocore, huggingface_hub, OSError, ...
            raise UserError(f"checkpoint.copy_to {url} cannot be read: {reason(error)}") from None
        if self.before:
            holds_run = bool(run.checkpoints) or (bool(run.launches) and bool(steps))
            is_other = holds_run and self.before.run != run.stored_name
            if is_other or is_training(self.before, self.out_dir):
                raise store.owned_by(self.before)
        require(
            not steps or bool(run.checkpoints) or self.resume != "never",
            f"checkpoint.resume is never but checkpoint.copy_to {url} holds copies of a run; set "
            "another checkpoint.copy_to, or remove the copies",
        )
        for step in reversed(complete):
            try:
                self.restored = store.restore(step, self.out_dir)
            except CheckpointError as error:
                self.log(f"WARNING: {error}; falling back to an earlier copy")
            else:
                self.log(f"downloaded step {step:,} from {url}")
                return
        if complete:
            raise CheckpointError(
                f"all copies in checkpoint.copy_to {url} are damaged; to start from scratch, set "
                "another checkpoint.copy_to"
            )

    def claim(self) -> Owner:
        """Make this launch the owner of the copies; return what it wrote.

        Raises `UserError` if another launch has claimed them since `open`. If the store cannot be
        written now, only logs it: each copy claims them again.
        """
        owner = Owner(
            run=run_name(self.out_dir),
            out_dir=str(self.out_dir.resolve()),
            host=os.uname().nodename,
            launch=self.before.launch + 1 if self.before else 1,
        )
        self.restored = []
        try:
            CopyStore(self.url).claim(owner)
        except UserError:
            raise
        except Exception as error:  # from botocore, huggingface_hub, OSError, ...
            self.log(f"WARNING: checkpoint.copy_to {self.url} cannot be written: {reason(error)}")
        return owner

    def discard_restored(self) -> None:
        """Remove what `open` restored, if the run has not started."""
        for path in self.restored:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def is_training(owner: Owner, out_dir: Path) -> bool:
    """Return whether the launch that owns copies trains in another folder, if it can be seen."""
    folder = Path(owner.out_dir)
    run = RunFolder(folder)
    return folder != out_dir.resolve() and run.stored_name == owner.run and run.in_use


def require_intact(file: Expected) -> None:
    """Raise `CheckpointError` if a file is missing or altered."""
    damage = find_damage([file])
    if damage:
        raise CheckpointError(str(damage))


def pack_records(run: Path, file: Path) -> None:
    """Write the records of a run to a ZIP file. They may be newer than the checkpoint.

    A launch removes the records after the step that it resumes from.
    """
    names = [*RECORD_FILES, *(f"samples/{path.name}" for path in RunFolder(run).samples.values())]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as records:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a user may have removed one
                records.writestr(name, (run / name).read_bytes())


def unpack_records(file: Path, run: Path) -> list[Path]:
    """Write the records in a ZIP file into the folder of a run, and nothing else; list them."""
    (run / "samples").mkdir(exist_ok=True)
    written = []
    with zipfile.ZipFile(file) as records:
        for name in records.namelist():
            folder, _, last = name.rpartition("/")
            if name in RECORD_FILES or (folder == "samples" and SAMPLES.fullmatch(last)):
                write_file(run / name, [records.read(name)])
                written.append(run / name)
    return written


def write_manifest(folder: Path, files: Mapping[str, SavedFile]) -> None:
    """Write a manifest of these files."""
    listed = {name: asdict(file) for name, file in sorted(files.items())}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": listed})


class CopyStore:
    """The folder or URL of `checkpoint.copy_to`.

    Raises `UserError` if the fsspec package for the URL is missing.
    """

    def __init__(self, url: str) -> None:
        # s3fs would raise its own error for altered objects; manifests have hashes for all stores
        unchecked = {"config_kwargs": {"response_checksum_validation": "when_required"}}
        options = unchecked if url.startswith(("s3://", "s3a://")) else {}
        store = Store(url if "://" in url else str(Path(url).resolve()), options)
        system, root = store.system
        self.given_url = url
        self.url = store.url
        self.system = system  # of fsspec
        self.root = root.rstrip("/")
        # the Hub's buckets have no commits
        self.on_hub = url.startswith("hf://") and not root.startswith("buckets/")

    def path(self, step: int, file: str = "") -> str:
        """Return the path of a copy, or of a file in it."""
        return f"{self.root}/{step_name(step)}/{file}".rstrip("/")

    def read_owner(self) -> Owner | None:
        """Read who owns the copies; None if nobody does, or if the file is damaged."""
        self.system.invalidate_cache()
        try:
            return msgspec.json.decode(self.system.cat_file(f"{self.root}/{OWNER}"), type=Owner)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None

    def claim(self, owner: Owner) -> None:
        """Make a launch the owner of the copies.

        Raises `UserError` if a later launch owns them, or another one that began at the same time.
        """
        self.create_repository()
        before = self.read_owner()
        if before is None or before.launch < owner.launch:
            with contextlib.suppress(FileExistsError):  # another launch was faster
                self.write_owner(owner, is_first=before is None)
        now = self.read_owner()
        if now and now != owner:
            raise self.owned_by(now)

    def write_owner(self, owner: Owner, is_first: bool) -> None:
        """Write `owner.json`; if it is the first, raise `FileExistsError` if there is one.

        Some stores overwrite it then.
        """
        content = strict_json(asdict(owner), indent=1).encode()
        if self.on_hub:
            self.commit(f"launch {owner.launch}: {owner.run}", {OWNER: content}, obsolete=[])
            return
        self.system.makedirs(self.root, exist_ok=True)
        path = f"{self.root}/{OWNER}"
        if is_first:
            with contextlib.suppress(NotImplementedError, ValueError):
                with self.system.open(path, "xb") as file:
                    file.write(content)
                return
        self.system.pipe_file(path, content)

    def owned_by(self, owner: Owner) -> UserError:
        """Return the error for a run that may not use the copies."""
        return UserError(
            f"checkpoint.copy_to {self.given_url} belongs to run {owner.run} of out_dir "
            f"{owner.out_dir} on {owner.host}; set another checkpoint.copy_to"
        )

    def steps(self) -> list[int]:
        """Return the steps of all copies, complete or not, ascending."""
        self.system.invalidate_cache()
        try:
            entries = self.system.ls(self.root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return steps_in(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries)

    def is_complete(self, step: int) -> bool:
        """Return whether a copy has a manifest."""
        return bool(self.system.exists(self.path(step, MANIFEST)))

    def write(self, checkpoint: Path, obsolete: Sequence[int]) -> None:
        """Copy the files of a checkpoint, its manifest last; remove the copies of other steps."""
        listed = read_manifest(checkpoint)
        files = {name: checkpoint / name for name in sorted(listed)}
        with tempfile.TemporaryDirectory(prefix=".copy_", dir=checkpoint.parent) as temporary:
            records = Path(temporary, RECORDS)
            pack_records(checkpoint.parent.parent, records)
            record = SavedFile(records.stat().st_size, sha256(records))
            write_manifest(Path(temporary), {**listed, RECORDS: record})
            files[RECORDS] = records
            files[MANIFEST] = Path(temporary, MANIFEST)
            if self.on_hub:
                named = {f"{checkpoint.name}/{name}": path for name, path in files.items()}
                self.commit(checkpoint.name, named, obsolete)
            else:
                self.put(checkpoint.name, files, obsolete)

    def put(self, copy: str, files: Mapping[str, Path], obsolete: Sequence[int]) -> None:
        """Write the files of a copy in this order; remove the copies of the `obsolete` steps."""
        target = f"{self.root}/{copy}"
        self.system.makedirs(target, exist_ok=True)
        if self.system.exists(f"{target}/{MANIFEST}"):  # this step was copied and trained again
            self.system.rm_file(f"{target}/{MANIFEST}")
        for name, path in files.items():
            fault_point("copy.file")
            self.system.put_file(str(path), f"{target}/{name}")
        for step in obsolete:
            self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a copy, its manifest first."""
        with contextlib.suppress(FileNotFoundError):  # an incomplete copy has none
            self.system.rm_file(self.path(step, MANIFEST))
        self.system.rm(self.path(step), recursive=True)

    def restore(self, step: int, run: Path) -> list[Path]:
        """Download a copy into the folder of a run: the checkpoint, and the records.

        Returns the checkpoint's folder and the files of the records. Raises `CheckpointError` with
        the address of the object that is missing or altered.
        """
        folder = run / "checkpoints"
        temporary = folder / f".tmp_{step_name(step)}"
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            self.download(step, temporary / MANIFEST, check=lambda: read_manifest(temporary))
            for name, saved in read_manifest(temporary).items():
                file = Expected(temporary / name, saved.size, saved.sha256)
                self.download(step, file.path, check=partial(require_intact, file))
            verify_checkpoint(temporary)
        except CheckpointError as error:
            shutil.rmtree(temporary)
            address = f"{self.url}/{step_name(step)}"
            raise CheckpointError(str(error).replace(str(temporary), address)) from None
        listed = dict(read_manifest(temporary))
        written = []
        if listed.pop(RECORDS, None):  # a checkpoint that a user put there has none
            written = unpack_records(temporary / RECORDS, run)
            write_manifest(temporary, listed)
            (temporary / RECORDS).unlink()
        temporary.rename(folder / step_name(step))
        sync(folder)
        return [folder / step_name(step), *written]

    def download(self, step: int, file: Path, check: Callable[[], object]) -> None:
        """Download an object of a copy, again if `check` raises `CheckpointError`.

        Raises `UserError` if the object cannot be downloaded now.
        """
        source = self.path(step, file.name)
        for is_last_try in (False, False, True):  # bits may flip on the way
            try:
                self.system.get_file(source, str(file))
                sync(file)
            except FileNotFoundError:
                file.unlink(missing_ok=True)  # `check` tells it
            except Exception as error:  # from botocore, huggingface_hub, OSError, ...
                address = f"{self.url}/{step_name(step)}/{file.name}"
                raise UserError(f"{address} cannot be downloaded: {reason(error)}") from None
            try:
                check()
                return
            except CheckpointError:
                if is_last_try:
                    raise

    # ----------------------------------------------------------------------- on the Hub

    def create_repository(self) -> None:
        """Create the store's private repository if it is on the Hub and does not exist."""
        from huggingface_hub import HfApi

        if not self.on_hub:
            return
        prefix, _, rest = self.root.partition("/")
        repo_type = prefix.removesuffix("s") if prefix in ("datasets", "spaces") else None
        owner, name = (rest if repo_type else self.root).split("/")[:2]
        repo = f"{owner}/{name.partition('@')[0]}"
        HfApi().create_repo(repo, repo_type=repo_type, private=True, exist_ok=True)

    def commit(
        self, title: str, files: Mapping[str, Path | bytes], obsolete: Sequence[int]
    ) -> None:
        """Add files and remove the copies of the `obsolete` steps in one commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        target = self.system.resolve_path(self.root)
        folder = f"{target.path_in_repo}/" if target.path_in_repo else ""
        operations: list[Any] = []
        for name, content in files.items():
            operations.append(CommitOperationAdd(f"{folder}{name}", content))
        for step in obsolete:
            removed = f"{folder}{step_name(step)}/"
            operations.append(CommitOperationDelete(removed, is_folder=True))
        HfApi().create_commit(
            repo_id=target.repo_id,
            operations=operations,
            commit_message=title,
            repo_type=target.repo_type,
            revision=target.revision,
        )
