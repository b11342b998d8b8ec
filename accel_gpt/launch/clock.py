"""Time work on a device, for `bench` and for `train.budget`."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

COUNTED_SHARE = 1 / 3  # of the measured steps: the fastest. Others wait for other processes


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def seconds_of_each(step: Callable[[], None], device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each of `steps` steps; on CUDA, without waiting between steps."""
    if device.type != "cuda":
        return [timed(step, device) for _ in range(steps)]
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        for _ in range(steps + 1)
    ]
    synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the mean of the fastest third of measured `seconds`."""
    return fmean(sorted(seconds)[: math.ceil(COUNTED_SHARE * len(seconds))])
