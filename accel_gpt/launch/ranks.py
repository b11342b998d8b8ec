"""Share errors and decisions between all ranks of a run.

If one rank raises an error inside `all_ranks`, every rank raises an error. So no rank continues
alone or waits for the failed rank in a collective. `on_main` runs a function on rank 0 and shares
the result or error with all ranks. `require_all` checks a condition that is the same on all ranks.

The first failed rank raises its own error and prints it. The others raise a `RankError`, a
`PeerError` that ends them with the same exit code and no message.
"""

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_gpt.errors import AccelGPTError, PeerError, UserError

APPEARS_SECONDS = 2.0  # how long a rank waits for a file of another rank; assumption
MOST_SHOWN = 4  # most differences that an error lists
BACKENDS = ("gloo", "NCCL", "Connection closed by peer")  # in plain `RuntimeError`s of torch
_kept_groups: list[dist.ProcessGroup] = []  # see `keep_group`


class RankError(PeerError):
    """An error that another rank raised and prints. This rank ends with its exit code, silently."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise an error on every rank of `group` if any rank raises one inside; a collective.

    The first failed rank raises its own exception. Every other rank raises a `RankError` with the
    same text. Call no collective inside: the failed rank would not join it. `group` None: all
    ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failure: tuple[str, int] | None = None
    if error is not None:
        exit_code = getattr(error, "exit_code", PeerError.exit_code)
        failure = (str(error) or type(error).__name__, exit_code)
    failures = all_gather(failure, group)
    for rank, first in enumerate(failures):
        if first is None:
            continue
        if error is not None and rank == current_rank(group):
            raise error
        text, exit_code = first
        raise RankError(text, exit_code)


def on_main(decide: Callable[[], Any]) -> Any:
    """Call `decide` on rank 0; return its result or raise its error on all ranks. A collective."""
    decision: Any = None
    with all_ranks():
        if current_rank() == 0:
            decision = decide()
    return all_gather(decision)[0]


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of each rank in `group` (None: all ranks), by rank; a collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in `group` (None: among all ranks)."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def require_same(values: Mapping[str, Any], kind: type[AccelGPTError] = UserError) -> None:
    """Raise `kind` on rank 0 unless `values` are the same on all ranks; a collective.

    The other ranks raise a `RankError` with the same exit code.
    """
    main, *others = all_gather(dict(values))
    differences = []
    for rank, other in enumerate(others, start=1):
        for key in main | other:
            expected = main.get(key)
            value = other.get(key)
            if value != expected:
                differences.append(f"{key} is {expected} on rank 0 and {value} on rank {rank}")
    more = f" and {len(differences) - MOST_SHOWN} more" if len(differences) > MOST_SHOWN else ""
    text = (
        f"the processes of this run differ: {', '.join(differences[:MOST_SHOWN])}{more}; start all "
        "processes with the same config, data, code and versions"
    )
    require_all(not differences, text, kind)


def require_all(ok: bool, message: str, kind: type[AccelGPTError] = UserError) -> None:
    """Raise an error on all ranks unless `ok`. `ok` must be the same on all ranks.

    Rank 0 raises `kind(message)`, the others a `RankError` with the same exit code. Destroys the
    process group first.
    """
    if ok:
        return
    is_main = current_rank() == 0
    end_group()
    if is_main:
        raise kind(message)
    raise RankError(message, kind.exit_code)


def end_group() -> None:
    """Destroy the process group: its threads may abort a process that ends after the others."""
    _kept_groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def keep_group() -> None:
    """Keep the process group alive until the block of `explain_lost_rank` has succeeded.

    DDP's reducer must not be its last owner: it deletes the group without releasing the GIL. The
    process then hangs if a thread of gloo waits for the GIL to free a tensor
    (https://github.com/pytorch/pytorch/issues/56297; seen with torch 2.13).
    """
    if dist.group.WORLD is not None:
        _kept_groups[:] = [dist.group.WORLD]


def shared_with_ranks(folder: Path) -> list[bool]:
    """Return for each rank whether it finds a file that rank 0 writes to `folder`; a collective."""

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".shared_", dir=folder)
        os.close(descriptor)
        return Path(path).name

    file = folder / on_main(write)
    found = all_gather(wait_for_file(file))
    if current_rank() == 0:
        file.unlink()
    return found


def wait_for_file(path: Path) -> bool:
    """Return whether `path` exists within `APPEARS_SECONDS`: NFS caches the names in a folder."""
    end = time.monotonic() + APPEARS_SECONDS
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(OSError), os.scandir(path.parent):
            pass  # opening the folder makes NFS ask the server for changes
    return path.exists()


@contextmanager
def explain_lost_rank(processes: int) -> Iterator[None]:
    """Turn torch's errors about a lost rank into a `PeerError`.

    After a `RankError`, exit with its code: another rank prints the error. At the end, release the
    process group; see `keep_group`.
    """
    try:
        yield
    except RankError as error:
        sys.exit(error.exit_code)
    except RuntimeError as error:
        text = str(error)
        lost = isinstance(error, dist.DistError) or any(name in text for name in BACKENDS)
        if processes == 1 or not lost:
            raise
        raise lost_rank_error(text) from None
    _kept_groups.clear()


def lost_rank_error(text: str) -> PeerError:
    """Return the error for a lost rank; `text` is torch's message."""
    first = text.strip().partition("\n")[0]
    # without the names of C++ files
    reason = re.sub(r"^\[[^]]*\] *|\[/[^]]*\] *", "", first).partition(". ")[0]
    return PeerError(
        f"another process of the run has ended or does not answer ({reason}); see its own error "
        "message; a new launch resumes from the last checkpoint"
    )
