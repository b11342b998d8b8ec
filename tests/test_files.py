"""The lock of a folder: one holder at a time, also if the holder removes its file."""

import multiprocessing
import os
from pathlib import Path

import pytest

from accel_gpt.files import lock, locked_file

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
        with lock(path) as other:
            pass
    assert path.exists()
    assert other.closed
    with pytest.raises(ZeroDivisionError), locked_file(path):
        raise ZeroDivisionError
    assert not path.exists()


def count(path: Path, total: int) -> None:
    """Increment the number in a file `total` times, by reading and writing it."""
    for _ in range(total):
        with locked_file(path / "x.lock"):
            number = int((path / "number").read_text())
            (path / "number").write_text(str(number + 1))


@pytest.mark.slow
def test_no_two_hold_a_lock_whose_file_comes_and_goes(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    processes = [fork.Process(target=count, args=(tmp_path, 500)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "number").read_text() == "2000"
    assert os.listdir(tmp_path) == ["number"]
