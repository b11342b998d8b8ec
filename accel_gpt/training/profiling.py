"""`train.profile`: PyTorch's profile of a few steps, as a trace and as a table.

Writes `profile/profile_N.json` of each rank, for chrome://tracing or ui.perfetto.dev, and
`profile/operations.txt`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import plural
from accel_gpt.files import write_file

# steps before those that are recorded: two in which kernels are chosen and memory is allocated (an
# assumption), one in which the profiler starts
BEFORE = 3
LINES = 10  # of the table
LONGEST = 80  # characters of a name; those of CUDA's kernels go on for lines


@contextmanager
def profile(
    config: Config, accelerator: Accelerator, log: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Profile `train.profile` steps of a launch, or as many as it makes.

    Yields the function to be called after each step. A disk without room is a warning.
    """
    folder, steps = Path(config.out_dir) / "profile", config.train.profile
    device, recorded = accelerator.device, 0

    def finish(profiler: Any) -> None:
        nonlocal recorded
        recorded = profiler.step_num - BEFORE
        if recorded <= 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{accelerator.process_index}.json"))
            if accelerator.is_main_process:
                text = operations_table(profiler.key_averages(), recorded, device.type)
                write_file(folder / "operations.txt", [text.encode()])
                log(
                    f"{text}profile  {plural(recorded, 'step')}, slower than without: {folder}/, "
                    "a trace of each process for ui.perfetto.dev"
                )
        except OSError as error:
            log(f"WARNING: {error}; training goes on without the profile")

    options = ProfileKwargs(
        activities=["cpu"] + (["cuda"] if device.type == "cuda" else []),
        schedule_option={"wait": BEFORE - 1, "warmup": 1, "active": steps, "repeat": 1},
        on_trace_ready=finish,
    )
    with accelerator.profile(options) as profiler:

        def completed() -> None:
            if device.type == "cuda" and profiler.step_num < BEFORE + steps:
                torch.cuda.synchronize(device)  # else kernels of the step before are counted
            profiler.step()

        yield completed
    if recorded <= 0:
        log(
            f"WARNING: train.profile is {steps}, but this launch made only "
            f"{plural(profiler.step_num, 'step')}, of which the first {BEFORE} are not recorded"
        )


def operations_table(averages: Any, steps: int, device: str) -> str:
    """The most expensive operations, kernels on CUDA: own time and calls of one step."""
    on_cpu = device != "cuda"
    rows = []
    for event in averages:
        bracket = event.is_user_annotation or event.key.startswith("ProfilerStep")
        if (event.device_type.name == "CPU") == on_cpu and not bracket:
            own = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            rows.append((own / steps / 1000, event.count / steps, event.key))
    rows.sort(reverse=True)
    total = sum(row[0] for row in rows) or 1.0
    lines = [f"{'share':>6} {'ms a step':>10} {'calls a step':>12}  operation"]
    lines += [
        f"{own / total:>6.1%} {own:>10.3f} {calls:>12,.1f}  {name[:LONGEST]}"
        for own, calls, name in rows[:LINES]
    ]
    return "\n".join([*lines, f"{'':>6} {total:>10.3f} {'':>12}  all {len(rows)}"]) + "\n"
