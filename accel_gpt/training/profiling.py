"""`train.profile`: PyTorch's profile of a few steps, as a trace and as a table.

Writes `profile/profile_N.json` of each rank, for chrome://tracing or ui.perfetto.dev, and
`profile/operations.txt`.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import plural
from accel_gpt.files import write_file

WARMUP = 2  # steps before, in which kernels are chosen and memory is allocated: assumption
LINES = 10  # of the table
LONGEST = 80  # characters of a name; those of CUDA's kernels go on for lines


class Profile:
    """Profiles `train.profile` steps of a launch, after the warmup and one step that is dropped."""

    def __init__(
        self, config: Config, accelerator: Accelerator, log: Callable[[str], None]
    ) -> None:
        self.steps, self.accelerator, self.log = config.train.profile, accelerator, log
        self.folder = Path(config.out_dir) / "profile"
        self.stack = contextlib.ExitStack()
        self.profiler: Any = None
        self.done = 0  # steps of this launch

    def __enter__(self) -> Self:
        return self

    def completed(self, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Note a completed step; `pause`: the context of what is not training."""
        if not self.steps:
            return
        self.done += 1
        if self.done == WARMUP:
            kinds = ["cpu"] + (["cuda"] if self.accelerator.device.type == "cuda" else [])
            options = ProfileKwargs(
                activities=kinds,
                schedule_option={"wait": 0, "warmup": 1, "active": self.steps, "repeat": 1},
            )  # no output_trace_dir: with it ranks wait for each other, also for one without room
            with pause():
                self.profiler = self.stack.enter_context(self.accelerator.profile(options))
        elif self.profiler and self.done < WARMUP + 1 + self.steps:
            self.profiler.step()
        elif self.profiler:
            with pause():
                self.finish(self.steps)

    def finish(self, steps: int) -> None:
        """Write the trace and the table of so many steps."""
        profiler, self.profiler = self.profiler, None
        self.stack.close()
        main, rank = self.accelerator.is_main_process, self.accelerator.process_index
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"profile_{rank}.json"))
            if main:
                text = table(profiler.key_averages(), steps, self.accelerator.device.type)
                write_file(self.folder / "operations.txt", [text.encode()])
                self.log(
                    f"{text}profile  {plural(steps, 'step')}, slower than without: {self.folder}/, "
                    "a trace of each process for ui.perfetto.dev"
                )
        except OSError as error:
            self.log(f"WARNING: {error}; training goes on without the profile")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write a profile that the end of the launch cut short, if it has steps."""
        recorded = self.done - WARMUP - 1
        if kind is None and self.steps and recorded <= 0:
            self.log(
                f"WARNING: train.profile is {self.steps}, but this launch made only "
                f"{plural(self.done, 'step')}, of which the first {WARMUP + 1} are not recorded"
            )
        if self.profiler and kind is None and recorded > 0:
            self.finish(recorded)
        else:
            self.stack.close()
            self.profiler = None


def table(averages: Any, steps: int, device: str) -> str:
    """The most expensive operations, kernels on CUDA: own time and calls of one step."""
    on_cpu = device != "cuda"
    rows = []
    for event in averages:
        if (event.device_type.name == "CPU") != on_cpu:
            continue
        if event.is_user_annotation or event.key.startswith("ProfilerStep"):
            continue  # a bracket around others
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
