"""Copies of checkpoints on another disk, in a store that fsspec writes to, or on the Hub.

    {checkpoint.copy_to}/step_00001000/     the files of a checkpoint, its manifest last

`uploader.py` starts this file as a child process that makes one copy:

    python -m accel_gpt.training.backup CHECKPOINT URL KEEP_LAST [--unless_newer]

A run without checkpoints of its own resumes from the newest intact copy. A copy without a manifest
is incomplete and never used. On the Hub, each copy is one commit.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.console import exit_on_sigterm, run_main
from accel_gpt.data.remote import Store, reason
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import fault_point, sync
from accel_gpt.training.checkpoint import verify
from accel_gpt.training.run_folder import RunFolder, step_name, steps_in

MANIFEST = "manifest.json"


def main(argv: Sequence[str]) -> int:
    """Copy one checkpoint to a folder or URL; return the exit code."""
    checkpoint, url, keep_last, *flags = argv
    exit_on_sigterm()
    try:
        copy_checkpoint(Path(checkpoint), url, int(keep_last), unless_newer=bool(flags))
    except UserError:
        raise
    except Exception as error:  # of botocore, huggingface_hub, OSError, ...
        raise UserError(reason(error)) from None
    return 0


def copy_checkpoint(checkpoint: Path, url: str, keep_last: int, unless_newer: bool) -> None:
    """Copy a checkpoint, and remove later copies, left by a roll back, and all but `keep_last`.

    `unless_newer`: do nothing if there is a copy of this step or of a later one.
    """
    step = int(checkpoint.name.removeprefix("step_"))
    system, root = open_store(url)
    on_hub = url.startswith("hf://") and not root.startswith("buckets/")
    if on_hub:
        create_backup_repo(root)
    copied = copied_steps(system, root)
    if unless_newer and any(is_complete(system, root, one) for one in copied if one >= step):
        return
    kept = sorted({step, *(one for one in copied if one < step)})[-keep_last:]
    former = [one for one in copied if one not in kept]
    if on_hub:
        commit_copy(system, root, checkpoint, former)
        return
    put_copy(system, f"{root}/{checkpoint.name}", checkpoint)
    for one in former:
        remove_copy(system, f"{root}/{step_name(one)}")


def put_copy(system: Any, target: str, checkpoint: Path) -> None:
    """Copy the files of a checkpoint, its manifest last."""
    manifest = (checkpoint / MANIFEST).read_bytes()
    system.makedirs(target, exist_ok=True)
    if system.exists(f"{target}/{MANIFEST}"):  # the step was trained once more
        system.rm_file(f"{target}/{MANIFEST}")
    for path in sorted(checkpoint.iterdir()):
        if path.name != MANIFEST:
            fault_point("copy.file")
            system.put_file(str(path), f"{target}/{path.name}")
    if (checkpoint / MANIFEST).read_bytes() != manifest:  # replaced while it was copied
        raise UserError(f"{checkpoint} changed while it was copied")
    system.put_file(str(checkpoint / MANIFEST), f"{target}/{MANIFEST}")


def remove_copy(system: Any, target: str) -> None:
    """Remove a copy, its manifest first."""
    with contextlib.suppress(FileNotFoundError):  # an incomplete copy
        system.rm_file(f"{target}/{MANIFEST}")
    system.rm(target, recursive=True)


def create_backup_repo(root: str) -> None:
    """Create the repository of a path on the Hub, private, unless it exists."""
    from huggingface_hub import HfApi

    prefix, _, rest = root.partition("/")
    repo_type = prefix.removesuffix("s") if prefix in ("datasets", "spaces") else None
    owner, name = (rest if repo_type else root).split("/")[:2]
    repo = f"{owner}/{name.partition('@')[0]}"
    HfApi().create_repo(repo, repo_type=repo_type, private=True, exist_ok=True)


def commit_copy(system: Any, root: str, checkpoint: Path, former: Sequence[int]) -> None:
    """Add a checkpoint to a repository of the Hub and remove former copies, as one commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    place = system.resolve_path(root)
    folder = f"{place.path_in_repo}/" if place.path_in_repo else ""
    added = [
        CommitOperationAdd(f"{folder}{checkpoint.name}/{path.name}", path)
        for path in sorted(checkpoint.iterdir())
    ]
    deleted = [
        CommitOperationDelete(f"{folder}{step_name(step)}/", is_folder=True) for step in former
    ]
    HfApi().create_commit(
        repo_id=place.repo_id,
        operations=[*added, *deleted],
        commit_message=checkpoint.name,
        repo_type=place.repo_type,
        revision=place.revision,
    )


