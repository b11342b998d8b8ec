"""Record a few steps of a launch with PyTorch's profiler, for `train.profile`.

Writes `profile/profile_N.json` in the folder of the run: the trace of rank N, for ui.perfetto.dev
or chrome://tracing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs

from accel_gpt.config.plan import plural
from accel_gpt.launch.context import Context

# Steps before the recorded ones: two for choosing kernels and allocating memory (assumption), one
# for starting the profiler.
STEPS_BEFORE = 3


@contextmanager
def profile(context: Context) -> Iterator[Callable[[], None]]:
    """Enclose all steps of a launch; profile `train.profile` of them, or fewer if it ends earlier.

    Yields a function to call after each step. Logs a warning if the disk is full, or if the launch
    ends before the first step that would be recorded.
    """
    steps = context.config.train.profile
    if not steps:
        yield lambda: None
        return
    accelerator = context.accelerator
    folder = Path(context.config.out_dir, "profile")
    rank = accelerator.process_index
    cuda = accelerator.device.type == "cuda"

    def write(profiler: Any) -> None:
        recorded = profiler.step_num - STEPS_BEFORE
        if recorded <= 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))
            context.log(f"profiled {plural(recorded, 'step')}: open {folder}/ in ui.perfetto.dev")
        except OSError as error:
            context.log(f"WARNING: the profile could not be written: {error}; training continues")

    options = ProfileKwargs(
        activities=["cpu", "cuda"] if cuda else ["cpu"],
        schedule_option={"wait": STEPS_BEFORE - 1, "warmup": 1, "active": steps, "repeat": 1},
        on_trace_ready=write,
    )
    with accelerator.profile(options) as profiler:

        def completed() -> None:
            if cuda and profiler.step_num < STEPS_BEFORE + steps:
                torch.cuda.synchronize(accelerator.device)  # count each kernel in its step
            profiler.step()

        yield completed
    if profiler.step_num <= STEPS_BEFORE:
        context.log(f"WARNING: train.profile begins at step {STEPS_BEFORE + 1} of a launch")
