"""The lock of a folder: one holder at a time, also if the holder removes its file."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from accel_gpt.files import is_locked, locked_file

fork = multiprocessing.get_context("fork")


def test_a_lock_is_removed_by_who_holds_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with locked_file(path, wait=False):
        with pytest.raises(BlockingIOError), locked_file(path, wait=False):
            raise AssertionError
        assert path.exists()
    assert not path.exists()
    with locked_file(path):  # the folder was removed by hand, and another run started in it
        path.unlink()
        other = contextlib.ExitStack()
        other.enter_context(locked_file(path))
    assert path.exists()
    assert is_locked(path)
    other.close()
    assert not path.exists()
    assert not is_locked(path)
    with pytest.raises(ZeroDivisionError), locked_file(path):
        raise ZeroDivisionError
    assert not path.exists()


def count(path: Path, total: int) -> None:
    """Increment the number in a file `total` times, by reading and writing it."""
    for _ in range(total):
        with locked_file(path / "x.lock"):
            number = int((path / "number").read_text())
            (path / "number").write_text(str(number + 1))


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without flock, for this process and its children."""

    def flock(file: object, kind: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def hold(path: Path) -> None:
    with locked_file(path):
        path.with_name("held").touch()
        signal.pause()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_file_with_host_and_process_is_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    holder = fork.Process(target=hold, args=(path,))
    holder.start()
    while not (tmp_path / "held").exists():
        assert holder.is_alive()
    assert is_locked(path)
    with pytest.raises(BlockingIOError) as busy, locked_file(path, wait=False):
        raise AssertionError
    named = Path(str(busy.value.filename))
    assert named.read_text().splitlines()[:2] == [str(holder.pid), os.uname().nodename]
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join(60)
    assert not is_locked(path)  # a process of this host that was killed
    with locked_file(path, wait=False):
        assert is_locked(path)
    assert os.listdir(tmp_path) == ["held"]
    named.write_text(f"{os.getpid()}\nother.host\n")
    with pytest.raises(BlockingIOError, match=named.name), locked_file(path, wait=False):
        raise AssertionError


@pytest.mark.slow
@pytest.mark.usefixtures("no_flock")
def test_no_two_hold_a_lock_without_flock(tmp_path: Path) -> None:
    counted_by_several(tmp_path, 20)


@pytest.mark.slow
def test_no_two_hold_a_lock_whose_file_comes_and_goes(tmp_path: Path) -> None:
    counted_by_several(tmp_path, 500)


def counted_by_several(tmp_path: Path, times: int) -> None:
    """Count in four processes, and assert that no increment is lost."""
    (tmp_path / "number").write_text("0")
    processes = [fork.Process(target=count, args=(tmp_path, times)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "number").read_text() == str(4 * times)
    assert os.listdir(tmp_path) == ["number"]
