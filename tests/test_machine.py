"""What the machine lacks is told as it is, with exit code 4, and never as damage."""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel_gpt.data.shards import open_split
from accel_gpt.errors import MachineError
from accel_gpt.files import cache_folder
from accel_gpt.launch.machine import idle_gpus
from tests.conftest import run_here
from tests.data.test_shards import write


@pytest.fixture
def few_files() -> Iterator[int]:
    """Let this process have no more than 200 open files; return that number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    yield 200
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_shards_are_read_than_files_may_be_open(tmp_path: Path, few_files: int) -> None:
    write(tmp_path, [[i] for i in range(few_files + 50)], 1)
    splits = [open_split(tmp_path, "train") for _ in range(3)]
    for number in range(few_files + 50):
        for split in splits:
            assert split.read(number, 0, 1).tolist() == [number]


def test_idle_gpus_are_those_that_no_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    for processes, idle in ((None, 7), ("2", 6), ("8", 0), ("16", 0)):
        if processes is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert idle_gpus(on_gpu) == idle
    assert idle_gpus(SimpleNamespace(device=torch.device("cpu"))) == 0


def open_many(words: Sequence[str]) -> int:
    with contextlib.ExitStack() as files:
        for _ in range(1000):
            files.enter_context(open(os.devnull))
    return 0


def torch_memory(words: Sequence[str]) -> int:
    return len(torch.empty(2**50))


def numpy_memory(words: Sequence[str]) -> int:
    return len(np.empty(2**50))


def bad_alloc(words: Sequence[str]) -> int:
    raise RuntimeError("std::bad_alloc")  # as torch gives it on


def no_room(words: Sequence[str]) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (open_many, "Too many open files: '/dev/null'"),
        (torch_memory, "DefaultCPUAllocator: can't allocate memory: you tried"),
        (numpy_memory, "out of memory (Unable to allocate 8.00 PiB"),
        (bad_alloc, "out of memory (std::bad_alloc)"),
        (no_room, "No space left on device: 'metrics.jsonl'"),
    ],
)
def test_the_reason_of_the_operating_system_is_told(
    main: Callable[[Sequence[str]], int],
    reason: str,
    few_files: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(main, []) == 4
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert reason in said
    assert said.count("\n") == 1


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 3)  # as in a container
    with pytest.raises(MachineError, match="home directory"):
        cache_folder()
