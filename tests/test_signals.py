"""Signals, the death of a launcher, the wall clock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from accel_gpt.run.signals import SIGNALS, StopSignal


@pytest.fixture(autouse=True)
def restore_handlers() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_remembered(number: signal.Signals) -> None:
    stop = StopSignal(1)
    assert stop.received is None
    os.kill(os.getpid(), number)
    assert stop.received == number.name
    os.kill(os.getpid(), number)  # the same press, delivered twice
    assert stop.received == number.name


@pytest.mark.slow
def test_second_signal_later_ends_at_once() -> None:
    code = (
        "import os, signal, accel_gpt.run.signals as g\n"
        "g.SAME_PRESS_SECONDS = 0.0\n"
        "stop = g.StopSignal(1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert stop.received\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert b"still here" not in done.stdout
