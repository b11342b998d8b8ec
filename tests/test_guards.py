"""Signals, the lock of a run's folder, and the finite loss."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_gpt.errors import BusyError, DivergedError, UserError
from accel_gpt.run.guards import StopSignal, check_finite, count_skipped, locked


@pytest.fixture(autouse=True)
def restore_handlers() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
        "import os, signal, accel_gpt.run.guards as g\n"
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


@pytest.mark.slow
def test_a_folder_has_one_run(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        code = (
            "import sys; from accel_gpt.run.guards import locked; from pathlib import Path\n"
            "with locked(Path(sys.argv[1])): pass"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BusyError" in done.stderr
        assert f"is in use by process {os.getpid()} on " in done.stderr
    with locked(tmp_path / "run"):
        pass  # free again
    assert BusyError.exit_code == 6


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"out_dir .*file/run cannot be written: Not a directory"
    with pytest.raises(UserError, match=message), locked(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_loss_that_is_no_number_ends_the_run(loss: float) -> None:
    check_finite(11.0, 2.0, 3)
    with pytest.raises(DivergedError, match="at step 3 the loss is"):
        check_finite(loss, 2.0, 3)
    with pytest.raises(DivergedError, match="the gradient norm"):
        check_finite(11.0, loss, 3)


def test_fp16_that_never_finds_its_scale_ends_the_run() -> None:
    skipped = 0
    for _ in range(50):
        skipped = count_skipped(skipped, 7)
    with pytest.raises(DivergedError, match="overflowed 50 times in a row"):
        count_skipped(skipped, 7)
