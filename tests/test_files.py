"""The lock of a folder: one holder at a time, also if the holder removes its file."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_nothing_is_locked(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked_file(tmp_path / "x.lock", wait=False):
        assert not is_locked(tmp_path / "x.lock")
    assert os.listdir(tmp_path) == []


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
