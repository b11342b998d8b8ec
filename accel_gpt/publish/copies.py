"""Copy checkpoints to another disk, an fsspec URL or the Hub, and restore a run from there.

`copy_store.py` has the layout, `lease.py` lets one launch at a time write. If a run has no
checkpoint, or went on elsewhere, it resumes from the newest intact copy, with the records.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from accel_gpt.console import run_process
from accel_gpt.data.remote import store_errors
from accel_gpt.errors import CheckpointError, require
from accel_gpt.files import write_file
from accel_gpt.publish.copy_store import Copy, CopyStore
from accel_gpt.publish.lease import Lease, require_owner
from accel_gpt.publish.upload import upload_as_child
from accel_gpt.runs.folder import LAST_LAUNCH, RUN_NAME, RunFolder, run_name


def copy_checkpoint(
    checkpoint: str | Path, url: str, keep_last: int, launch: str, if_missing: bool = False
) -> None:
    """Copy a checkpoint, then keep only it and the copies before it, at most `keep_last` in all.

    `launch`: the folder of this launch in the store. `if_missing`: do nothing if this step or a
    later one has a complete copy. Raises `UserError` if the store cannot be written, `BusyError` if
    another launch owns the copies.
    """
    with store_errors("it cannot be written"):
        store = CopyStore(url)
        require_owner(store, launch)
        folder = Path(checkpoint)
        copy = Copy(launch, int(folder.name.removeprefix("step_")))
        listed = store.all_copies()
        complete = [other for other in listed if store.is_complete(other)]
        if if_missing and any(other.step >= copy.step for other in complete):
            return
        kept = [*(other for other in complete if other.step < copy.step), copy][-keep_last:]
        # another launch may take over now: what it writes is not obsolete
        own = [other for other in listed if other.launch <= launch]
        obsolete = [other.path for other in own if other not in kept]
        used = {other.launch for other in kept}
        obsolete += [other for other in store.launches() if other < launch and other not in used]
        store.add(folder, copy, obsolete, check=lambda: require_owner(store, launch))


class Copies:
    """The copies of the run in `out_dir`, which this launch owns after `open`.

    `on_lost`: see `Lease`.
    """

    def __init__(
        self,
        url: str,
        out_dir: Path,
        resume: str,
        log: Callable[[str], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url
        self.out_dir = out_dir
        self.resume = resume  # checkpoint.resume
        self.log = log
        self.store = CopyStore(url)
        self.lease = Lease(self.store, log, on_lost)
        self.restored: int | None = None  # the step that `open` has downloaded

    def open(self) -> None:
        """Become the owner; restore the newest intact copy if it is ahead of the run's folder.

        It is ahead if the run has no checkpoint, or went on elsewhere. Raises `UserError` if the
        store cannot be read or written, if it is a file or lies in `out_dir`, if it holds copies
        and `resume` is never, or if the copies belong to another run. Raises `CheckpointError` if
        all copies are damaged, and `BusyError` if another launch is alive. An object that cannot be
        read now is not damaged.
        """
        url = self.url
        require(not Path(url).is_file(), f"checkpoint.copy_to {url} is a file; set a folder")
        require(
            "://" in url or not Path(url).resolve().is_relative_to(self.out_dir.resolve()),
            f"checkpoint.copy_to {url} lies in out_dir {self.out_dir}; set a folder elsewhere",
        )
        run = RunFolder(self.out_dir)
        with store_errors(f"checkpoint.copy_to {url} cannot be read"):
            owner = self.lease.owner_run()
            has_copies = bool(self.store.copies())
        is_other = owner not in ("", run.stored_name)
        is_new = not run.checkpoints and not run.launches
        require(
            not (is_other and has_copies and not is_new),
            f"checkpoint.copy_to {url} belongs to run {owner}; set another checkpoint.copy_to",
        )
        require(
            not has_copies or self.resume != "never" or bool(run.checkpoints),
            f"checkpoint.resume is never but checkpoint.copy_to {url} holds copies of a run; set "
            "another checkpoint.copy_to, or remove the copies",
        )
        if is_new and has_copies:
            name = owner  # "": the copy that is restored has it
        else:
            name = run.stored_name or owner or run_name(self.out_dir)
        last, _, place = run.word(LAST_LAUNCH).partition(" ")
        if place != self.store.url:  # the launches of another place say nothing about this one
            last = ""
        self.lease.take(name, last)
        if name:
            write_file(self.out_dir / RUN_NAME, [f"{name}\n".encode()])
        with store_errors(f"checkpoint.copy_to {url} cannot be read"):
            copies = self.store.copies()  # the launch before may have finished another one
        if copies and is_ahead(copies[-1], last, max(run.checkpoints, default=0)):
            self.restore_newest(copies)
        word = f"{self.lease.launch} {self.store.url}\n"
        write_file(self.out_dir / LAST_LAUNCH, [word.encode()])

    def restore_newest(self, copies: Sequence[Copy]) -> None:
        """Restore the newest of these copies that is intact."""
        for copy in reversed(copies):
            try:
                aside = self.store.restore(copy, self.out_dir)
            except CheckpointError as error:
                self.log(f"WARNING: {error}; falling back to an earlier copy")
                continue
            for path in aside:
                self.log(f"WARNING: the run went on elsewhere, so {path} is set aside")
            self.restored = copy.step
            self.log(f"downloaded step {copy.step:,} from {self.store.url}")
            return
        raise CheckpointError(
            f"all copies in checkpoint.copy_to {self.url} are damaged; to start from scratch, set "
            "another checkpoint.copy_to"
        )


def is_ahead(copy: Copy, last: str, step: int) -> bool:
    """Return whether a copy is ahead of a folder whose newest checkpoint is of `step`, 0 for none.

    `last`: the launch of the folder that owned the copies last; "" if none did.
    """
    return not step or (copy.launch > last if last else copy.step > step)


def main(argv: Sequence[str]) -> int:
    """Make one upload; see `upload.py`."""
    return upload_as_child(argv, copy_checkpoint)


if __name__ == "__main__":
    run_process(main)
