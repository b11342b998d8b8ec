"""Errors and decisions that all ranks of a run share.

What one rank raises inside `all_ranks` is raised on every rank, so that none goes on, or waits in a
collective, without it.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from accel_gpt.errors import AccelGPTError, PeerError, UserError

SHOWN = 4  # differences that a sentence names
BACKENDS = ("gloo", "NCCL", "Connection closed by peer")  # in texts of errors without a class


class RankError(PeerError):
    """What another rank has raised, and prints; this rank ends with its exit code, in silence."""

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
    own = None
    if error is not None:
        own = str(error) or type(error).__name__, getattr(error, "exit_code", PeerError.exit_code)
    for rank, failure in enumerate(all_gather(own, group)):
        if failure:
            raise error if error and rank == current_rank(group) else RankError(*failure)


def on_main(decide: Callable[[], Any]) -> Any:
    """What `decide` returns on rank 0, on every rank; also what it raises there. A collective."""
    decision: Any = None
    with all_ranks():
        if current_rank() == 0:
            decision = decide()
    return all_gather(decision)[0]


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank of `group` (None: all ranks), in their order; a collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def current_rank(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process in `group` (None: of all ranks)."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def require_same(values: Mapping[str, Any], kind: type[AccelGPTError] = UserError) -> None:
    """Raise `kind` on rank 0 unless `values` are the same on all ranks, which leave with its exit
    code; a collective.
    """
    every = all_gather(dict(values))
    differences = [
        f"{key} is {every[0].get(key)} on rank 0 and {own.get(key)} on rank {rank}"
        for rank, own in enumerate(every)
        for key in every[0] | own
        if own.get(key) != every[0].get(key)
    ]
    if not differences:
        return
    main = current_rank() == 0
    if dist.is_initialized():  # else its threads may abort a process that ends after the others
        dist.destroy_process_group()
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    text = (
        f"the processes of this run differ: {', '.join(differences[:SHOWN])}{more}; start all "
        "with the same config, data, code and versions"
    )
    raise kind(text) if main else RankError(text, kind.exit_code)


@contextmanager
def peers(processes: int) -> Iterator[None]:
    """Turn what torch raises when another rank has gone into a `PeerError`; after a `RankError`
    leave with its exit code, as another rank prints it.
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
    """The error of a rank whose peer has gone, of which torch said `text`."""
    first = text.strip().partition("\n")[0]
    reason = re.sub(r"^\[[^]]*\] *", "", first).partition(". ")[0]  # without the file in C++
    return PeerError(
        f"another process of the run has gone or does not answer ({reason}); its own message "
        "tells why, and a new launch goes on from the last checkpoint"
    )
