"""Let rank 0 answer for all ranks before they have joined, when the config is not complete yet."""

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

from accel_gpt.errors import PeerError, first_line
from accel_gpt.launcher import is_main, rank, world_size

LONGEST_WAIT = timedelta(days=1)  # for rank 0, without train.init_timeout; assumption
HEARD = timedelta(seconds=5)  # for the other ranks to hear of an error; assumption


def on_main_before_join(question: Callable[[], Any], seconds: float | None) -> Any:
    """Return the answer of rank 0, a JSON value, before the ranks have joined; a collective.

    If rank 0 raises an error, the other ranks exit with its code, and rank 0 prints it. Raises
    `PeerError` if a rank does not come within `seconds` (None: `LONGEST_WAIT`). Ctrl-C ends a
    process that waits.
    """
    if world_size() == 1:
        return question()
    from torch.distributed import DistError  # torch takes seconds

    timeout = timedelta(seconds=seconds) if seconds else LONGEST_WAIT
    try:
        with ended_by_ctrl_c():
            store = meeting_store(timeout)
        return exchange_answer(store, question)
    except DistError as error:
        raise PeerError(
            f"another process of the run has ended or does not answer ({first_line(error)}); see "
            "its own error message"
        ) from None


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process while native code waits, where Python calls no handler.

    Another handler than Python's own stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def meeting_store(timeout: timedelta) -> Any:
    """Return the store in which ranks meet; rank 0 may serve it, so it is kept."""
    import torch.distributed as dist  # torch takes seconds

    distributed: Any = dist  # not all of its functions have types
    store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
    return store


def exchange_answer(store: Any, question: Callable[[], Any]) -> Any:
    """Set the answer or the error of rank 0 in the store, or wait for it on another rank."""
    key = f"accel_gpt/answer_{store.add(f'accel_gpt/asked_by_{rank()}', 1)}"
    if not is_main():
        with ended_by_ctrl_c():
            found = json.loads(store.get(key))
        store.set(f"{key}/heard_by_{rank()}", "")
        if "exit_code" in found:
            sys.exit(found["exit_code"])
        return found["answer"]
    try:
        text = json.dumps({"answer": question()})
    except BaseException as error:
        exit_code = getattr(error, "exit_code", PeerError.exit_code)
        store.set(key, json.dumps({"exit_code": exit_code}))
        others = [f"{key}/heard_by_{other}" for other in range(1, world_size())]
        # a late rank learns that rank 0 has ended
        with contextlib.suppress(RuntimeError), ended_by_ctrl_c():
            store.wait(others, HEARD)
        raise
    store.set(key, text)
    return json.loads(text)["answer"]
