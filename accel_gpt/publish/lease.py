"""Let one launch at a time own the copies of a run, on any store that lists what was written.

Each launch makes a folder for its copies, `launch_NUMBER_RANDOM`, in `checkpoint.copy_to`. The one
whose name is last owns the copies. It rewrites `lease.json` in its folder every few seconds:

    {"run": its name, "machine": who holds it, "time": of the machine, "signs": how often it was
     written, "released": whether the launch has ended}

A launch that starts waits until the newest lease is released, or does not change for some time,
measured on the clock of the machine that waits. So no clocks are compared. It then makes the next
folder. A launch that was only paused sees that folder before it saves, and ends.
"""

import contextlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import msgspec

from accel_gpt.data.remote import store_errors
from accel_gpt.errors import BusyError
from accel_gpt.publish.copy_store import CopyStore

LEASE = "lease.json"
SIGN_SECONDS = 10.0  # between two signs of life; assumption
HUB_SIGN_SECONDS = 300.0  # each is a commit, and the Hub limits them
SILENT_SIGNS = 3  # a launch that misses so many has ended
ANSWER_SECONDS = 10.0  # for a store to answer when the run waits for it; assumption
POLL_SECONDS = 1.0  # between two looks at the lease of another launch


@dataclass(frozen=True)
class Sign:
    """The content of `lease.json`."""

    run: str = ""
    machine: str = "another machine"
    time: str = ""  # for people; nothing compares it
    signs: int = 0
    released: bool = False


class Lease:
    """The ownership of the copies in `store`, for the launch in this process.

    `on_lost` is called in a thread when another launch has become the owner.
    """

    def __init__(
        self, store: CopyStore, log: Callable[[str], None], on_lost: Callable[[], None]
    ) -> None:
        self.store = store
        self.log = log
        self.on_lost = on_lost
        self.launch = ""  # name of the folder of this launch
        self.sign = Sign()
        self.lost = ""  # why this launch is no longer the owner
        self.looked = 0.0  # time of the last look at the store, by `time.monotonic`
        self.looking = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="lease", daemon=True)

    @property
    def seconds(self) -> float:
        """Return the seconds between two signs."""
        return HUB_SIGN_SECONDS if self.store.hub else SIGN_SECONDS

    # ----------------------------------------------------------------------- take

    def owner_run(self) -> str:
        """Return the name of the run that the copies belong to; "" if no lease has it."""
        for launch in reversed(self.store.launches()):
            run = decode(self.store.read(f"{launch}/{LEASE}")).run
            if run:
                return run
        return ""

    def take(self, run: str, last: str) -> None:
        """Become the owner, for the run with this name, and sign from now on.

        `last`: the launch that owned the copies last from the run's folder. That one has ended,
        since the folder is locked. Raises `BusyError` if another launch is alive, `UserError` if
        the store cannot be read or written.
        """
        store = self.store
        with store_errors(f"checkpoint.copy_to {store.url} cannot be read"):
            launches = store.launches()
            if launches and launches[-1] != last:
                self.wait_for_end(launches[-1])
        number = int(launches[-1].split("_")[1]) + 1 if launches else 1
        self.launch = f"launch_{number:06d}_{secrets.token_hex(4)}"
        machine = f"process {os.getpid()} on {os.uname().nodename}"
        self.sign = Sign(run=run, machine=machine)
        with store_errors(f"checkpoint.copy_to {store.url} cannot be written"):
            self.write()
        self.look()  # two launches may have waited for the same one
        self.check()
        self.thread.start()

    def wait_for_end(self, launch: str) -> None:
        """Wait until a launch has released its lease or shows no sign; `BusyError` if it does."""
        store = self.store
        seen = store.read(f"{launch}/{LEASE}")
        sign = decode(seen)
        if sign.released:
            return
        seconds = SILENT_SIGNS * self.seconds
        self.log(
            f"{sign.machine} used {store.url} last; waiting up to {seconds:.0f} s for a sign of it"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            newest = store.launches()[-1]
            content = store.read(f"{newest}/{LEASE}")
            sign = decode(content)
            if newest == launch and sign.released:
                return
            if newest != launch or content != seen:
                raise BusyError(
                    f"checkpoint.copy_to {store.url} is in use by {sign.machine}; stop it first"
                )

    # ----------------------------------------------------------------------- keep

    def write(self) -> None:
        """Write the next sign of life."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.sign = replace(self.sign, time=now, signs=self.sign.signs + 1)
        self.store.write(f"{self.launch}/{LEASE}", json.dumps(asdict(self.sign)).encode())

    def keep(self) -> None:
        """Sign until the launch ends or another one owns the copies; run by the thread."""
        while not self.lost and not self.ended.wait(self.seconds):
            with self.looking:
                self.look(sign=True)
        if self.lost:
            self.on_lost()

    def look(self, sign: bool = False) -> None:
        """Note whether another launch owns the copies; `sign`: if not, write a sign of life.

        A store that cannot be reached now changes nothing.
        """
        with contextlib.suppress(Exception):  # of botocore, huggingface_hub, OSError, ...
            self.lost = self.lost or taken_over(self.store, self.launch)
            if sign and not self.lost:
                self.write()
        self.looked = time.monotonic()

    def check(self) -> None:
        """Raise `BusyError` if another launch owns the copies. Call it before each save.

        No other launch takes over as long as this process signs. If it has not looked for a while,
        it may have been paused, and looks now. If the store does not answer, it looks later.
        """
        if time.monotonic() - self.looked > (SILENT_SIGNS - 1) * self.seconds:
            self.looked = math.inf  # wait only once for a store that does not answer
            self.look_briefly()
        if self.lost:
            raise BusyError(self.lost)

    def release(self) -> None:
        """End the lease, so that the next launch need not wait."""
        if self.ended.is_set() or not self.launch or self.lost:
            return
        self.ended.set()
        self.look_briefly(released=True)

    def look_briefly(self, released: bool = False) -> None:
        """Look, and wait for the answer of the store for `ANSWER_SECONDS`.

        `released`: then write that the lease has ended.
        """

        def look() -> None:
            with self.looking:
                if released:
                    self.sign = replace(self.sign, released=True)
                self.look(sign=released)

        thread = threading.Thread(target=look, name="lease", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)


def taken_over(store: CopyStore, launch: str) -> str:
    """Return why `launch` does not own the copies any more; "" if it does."""
    newest = max(store.launches(), default=launch)
    if newest <= launch:
        return ""
    return f"the run went on elsewhere: {store.url}/{newest} owns checkpoint.copy_to now"


def require_owner(store: CopyStore, launch: str) -> None:
    """Raise `BusyError` unless `launch` owns the copies."""
    why = taken_over(store, launch)
    if why:
        raise BusyError(why)


def decode(content: bytes | None) -> Sign:
    """Read a lease; the default values if it is missing or incomplete."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(content or b"", type=Sign)
    return Sign()