# --------------------------------------------------------------------------- reading


def open_store(url: str) -> tuple[Any, str]:
    """Open `checkpoint.copy_to`; return its file system and the path of its folder.

    Raises `UserError` if its package is missing.
    """
    system, root = Store(url if "://" in url else str(Path(url).resolve())).system
    return system, root.rstrip("/")


def copied_steps(system: Any, root: str) -> list[int]:
    """Return the steps of all copies in a store, ascending, incomplete ones too."""
    system.invalidate_cache()
    try:
        names = [entry["name"].rstrip("/") for entry in system.ls(root, detail=True)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return steps_in(name.rpartition("/")[2] for name in names)


def is_complete(system: Any, root: str, step: int) -> bool:
    """Return whether a copy has a manifest."""
    return bool(system.exists(f"{root}/{step_name(step)}/{MANIFEST}"))


def fetch_backup(config: Config, log: Callable[[str], None]) -> None:
    """Download the newest intact copy for a run that has no checkpoint of its own.

    Raises `UserError` if the store cannot be opened or read, or if checkpoints would be lost there,
    and `CheckpointError` if all copies are damaged.
    """
    url = str(config.checkpoint.copy_to)
    system, root = open_store(url)
    if "://" not in url:
        require(not Path(url).is_file(), f"checkpoint.copy_to {url} is a file; give a folder")
        require(
            not Path(url).resolve().is_relative_to(Path(config.out_dir).resolve()),
            f"checkpoint.copy_to {url} lies in out_dir {config.out_dir}; give a folder elsewhere",
        )
    if RunFolder(config.out_dir).checkpoints:
        return
    try:
        steps = copied_steps(system, root)
        require(
            not steps or config.checkpoint.resume != "never",
            f"checkpoint.resume is never but checkpoint.copy_to {url} holds copies of a run; "
            "set another, or remove them",
        )
        complete = [step for step in steps if is_complete(system, root, step)]
        folder = Path(config.out_dir) / "checkpoints"
        for step in reversed(complete):
            if download_copy(system, f"{root}/{step_name(step)}", folder, log):
                log(f"step {step:,} was downloaded from {url}")
                return
    except UserError:
        raise
    except Exception as error:  # of botocore, huggingface_hub, OSError, ...
        raise UserError(f"checkpoint.copy_to {url} cannot be read: {reason(error)}") from None
    if complete:
        raise CheckpointError(
            f"all copies in checkpoint.copy_to {url} are damaged; set another one to start from "
            "scratch"
        )


def download_copy(system: Any, source: str, folder: Path, log: Callable[[str], None]) -> bool:
    """Download one copy into a folder of checkpoints; return whether it is intact."""
    name = source.rpartition("/")[2]
    temporary = folder / f".tmp_{name}"
    temporary.mkdir(parents=True, exist_ok=True)
    for entry in system.ls(source, detail=False):
        file = temporary / entry.rpartition("/")[2]
        system.get_file(entry, str(file))
        sync(file)
    try:
        verify(temporary)
    except CheckpointError as error:
        log(f"WARNING: {error}; a copy before it is taken")
        shutil.rmtree(temporary)
        return False
    temporary.rename(folder / name)
    sync(folder)
    return True


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
