"""Signals, the death of a launcher, the wall clock."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from accel_gpt.errors import DataError
from accel_gpt.launch.stopping import SAME_PRESS_SECONDS, StopSignal
from accel_gpt.launcher import PREEMPTED, SIGNALS
from tests.conftest import thorough


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_remembered(number: signal.Signals) -> None:
    stop = StopSignal()
    assert stop.received is None
    os.kill(os.getpid(), number)
    assert stop.received == number.name
    os.kill(os.getpid(), number)  # the same key press, delivered twice
    assert stop.received == number.name


def test_a_closed_session_does_not_stop_a_run_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGHUP)
    stop.close()
    assert stop.received is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_after_an_error_leaves_its_message_and_exit_code() -> None:
    """torchrun sends SIGTERM once another rank has ended."""
    with pytest.raises(DataError), contextlib.closing(StopSignal(starting=True)):
        raise DataError("not prepared")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_forked_process_dies_of_a_signal_and_the_run_does_not_hear_it() -> None:
    """Otherwise a `multiprocessing.Pool` would wait for its workers forever."""
    stop = StopSignal()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert (stop.received, stop.first) == (None, None)


@pytest.mark.parametrize(("saved", "code"), [(False, 128 + signal.SIGTERM), (True, PREEMPTED)])
def test_second_signal_later_ends_at_once(
    saved: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    stop = StopSignal()
    stop.saved = saved
    stop.receive(signal.SIGTERM)
    stop.receive(signal.SIGTERM)  # the same press
    assert not ended
    assert stop.first
    stop.first -= SAME_PRESS_SECONDS
    stop.receive(signal.SIGTERM)
    assert ended == [code]


WATCHED = """
import sys, time
from accel_gpt.launch.stopping import Watchdog
with Watchdog("3s") as watchdog:
    for number in range(20):
        print(number, flush=True)
        time.sleep(0.1)
        watchdog.heartbeat()
    print("hangs", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("hang", "code"), [pytest.param("0", 0, marks=thorough), ("60", 70)])
def test_a_pause_is_no_hang_and_a_hang_after_it_is_found(hang: str, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED, hang], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        for _ in range(10):
            process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(7)
        process.send_signal(signal.SIGCONT)
        _, shown = process.communicate(timeout=120)
    assert process.returncode == code, shown.decode()
    assert (b"completed nothing within 3s" in shown) == (code == 70)
