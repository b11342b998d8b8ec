"""Measure the memory of tensors with PyTorch's profiler."""

from collections.abc import Callable

import torch


def most_alive(step: Callable[[], None]) -> int:
    """Return the peak bytes of live tensors that a step allocates."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = top = 0
    for _, change in changes:
        now += change
        top = max(top, now)
    return top
