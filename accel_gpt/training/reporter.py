"""What a run tells of itself: files, trackers and terminal, all from the same records."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.corpus import Corpus
from accel_gpt.model.gpt import GPT
from accel_gpt.training.dashboard import Dashboard
from accel_gpt.training.layer_stats import copies, layer_stats
from accel_gpt.training.metrics import MetricsLog, Record, Stopwatch
from accel_gpt.training.profiling import Profile
from accel_gpt.training.setup import Speed, record_run
from accel_gpt.training.state import TrainState
from accel_gpt.training.terminal import Display
from accel_gpt.training.trackers import (
    chart_groups,
    quiet_tensorboard,
    reopen_tensorboard,
    start_trackers,
    write_samples,
)


@contextmanager
def shown(config: Config, plan: Plan, accelerator: Accelerator) -> Iterator[Display]:
    """The terminal of a run, and its dashboard where it has one; both end with it."""
    main = accelerator.is_main_process
    with Display(main, config, plan) as display, contextlib.ExitStack() as stack:
        stack.enter_context(quiet_tensorboard())
        if main and config.log.dashboard:
            folder = Path(config.out_dir) / "tensorboard"
            stack.enter_context(Dashboard(folder, config.log.dashboard_port, display.say))
        yield display


class Reporter:
    """Gives each record to metrics.jsonl, metrics.csv, the trackers and the terminal."""

    def __init__(
        self, config: Config, plan: Plan, accelerator: Accelerator, gpt: GPT, display: Display
    ) -> None:
        self.config, self.plan, self.accelerator, self.gpt = config, plan, accelerator, gpt
        self.speed, self.display, self.say = Speed(gpt, plan, accelerator), display, display.say
        self.charts = chart_groups(config, has_mfu=self.speed.peak is not None)
        self.out_dir = Path(config.out_dir)
        self.metrics: MetricsLog | None = None  # of the main process
        self.refused: set[str] = set()  # kinds of files that the disk did not take
        self.settle = torch.cuda.synchronize if accelerator.device.type == "cuda" else int
        self.watch = Stopwatch(0.0, 0)
        self.profile = Profile(config, accelerator, self.say)
        self.beat: Callable[[], None] = lambda: None  # of the watchdog

    def launch(self, corpus: Corpus, state: TrainState) -> None:
        """Record this launch, which takes the run up at `state`."""
        if self.accelerator.is_main_process:
            parts = (self.config, self.plan, self.accelerator, corpus, self.speed)
            self.say(record_run(*parts, state.step))
        start_trackers(self.accelerator, self.config, state.step, self.charts)
        self.begin(state)

    def go_back(self, state: TrainState) -> None:
        """Forget what was told of the steps after `state`."""
        reopen_tensorboard(self.accelerator, state.step + 1, self.charts)
        self.begin(state)

    def begin(self, state: TrainState) -> None:
        """Cut the files back to `state`; the clock goes on from there."""
        if self.accelerator.is_main_process:
            self.metrics = MetricsLog(self.out_dir, state.step, state.tokens, self.plan.max_steps)
            self.display.take_up(state.step, self.metrics.losses)
        self.watch = Stopwatch(state.seconds, state.step, self.settle)

    def completed(self, step: int) -> None:
        """A step was completed, with all that followed it."""
        self.beat()
        self.display.advance(step)
        self.profile.completed(self.watch.pause)

    def pace(self, step: int) -> Record:
        """Speed since the last time it was asked for."""
        return self.speed.figures(self.watch.lap(step))

    def publish(self, state: TrainState, record: Record) -> None:
        """Give the figures of a step to the files, the trackers and the terminal."""
        state.seconds = self.watch.elapsed()
        whole = {"step": state.step, "tokens": state.tokens, "time": state.seconds} | record
        if metrics := self.metrics:
            self.write(lambda: metrics.write(whole))
        self.write(lambda: self.accelerator.log(record, step=state.step), state.step)
        if metrics:
            self.display.show(whole, self.watch.left(state.step, self.plan.max_steps))

    @contextmanager
    def layers(
        self, step: int, grad_norm: Tensor, tokens: Tensor, documents: Tensor | None
    ) -> Iterator[None]:
        """Where the optimizer makes the update `step`; gives the trackers what is due of layers.

        The rest as `layer_stats` takes it. A collective; the time it takes is not training.
        """
        every = self.config.log.layer_stats_every
        if not every or step % every:
            yield
            return
        with self.watch.pause():
            before = copies(self.gpt)
        yield
        with self.watch.pause():
            parts = (self.gpt, before, grad_norm, tokens, documents, self.accelerator)
            figures = layer_stats(*parts)
            self.write(lambda: self.accelerator.log(figures, step=step), step)

    def write(self, files: Callable[[], object], step: int | None = None) -> None:
        """Write `files`, of a `step` where they are those of trackers. A disk that refuses them
        does not end a run, and is told once, until it takes them again.
        """
        if step is not None and "metrics" in self.refused:  # the trackers' lines do not wait
            self.refused.add("trackers")
            return
        kind = "metrics" if step is None else "trackers"
        try:
            if step is not None and kind in self.refused:  # TensorBoard's writer ends at an error
                reopen_tensorboard(self.accelerator, step, self.charts)
            files()
            self.refused.discard(kind)
        except OSError as error:
            if not self.refused:
                free = ""
                with contextlib.suppress(OSError):
                    free = f" ({shutil.disk_usage(self.out_dir).free:,} bytes are free)"
                self.say(
                    f"WARNING: figures could not be written in {self.out_dir}: "
                    f"{error.strerror or error}{free}; training goes on, and they are written when "
                    "there is room"
                )
            self.refused.add(kind)

    def samples(self, step: int, text: str) -> None:
        """Keep samples, and show them at the end of the run."""
        self.write(lambda: write_samples(self.accelerator, self.out_dir, step, text), step)
        if step == self.plan.max_steps:
            self.say(text)

    def sync(self) -> None:
        """Force the files to disk: before a checkpoint, which must not know more than they do."""
        if self.metrics:
            self.metrics.sync()
