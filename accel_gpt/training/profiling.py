"""Record a few steps of a launch with PyTorch's profiler, for `train.profile`.

Writes to `profile/` in the folder of the run:

    profile_N.json      trace of rank N, for ui.perfetto.dev or chrome://tracing
    memory_N.pickle     history of CUDA allocations, for docs.pytorch.org/memory_viz
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from accel_gpt.config.plan import plural

# Steps before the recorded ones: two for choosing kernels and allocating memory (assumption), one
# for starting the profiler.
STEPS_BEFORE = 3
MEMORY_EVENTS = 100_000  # newest events that the CUDA allocator keeps; assumption


@contextmanager
def profile(
    steps: int, folder: Path, accelerator: Accelerator, log: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Profile `steps` of a launch into `folder`, or fewer if the launch ends earlier.

    Yields a function to call after each step. If the disk is full, logs a warning.
    """
    rank = accelerator.process_index
    cuda = accelerator.device.type == "cuda"

    def write(profiler: Any) -> None:
        recorded = profiler.step_num - STEPS_BEFORE
        if recorded <= 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))
            if cuda:
                dump: Any = torch.cuda.memory._dump_snapshot
                dump(str(folder / f"memory_{rank}.pickle"))
            log(f"profiled {plural(recorded, 'step')}: open {folder}/ in ui.perfetto.dev")
        except OSError as error:
            log(f"WARNING: the profile could not be written: {error}; training continues")

    options = ProfileKwargs(
        activities=["cpu", "cuda"] if cuda else ["cpu"],
        schedule_option={"wait": STEPS_BEFORE - 1, "warmup": 1, "active": steps, "repeat": 1},
        on_trace_ready=write,
    )
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        with accelerator.profile(options) as profiler:

            def completed() -> None:
                if cuda and profiler.step_num < STEPS_BEFORE + steps:
                    torch.cuda.synchronize(accelerator.device)  # count each kernel in its step
                profiler.step()

            yield completed
    finally:
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
