"""`train.profile`: what PyTorch's profiler saw of a few steps, as a trace and as a table.

Writes `profile/profile_N.json` of each process, for chrome://tracing or ui.perfetto.dev, and
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

PLAIN = 2  # steps before, in which kernels are chosen and memory is found: assumption
FOLDER = "profile"
SHOWN = 10
LONGEST = 80  # characters of a name; those of CUDA's kernels go on for lines


class Profile:
    """Records steps of a launch: one more after the plain ones, not kept, then `train.profile`."""

    def __init__(
        self, config: Config, accelerator: Accelerator, say: Callable[[str], None]
    ) -> None:
        self.steps, self.accelerator, self.say = config.train.profile, accelerator, say
        self.folder = Path(config.out_dir) / FOLDER
        self.stack = contextlib.ExitStack()
        self.profiler: Any = None
        self.done = 0  # steps of this launch

    @property
    def last(self) -> int:
        """The step of this launch with which the recording ends."""
        return PLAIN + 1 + self.steps

    def __enter__(self) -> Self:
        return self

    def completed(self, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """A step of the launch was completed; what that takes here is not training: `pause`."""
        if not self.steps:
            return
        self.done += 1
        if self.done == PLAIN:
            with pause():
                self.begin()
        elif self.profiler and self.done < self.last:
            self.profiler.step()
        elif self.profiler:
            with pause():
                self.finish(self.steps)

    def begin(self) -> None:
        """Start the profiler."""
        kinds = ["cpu"] + (["cuda"] if self.accelerator.device.type == "cuda" else [])
        asked = ProfileKwargs(
            activities=kinds,
            schedule_option={"wait": 0, "warmup": 1, "active": self.steps, "repeat": 1},
        )  # no output_trace_dir: there processes wait for each other, also for one without room
        self.profiler = self.stack.enter_context(self.accelerator.profile(asked))

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
                self.say(
                    f"{text}profile  {plural(steps, 'step')}, slower than without: {self.folder}/, "
                    "a trace of each process for ui.perfetto.dev"
                )
        except OSError as error:
            self.say(f"WARNING: {error}; training goes on without the profile")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a recording that the end of the launch cut short, if it has steps."""
        recorded = self.done - PLAIN - 1
        if kind is None and self.steps and recorded <= 0:
            self.say(
                f"WARNING: train.profile is {self.steps}, but this launch made only "
                f"{plural(self.done, 'step')}, of which the first {PLAIN + 1} are not recorded"
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
        for own, calls, name in rows[:SHOWN]
    ]
    return "\n".join([*lines, f"{'':>6} {total:>10.3f} {'':>12}  all {len(rows)}"]) + "\n"
