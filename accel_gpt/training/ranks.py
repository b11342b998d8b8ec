"""Errors and decisions that all ranks of a run share.

What one rank raises inside `all_ranks` is raised on every rank, so that none goes on, or waits in a
collective, without it. `on_main` runs a function on rank 0 and gives all ranks its result or error.
`require_all` checks what all ranks know alike. The rank that failed raises its own error and prints
it. The others raise a `RankError`, a `PeerError` that ends them in silence with the same exit code.
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

APPEARS_SECONDS = 2.0  # for which a rank looks for a file of another one; assumption
SHOWN = 4  # differences that a sentence names
BACKENDS = ("gloo", "NCCL", "Connection closed by peer")  # in texts of errors without a class


class RankError(PeerError):
    """The error of another rank, which prints it; this rank ends with its exit code, in silence."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on every rank of `group` (None: all ranks) what any rank raises inside; a collective.

    The first rank that failed raises its own exception, every other rank a `RankError` of the same
    text. Call no collective inside: the rank that failed would not take part in it.
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
    """Return on every rank what `decide` returns on rank 0, or raise its error; a collective."""
    decision: Any = None
    with all_ranks():
        if current_rank() == 0:
            decision = decide()
    return all_gather(decision)[0]


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return `value` of every rank of `group` (None: all ranks), in their order; a collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in `group` (None: of all ranks)."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def require_same(values: Mapping[str, Any], kind: type[AccelGPTError] = UserError) -> None:
    """Raise `kind` on rank 0 unless `values` are the same on all ranks; a collective.

    The other ranks leave with its exit code.
    """
    main, *others = all_gather(dict(values))
    differences = []
    for rank, other in enumerate(others, start=1):
        for key in main | other:
            expected = main.get(key)
            value = other.get(key)
            if value != expected:
                differences.append(f"{key} is {expected} on rank 0 and {value} on rank {rank}")
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    text = (
        f"the processes of this run differ: {', '.join(differences[:SHOWN])}{more}; start all "
        "with the same config, data, code and versions"
    )
    require_all(not differences, text, kind)


def require_all(ok: bool, message: str, kind: type[AccelGPTError] = UserError) -> None:
    """Raise an error on all ranks unless `ok`, which must be the same on all of them.

    Rank 0 raises `kind(message)`, the others a `RankError` with its exit code. Ends the process
    group first.
    """
    if ok:
        return
    is_main = current_rank() == 0
    end_group()
    if is_main:
        raise kind(message)
    raise RankError(message, kind.exit_code)


def end_group() -> None:
    """Destroy the process group, whose threads may abort a process that ends after the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sees_main(folder: Path) -> list[bool]:
    """Return whether each rank finds in its `folder` a file that rank 0 writes; a collective."""

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
    """Return whether `path` exists, perhaps a moment later, as NFS caches the names in a folder."""
    end = time.monotonic() + APPEARS_SECONDS
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(OSError), os.scandir(path.parent):
            pass  # to open a folder is to ask the server whether it has changed
    return path.exists()


@contextmanager
def peers(processes: int) -> Iterator[None]:
    """Turn torch's errors about a rank that has gone into a `PeerError`.

    After a `RankError` leave with its exit code, as another rank prints it.
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
        raise lost_peer(text) from None


def lost_peer(text: str) -> PeerError:
    """Return the error of a rank whose peer has gone; `text` is torch's message."""
    first = text.strip().partition("\n")[0]
    reason = re.sub(r"^\[[^]]*\] *|\[/[^]]*\] *", "", first).partition(". ")[0]  # no file in C++
    return PeerError(
        f"another process of the run has gone or does not answer ({reason}); its own message "
        "tells why, and a new launch goes on from the last checkpoint"
    )
