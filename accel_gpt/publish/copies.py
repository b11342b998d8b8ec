"""Copy checkpoints to another disk, an fsspec URL or the Hub, and restore them from there.

    {checkpoint.copy_to}/run_name    the run that the copies belong to
    {checkpoint.copy_to}/step_00001000/
        model.safetensors, ...      the files of a checkpoint
        run.zip                     the records of the run: metrics, launches, samples, its name
        manifest.json               written last: size and SHA-256 of each file above

If a run has no checkpoint, it resumes from the newest intact copy, with the records. A copy without
a manifest is incomplete and is never used. On the Hub, each copy is one commit.
"""

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.remote import Store
from accel_gpt.errors import (
    AccelGPTError,
    BusyError,
    CheckpointError,
    UserError,
    one_line,
    require,
)
from accel_gpt.files import fault_point, sha256, sync, write_file
from accel_gpt.hub import SCHEME, parse_url
from accel_gpt.runs.checkpoint import SavedFile, read_manifest, verify_checkpoint, write_json
from accel_gpt.runs.folder import RUN_NAME, SAMPLES, RunFolder, run_name, step_name, steps_in
from accel_gpt.runs.state import FORMAT

MANIFEST = "manifest.json"
RECORDS = "run.zip"
RECORD_FILES = (RUN_NAME, "run.json", "metrics.jsonl", "metrics.csv")  # the name first
TRIES = 3  # of a download whose bits flip on the way; assumption


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Raise any error of a store in the block as a `UserError` that begins with `problem`."""
    try:
        yield
    except AccelGPTError:
        raise
    except Exception as error:  # from botocore, huggingface_hub, OSError, ...
        raise UserError(f"{problem}: {one_line(error)}") from None


def copy_checkpoint(
    checkpoint: Path, url: str, keep_last: int, run: str, if_missing: bool = False
) -> None:
    """Copy a checkpoint, then keep only it and the copies before it, at most `keep_last` in all.

    `run`: its `run_name`. `if_missing`: do nothing if this step or a later one has a complete copy.
    Raises `UserError` if the store cannot be written, `BusyError` if the copies belong to another
    run.
    """
    with explained("it cannot be written"):
        store = CopyStore(url)
        store.claim(run)
        step = int(checkpoint.name.removeprefix("step_"))
        copied = store.steps()
        if if_missing and any(store.is_complete(other) for other in copied if other >= step):
            return
        kept = [*(other for other in copied if other < step), step][-keep_last:]
        store.write(checkpoint, obsolete=[other for other in copied if other not in kept])


class Copies:
    """The copies of the run in `out_dir`: restored before it starts, claimed when it starts."""

    def __init__(self, url: str, out_dir: Path, resume: str, log: Callable[[str], None]) -> None:
        self.url = url
        self.out_dir = out_dir
        self.resume = resume  # checkpoint.resume
        self.log = log

    @cached_property
    def store(self) -> "CopyStore":
        """Return the store of the copies; only rank 0 opens it."""
        return CopyStore(self.url)

    def open(self) -> None:
        """Restore the newest intact copy if the run has no checkpoint.

        Raises `UserError` if the store cannot be read, if it is a file or lies in `out_dir`, if it
        holds copies and `resume` is never, if the copies belong to another run, or if the run went
        on elsewhere and has a newer copy, which the next copy would replace. Raises
        `CheckpointError` if all copies are damaged. An object that cannot be read now is not
        damaged.
        """
        url = self.url
        require(not Path(url).is_file(), f"checkpoint.copy_to {url} is a file; set a folder")
        require(
            "://" in url or not Path(url).resolve().is_relative_to(self.out_dir.resolve()),
            f"checkpoint.copy_to {url} lies in out_dir {self.out_dir}; set a folder elsewhere",
        )
        run = RunFolder(self.out_dir)
        with explained(f"checkpoint.copy_to {url} cannot be read"):
            owner = self.store.read_owner()
            steps = [step for step in self.store.steps() if self.store.is_complete(step)]
        is_other = owner not in ("", run.stored_name)
        if is_other and steps and (run.checkpoints or run.launches):
            raise UserError(self.store.owned_by(owner))
        if run.checkpoints:
            newest = max(run.checkpoints)
            require(
                max(steps, default=0) <= newest,
                f"checkpoint.copy_to {url} holds step {max(steps, default=0):,}, but "
                f"{self.out_dir} has no checkpoint after step {newest:,}; remove its checkpoints "
                "to resume from the copy, or set another checkpoint.copy_to",
            )
            return
        require(
            not steps or self.resume != "never",
            f"checkpoint.resume is never but checkpoint.copy_to {url} holds copies of a run; set "
            "another checkpoint.copy_to, or remove the copies",
        )
        self.restore_newest(steps)

    def restore_newest(self, steps: Sequence[int]) -> None:
        """Restore the newest copy of these steps that is intact, if there are any."""
        for step in reversed(steps):
            try:
                self.store.restore(step, self.out_dir)
            except CheckpointError as error:
                self.log(f"WARNING: {error}; falling back to an earlier copy")
            else:
                self.log(f"downloaded step {step:,} from {self.url}")
                return
        if steps:
            raise CheckpointError(
                f"all copies in checkpoint.copy_to {self.url} are damaged; to start from scratch, "
                "set another checkpoint.copy_to"
            )

    def claim(self) -> str:
        """Make this run the owner of the copies; return its `run_name`.

        It takes the place of a run without copies. Raises `BusyError` if the copies belong to
        another run. If the store cannot be written now, only logs it: each copy claims them again.
        """
        name = run_name(self.out_dir)
        try:
            with explained(f"checkpoint.copy_to {self.url} cannot be written"):
                if not self.store.steps():
                    self.store.write_owner(name)
                self.store.claim(name)
        except UserError as error:
            self.log(f"WARNING: {error}")
        return name


# --------------------------------------------------------------------------- the store


class CopyStore:
    """The folder or URL of `checkpoint.copy_to`.

    Raises `UserError` if the fsspec package for the URL is missing.
    """

    def __init__(self, url: str) -> None:
        # s3fs would raise its own error for altered objects; manifests have hashes for all stores
        unchecked = {"config_kwargs": {"response_checksum_validation": "when_required"}}
        options = unchecked if url.startswith(("s3://", "s3a://")) else {}
        store = Store(url if "://" in url else str(Path(url).resolve()), options)
        self.system, root = store.system  # of fsspec
        self.root = root.rstrip("/")
        self.given_url = url
        self.url = store.url
        place = parse_url(url) if url.startswith(SCHEME) else None
        # the repository, if the Hub has the copies; its buckets have no commits
        self.hub = place if place and place.is_repo else None

    # ----------------------------------------------------------------------- owners

    def read_owner(self) -> str:
        """Return the `run_name` of the run that the copies belong to; "" if there is none."""
        if RUN_NAME not in self.names():
            return ""
        return str(self.system.cat_file(f"{self.root}/{RUN_NAME}").decode().strip())

    def claim(self, run: str) -> None:
        """Make `run` the owner if there is none; raise `BusyError` if it is another run."""
        owner = self.read_owner()
        if not owner:
            self.write_owner(run)
        elif owner != run:
            raise BusyError(self.owned_by(owner))

    def write_owner(self, run: str) -> None:
        """Write the `run_name` of the run that the copies belong to."""
        content = f"{run}\n".encode()
        if self.hub:
            self.create_repo()
            self.commit(run, {RUN_NAME: content}, obsolete=[])
        else:
            self.system.makedirs(self.root, exist_ok=True)
            self.system.pipe_file(f"{self.root}/{RUN_NAME}", content)

    def owned_by(self, owner: str) -> str:
        """Return why another run may not use the copies."""
        return (
            f"checkpoint.copy_to {self.given_url} belongs to run {owner}; set another "
            "checkpoint.copy_to"
        )

    # ----------------------------------------------------------------------- copies

    def names(self) -> list[str]:
        """Return the names of the files and folders in the store."""
        self.system.invalidate_cache()
        try:
            entries = self.system.ls(self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    def steps(self) -> list[int]:
        """Return the steps of all copies, complete or not, ascending."""
        return steps_in(self.names())

    def path(self, step: int, file: str = "") -> str:
        """Return the path of a copy, or of a file in it."""
        return f"{self.root}/{step_name(step)}/{file}".rstrip("/")

    def is_complete(self, step: int) -> bool:
        """Return whether a copy has a manifest."""
        return bool(self.system.exists(self.path(step, MANIFEST)))

    def write(self, checkpoint: Path, obsolete: Sequence[int]) -> None:
        """Copy the files of a checkpoint, its manifest last; remove the copies of other steps."""
        listed = read_manifest(checkpoint)
        files: dict[str, Path | bytes] = {name: checkpoint / name for name in sorted(listed)}
        with tempfile.TemporaryDirectory(prefix=".copy_", dir=checkpoint.parent) as temporary:
            records = Path(temporary, RECORDS)
            pack_records(checkpoint.parent.parent, records)
            record = SavedFile(records.stat().st_size, sha256(records))
            write_manifest(Path(temporary), {**listed, RECORDS: record})
            files |= {RECORDS: records, MANIFEST: Path(temporary, MANIFEST)}
            if self.hub:
                named = {f"{checkpoint.name}/{name}": path for name, path in files.items()}
                self.commit(checkpoint.name, named, obsolete)
                return
            target = f"{self.root}/{checkpoint.name}"
            self.system.makedirs(target, exist_ok=True)
            if self.system.exists(f"{target}/{MANIFEST}"):  # this step was trained again
                self.system.rm_file(f"{target}/{MANIFEST}")
            for name, path in files.items():
                fault_point("copy.file")
                self.system.put_file(str(path), f"{target}/{name}")
            for step in obsolete:
                with contextlib.suppress(FileNotFoundError):  # an incomplete copy has no manifest
                    self.system.rm_file(self.path(step, MANIFEST))
                self.system.rm(self.path(step), recursive=True)

    def restore(self, step: int, run: Path) -> None:
        """Download a copy into the folder of a run: the checkpoint, and the records.

        Raises `CheckpointError` with the address of the object that is missing or altered.
        """
        folder = run / "checkpoints"
        temporary = folder / f".tmp_{step_name(step)}"
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            self.download(step, temporary)
            listed = dict(read_manifest(temporary))
            if listed.pop(RECORDS, None):  # a checkpoint that a user put there has none
                unpack_records(temporary / RECORDS, run)
                write_manifest(temporary, listed)
                (temporary / RECORDS).unlink()
            temporary.rename(folder / step_name(step))
            sync(folder)
        except CheckpointError as error:
            address = f"{self.url}/{step_name(step)}"
            raise CheckpointError(str(error).replace(str(temporary), address)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def download(self, step: int, to: Path) -> None:
        """Download the files of a copy; those that arrive damaged once more, see `TRIES`."""
        for tries_left in reversed(range(TRIES)):
            try:
                self.download_file(step, to / MANIFEST)
                for name, saved in read_manifest(to).items():
                    if find_damage([Expected(to / name, saved.size, saved.sha256)]):
                        self.download_file(step, to / name)
                verify_checkpoint(to)
                return
            except CheckpointError:
                if not tries_left:
                    raise

    def download_file(self, step: int, file: Path) -> None:
        """Download an object of a copy if it exists; raise `UserError` if it cannot be read now."""
        address = f"{self.url}/{step_name(step)}/{file.name}"
        with explained(f"{address} cannot be downloaded"):
            try:
                self.system.get_file(self.path(step, file.name), str(file))
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
        self, title: str, files: Mapping[str, Path | bytes], obsolete: Sequence[int]
    ) -> None:
        """Add files and remove the copies of the `obsolete` steps in one commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        assert self.hub is not None
        folder = f"{self.hub.path_in_repo}/".lstrip("/")
        operations: list[Any] = []
        for name, content in files.items():
            operations.append(CommitOperationAdd(f"{folder}{name}", content))
        for step in obsolete:
            removed = f"{folder}{step_name(step)}/"
            operations.append(CommitOperationDelete(removed, is_folder=True))
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
