"""What a run reports: run.json, metrics, trackers and terminal, all from the same records."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_gpt.config.depth import describe_depth
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_yaml
from accel_gpt.config.plan import Plan, plural
from accel_gpt.console import printable
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.loader import HASH_BITS, Loader, batch_hash
from accel_gpt.files import strict_json, write_file
from accel_gpt.launcher import launcher_precision
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import threads_of_environment
from accel_gpt.training.dashboard import Dashboard
from accel_gpt.training.evaluation_time import EvaluationTime
from accel_gpt.training.machine import describe_machine
from accel_gpt.training.metrics import MetricsLog, Record, Speed, Stopwatch
from accel_gpt.training.profiling import profile
from accel_gpt.training.run_folder import RunFolder
from accel_gpt.training.state import TrainState
from accel_gpt.training.terminal import Display
from accel_gpt.training.trackers import Trackers, quiet_tensorboard


@contextmanager
def open_display(config: Config, plan: Plan, accelerator: Accelerator) -> Iterator[Display]:
    """The terminal of a run, and its dashboard with `log.dashboard`; both end with the context."""
    main = accelerator.is_main_process
    with Display(main, config, plan) as display, contextlib.ExitStack() as stack:
        stack.enter_context(quiet_tensorboard())
        if main and config.log.dashboard:
            folder = Path(config.out_dir) / "tensorboard"
            stack.enter_context(Dashboard(folder, display.log))
        yield display


class Reporter:
    """Writes each record to metrics.jsonl, metrics.csv, the trackers and the terminal."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        accelerator: Accelerator,
        gpt: GPT,
        display: Display,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.check_folder = check_folder  # raises `BusyError` if the run's folder has gone
        self.config, self.plan, self.accelerator, self.gpt = config, plan, accelerator, gpt
        self.speed, self.display, self.log = Speed(gpt, plan, accelerator), display, display.log
        self.trackers = Trackers(accelerator, config, has_mfu=self.speed.peak is not None)
        self.out_dir = Path(config.out_dir)
        self.metrics: MetricsLog | None = None  # on rank 0
        self.disk_full = False  # it has refused metrics
        self.synchronize = torch.cuda.synchronize if accelerator.device.type == "cuda" else int
        self.evaluation_time = EvaluationTime(config, plan)
        self.watch = Stopwatch(0.0, 0)
        self.beat: Callable[[], None] = lambda: None  # of the watchdog
        self.profile_step: Callable[[], None] = lambda: None

    def launch(self, corpus: Corpus, state: TrainState) -> None:
        """Record this launch, which resumes at `state`, and print its first lines."""
        self.check_folder()
        self.evaluation_time.start(corpus.evaluated)
        if self.accelerator.is_main_process:
            machine = describe_machine(self.accelerator)
            self.record_launch(corpus, machine, state.step)
            self.log(self.first_lines(corpus, machine))
        self.trackers.start(state.reported_step)
        self.reset(state)

    def record_launch(self, corpus: Corpus, machine: dict[str, Any], step: int) -> None:
        """Write `config.yaml`, and add this launch to `run.json`."""
        tokenizer = corpus.tokenizer
        launch = {
            "step": step,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "plan": asdict(self.plan),
            **machine,
            "model": {
                "parameters": parameter_counts(self.config.model, corpus.vocab_size)["total"],
                "vocab_size": corpus.vocab_size,
                "flops_per_token": self.speed.flops_per_token,
            },
            "data": {
                "fingerprint": corpus.fingerprint,
                "tokenizer": tokenizer.kind,
                "tokenizer_fingerprint": tokenizer.fingerprint,
                "lines": [line.removeprefix("data").strip() for line in corpus.lines(self.plan)],
            },
        }
        launches = [*RunFolder(self.out_dir).launches, launch]
        write_file(self.out_dir / "config.yaml", [to_yaml(self.config).encode()])
        text = strict_json({"launches": launches}, indent=1)
        write_file(self.out_dir / "run.json", [text.encode()])

    def first_lines(self, corpus: Corpus, machine: dict[str, Any]) -> str:
        """Model, data, plan and device of the run, for a person."""
        config, speed = self.config, self.speed
        parameters = parameter_counts(config.model, corpus.vocab_size)["total"]
        unknown = "" if speed.peak else f"; no MFU: its {speed.dtype} peak is not known"
        precision = "fp32" if machine["mixed_precision"] == "no" else machine["mixed_precision"]
        threads = plural(machine["threads_per_process"], "thread")
        if self.accelerator.device.type == "cpu" and threads_of_environment(config.train):
            threads += " (OMP_NUM_THREADS)"
        source = ""
        if config.train.mixed_precision is None:
            source = " (default)" if launcher_precision() == "no" else " (set by the launcher)"
        depth: Sequence[str] = ()
        if config.model.depth:
            depth = describe_depth(to_flat(config))
        return "\n".join(
            [
                f"model    {config.model.preset}, {parameters:,} parameters, "
                f"{speed.flops_per_token / 1e6:,.1f} MFLOP a token",
                *corpus.lines(self.plan),
                *corpus.lines_on_bytes(),
                *(f"plan     {line}" for line in self.plan.describe().splitlines()),
                *(f"plan     {line}" for line in depth),
                f"device   {machine['processes']} x {machine['device']}, precision {precision}"
                f"{source}, {threads}{unknown}",
            ]
        )

    def roll_back(self, state: TrainState) -> None:
        """Drop what was written for the steps after `state`."""
        self.trackers.reopen(state.reported_step + 1)
        self.reset(state)

    def reset(self, state: TrainState) -> None:
        """Cut the files back to `state`; the clock continues from there."""
        if self.accelerator.is_main_process:
            self.metrics = MetricsLog(
                out_dir=self.out_dir,
                step=state.reported_step,
                tokens=state.tokens,
                max_steps=self.plan.max_steps,
            )
            self.display.resume(state.step, self.metrics.losses)
        self.watch = Stopwatch(state.seconds, state.step, self.synchronize)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """The context of all steps of a launch, some of which `train.profile` records."""
        if not self.config.train.profile:
            yield
            return
        with profile(self.config, self.accelerator, self.log) as self.profile_step:
            yield

    def completed(self, step: int) -> None:
        """Note that a step was completed, with all that follows it."""
        self.beat()
        self.display.advance(step)
        self.profile_step()

    def evaluated(self, done: int, total: int) -> None:
        """Note that `done` batches of an evaluation were computed."""
        self.beat()
        self.display.evaluated(done, total)

    def step_metrics(self, step: int, loader: Loader) -> Record:
        """Speed since the last call, and the hash of the last global batch; collectives."""
        warm = self.watch.step > self.watch.first_step
        seconds = self.watch.lap(step)
        on_cpu = self.accelerator.device.type == "cpu"
        if warning := self.evaluation_time.check(seconds, warm, on_cpu):
            self.log(warning)
        return self.speed.metrics(seconds) | self.batch_hash(loader)

    def batch_hash(self, loader: Loader) -> Record:
        """The hash of the last global batch, with `log.batch_hash`; an all-reduce."""
        if not loader.keep_sequences:
            return {}
        local = torch.tensor(batch_hash(loader.kept), device=self.accelerator.device)
        return {
            "data/batch_hash": int(self.accelerator.reduce(local, "sum").item()) % (1 << HASH_BITS)
        }

    def publish(self, state: TrainState, record: Record) -> None:
        """Write the metrics of a step to the files, the trackers and the terminal."""
        state.seconds = self.watch.elapsed()
        whole = {"step": state.step, "tokens": state.tokens, "time": state.seconds} | record

        def write() -> None:
            if self.metrics:
                self.metrics.write(whole)
            if self.disk_full:  # TensorBoard's writer ends at an error
                self.trackers.reopen(state.step)
            self.accelerator.log(record, step=state.step)
            self.disk_full = False

        self.write(write)
        if self.metrics:
            self.display.show(whole, self.watch.left(state.step, self.plan.max_steps))

    def write(self, files: Callable[[], object]) -> None:
        """Call `files`, which writes. A disk without room does not end a run: the metrics are
        written when it has room, the trackers lack what they were sent; one warning until then.
        Raises `BusyError` if the run's folder has gone.
        """
        self.check_folder()
        try:
            files()
        except OSError as error:
            if not self.disk_full:
                free = ""
                with contextlib.suppress(OSError):
                    free = f" ({shutil.disk_usage(self.out_dir).free:,} bytes are free)"
                self.log(
                    f"WARNING: metrics could not be written in {self.out_dir}: "
                    f"{error.strerror or error}{free}; training goes on, and they are written when "
                    "there is room"
                )
            self.disk_full = True

    def samples_path(self, step: int) -> Path:
        """The file of the samples of a step."""
        return self.out_dir / "samples" / f"step_{step:08d}.txt"

    def samples(self, step: int, text: str) -> None:
        """Write samples to a file and the trackers; print those of the last step."""
        path = self.samples_path(step)

        def write() -> None:
            self.trackers.samples(step, text)
            path.parent.mkdir(exist_ok=True)
            write_file(path, [f"{text}\n".encode()])

        if self.accelerator.is_main_process:
            self.write(write)
        if step == self.plan.max_steps:
            self.log(printable(text))

    def sync(self) -> None:
        """Force the metrics to disk: before a checkpoint, which must not know more than they do."""
        if self.metrics:
            self.metrics.sync()
