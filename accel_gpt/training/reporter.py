"""Report a run to its metrics files, the trackers and the terminal.

Writes `config.yaml`, `run.json`, `metrics.jsonl`, `metrics.csv` and `samples/` in the run's folder.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from accel_gpt.config.compare import differences
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, plural
from accel_gpt.config.values import to_flat, to_yaml
from accel_gpt.console import format_clock, printable
from accel_gpt.data.corpus import Corpus
from accel_gpt.files import strict_json, write_file
from accel_gpt.launch.context import Context
from accel_gpt.launch.machine import describe_machine, process_started, synchronize
from accel_gpt.launch.stopping import Watchdog
from accel_gpt.model.language_model import LanguageModel, is_new
from accel_gpt.runs.folder import CODE, RunFolder
from accel_gpt.runs.launches import LaunchClock, clocks, last_time
from accel_gpt.runs.state import TrainState
from accel_gpt.runs.tensor_files import weights_of
from accel_gpt.training.display import Display
from accel_gpt.training.metrics import MetricsLog, Record, Speed, Stopwatch
from accel_gpt.training.trackers import Trackers

MOST_NAMES = 5  # of new weights that a launch names one by one


class Reporter:
    """Writes each record to metrics.jsonl, metrics.csv, the trackers and the terminal."""

    def __init__(
        self,
        context: Context,
        gpt: LanguageModel,
        optimizer: AcceleratedOptimizer,
        display: Display,
    ) -> None:
        config = context.config
        plan = context.plan
        accelerator = context.accelerator
        self.context = context
        self.accelerator = accelerator
        self.gpt = gpt
        self.optimizer = optimizer
        self.display = display
        self.log = display.log
        self.check_folder = context.check_folder
        self.out_dir = Path(config.out_dir)
        self.speed = Speed(gpt, plan, accelerator)
        self.trackers = Trackers(accelerator, config.log.trackers, self.out_dir)
        self.metrics: MetricsLog | None = None  # on rank 0
        self.disk_full = False  # the last write failed
        self.watchdog: Watchdog | None = None
        self.launched: dict[str, float | str] = {}  # for the first record of this launch

    # ----------------------------------------------------------------------- the launch

    def start(self, corpus: Corpus, state: TrainState) -> None:
        """Record this launch and print its first lines. The launch starts or resumes at `state`."""
        self.check_folder()
        if self.accelerator.is_main_process:
            machine = describe_machine(self.accelerator)
            self.record_launch(corpus, machine, state)
            self.log(self.first_lines(corpus, machine, state))
        self.trackers.start(
            step=state.reported_step,
            sampled_step=state.step,
            yaml=to_yaml(self.context.config),
            options=to_flat(self.context.config),
        )
        self.cut_back(state)

    def record_launch(self, corpus: Corpus, machine: dict[str, Any], state: TrainState) -> None:
        """Write `config.yaml` and add this launch to `run.json`."""
        tokenizer = corpus.tokenizer
        weights = list(self.gpt.parameters())
        run = RunFolder(self.out_dir)
        earlier = self.start_clock(run, machine, state)
        launch = {
            "step": state.step,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "asked": dict(self.context.asked),
            "plan": asdict(self.context.plan),
            **machine,
            "model": {
                "parameters": self.gpt.parameter_count(),
                "vocab_size": corpus.vocab_size,
                "flops_per_token": self.speed.flops_per_token,
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in weights}),
            },
            "optimizer": describe_groups(self.optimizer, weights),
            "data": {
                "fingerprint": corpus.fingerprint,
                "tokenizer": tokenizer.kind,
                "tokenizer_fingerprint": tokenizer.fingerprint,
                "lines": recorded_lines(corpus, self.context.plan),
            },
        }
        if state.initial_weights:
            launch["initial_weights"] = asdict(state.initial_weights)
        own = self.context.config.own
        if own.file:
            launch["code"] = {"file": own.name, "sha256": own.sha256, "functions": own.functions}
            write_file(self.out_dir / CODE, [own.source])
        if state.step and run.config:
            changed = differences(run.config, to_flat(self.context.config))
            launch["changed"] = {key: list(pair) for key, pair in changed.items()}
        self.write_launches([*earlier, launch])  # first: it has the plan's budget
        write_file(self.out_dir / "config.yaml", [to_yaml(self.context.config).encode()])

    def start_clock(
        self, run: RunFolder, machine: dict[str, Any], state: TrainState
    ) -> list[dict[str, Any]]:
        """Add clock and price to `machine`, and set `launched`; call it before records are removed.

        Returns the earlier launches, the last one with the end that its records tell.
        """
        earlier = [dict(launch) for launch in run.launches]
        latest = max(last_time(run.records(), launch=len(earlier)), state.seconds)
        now = time.time()
        price = self.context.config.log.price
        self.launched = {
            "launch/number": len(earlier) + 1,
            "launch/device": f"{machine['processes']} x {machine['device']}",
        }
        if price is not None:
            self.launched["launch/price"] = price
        started = min(process_started(), now)
        *_, last = [None, *clocks(earlier, latest)]
        if last is not None and last.ended is not None:
            earlier[-1]["clock"] = asdict(last)
            started = min(max(started, last.ended), now)  # the same process may train twice
            self.launched["launch/gap_s"] = max(now - last.ended, 0.0)
        machine["clock"] = asdict(LaunchClock(started, trained=now, time=state.seconds))
        machine["price"] = price
        return earlier

    def write_launches(self, launches: Sequence[Mapping[str, Any]]) -> None:
        """Write `run.json`."""
        text = strict_json({"launches": launches}, indent=1)
        write_file(self.out_dir / "run.json", [text.encode()])

    def record_length(self, config: Config, plan: Plan, corpus: Corpus) -> bool:
        """Write another length to `config.yaml` and `run.json`; return whether they have it.

        Call it on rank 0. The length is in force as soon as `run.json` has it.
        """
        self.check_folder()
        *earlier, launch = RunFolder(self.out_dir).launches or ({},)
        data = launch.get("data", {}) | {"lines": recorded_lines(corpus, plan)}
        changed = {**launch, "plan": asdict(plan), "data": data}
        file = self.out_dir / "config.yaml"
        try:
            write_file(file, [to_yaml(config).encode()])
            self.write_launches([*earlier, changed])
        except OSError as error:
            self.log(f"WARNING: {self.out_dir} cannot record another length: {error.strerror}")
            with contextlib.suppress(OSError):
                write_file(file, [to_yaml(self.context.config).encode()])
            return False
        return True

    def first_lines(self, corpus: Corpus, machine: dict[str, Any], state: TrainState) -> str:
        """Describe the folder, options, model, data, plan and device of the run."""
        megaflops = self.speed.flops_per_token / 1e6
        own = self.context.config.own
        code = []
        if own.file:
            code = [f"code     {own.file} ({own.sha256[:12]}): {', '.join(own.functions)}"]
        weights = []
        new = self.context.config.model.new_weights
        if state.initial_weights and state.step == 0:
            weights.append(f"weights  from {state.initial_weights}")
        if new and state.step == 0:
            weights.append(f"weights  new: {describe_new(weights_of(self.gpt), new)}")
        precision = machine["mixed_precision"]
        threads = plural(machine["threads_per_process"], "thread")
        model = self.context.config.model.preset if own.model is None else own.name
        plan = self.context.plan.describe(self.context.config.schedule.warmup_steps)
        lines = [
            f"run      {self.context.config.out_dir}",
            *option_lines(to_flat(self.context.config)),
            *code,
            f"model    {model}, {self.gpt.parameter_count():,} parameters, "
            f"{megaflops:,.1f} MFLOP per token",
            *weights,
            *corpus.lines(self.context.plan),
            *(f"plan     {line}" for line in plan.splitlines()),
            f"device   {machine['processes']} x {machine['device']}, "
            f"precision {'fp32' if precision == 'no' else precision}, {threads}",
        ]
        if machine["idle_gpus"]:
            lines.append(
                f"device   idle: {plural(machine['idle_gpus'], 'other GPU')}; accelerate launch "
                "--multi_gpu uses all of them"
            )
        return "\n".join(lines)

    def cut_back(self, state: TrainState) -> None:
        """Remove the records and samples after `state`; set the clock to `state`."""
        if self.accelerator.is_main_process:
            for step, path in RunFolder(self.out_dir).samples.items():
                if step > state.step:
                    path.unlink()
            self.metrics = MetricsLog(
                out_dir=self.out_dir,
                step=state.reported_step,
                tokens=state.tokens,
            )
            self.display.resume(self.metrics.losses)
        self.stopwatch = Stopwatch(
            self.accelerator.device, step=state.step, seconds_before=state.seconds
        )

    # ----------------------------------------------------------------------- the steps

    def heartbeat(self) -> None:
        """Tell the watchdog that the run made progress."""
        if self.watchdog:
            self.watchdog.heartbeat()

    def step_metrics(self, step: int, waited: float) -> Record:
        """Return the speed since the last call; `waited`: seconds of all these steps, for data."""
        steps = max(1, step - self.stopwatch.step)
        record = self.speed.metrics(self.lap(step), step)
        record["perf/data_wait_ms"] = 1000 * waited / steps
        return record

    def lap(self, step: int) -> float:
        """Return the seconds per step since the last call."""
        synchronize(self.accelerator.device)
        return self.stopwatch.lap(step)

    def publish(self, state: TrainState, record: Record) -> None:
        """Write the metrics of a step to the files, the trackers and the terminal."""
        state.seconds = self.stopwatch.elapsed()
        max_steps = self.context.plan.max_steps
        record = record | self.stopwatch.take_pauses()
        whole = {"step": state.step, "tokens": state.tokens, "time": state.seconds} | record
        launched = self.launched
        self.launched = {}

        def write() -> None:
            try:
                if self.metrics:
                    self.metrics.write({**whole, **launched}, max_steps)
            finally:
                self.trackers.log(record, state.step)
            self.disk_full = False

        self.write_or_warn(write)
        if self.metrics:
            self.display.show(whole, max_steps, self.stopwatch.left(state.step, max_steps))

    def samples_path(self, step: int) -> Path:
        """Return the path of the samples of a step."""
        return self.out_dir / "samples" / f"step_{step:08d}.txt"

    def write_samples(self, step: int, text: str) -> None:
        """Write samples to a file and the trackers; print the samples of the last step."""
        path = self.samples_path(step)

        def write() -> None:
            try:
                path.parent.mkdir(exist_ok=True)
                write_file(path, [f"{text}\n".encode()])
            finally:
                self.trackers.log({"samples": text}, step)

        if self.accelerator.is_main_process:
            self.write_or_warn(write)
        if step == self.context.plan.end:
            self.log(printable(text))

    def finish(self) -> None:
        """Write the last values of the trackers and close them."""
        self.write_or_warn(self.trackers.finish)

    def write_or_warn(self, write: Callable[[], object]) -> None:
        """Call `write`. If it raises `OSError`, warn once and continue.

        On a full disk, metrics are kept and written later. Raises `BusyError` if the run has lost
        its folder.
        """
        self.check_folder()
        try:
            write()
        except OSError as error:
            if not self.disk_full:
                self.log(
                    f"WARNING: metrics could not be written in {self.out_dir}: "
                    f"{error.strerror or error}; training continues and writes them later"
                )
            self.disk_full = True

    def sync(self) -> None:
        """Sync the metrics to disk, before a checkpoint of the same step becomes valid."""
        if self.metrics:
            self.metrics.sync()


def recorded_lines(corpus: Corpus, plan: Plan) -> list[str]:
    """Describe the sources of a run and their epochs, for `run.json`."""
    return [line.removeprefix("data").strip() for line in corpus.lines(plan)]


def describe_groups(optimizer: AcceleratedOptimizer, weights: Sequence[Tensor]) -> dict[str, Any]:
    """Count what the optimizer updates, for `run.json`; vectors have fewer than two dimensions."""
    groups = optimizer.param_groups
    updated = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    decayed = [p for group in groups if group.get("weight_decay") for p in group["params"]]
    return {
        "weights": len(weights),
        "never_updated": sum(id(p) not in updated for p in weights),
        "vectors": sum(p.dim() < 2 for p in weights),
        "decayed_vectors": sum(p.dim() < 2 for p in decayed),
    }


def describe_new(weights: Mapping[str, Tensor], patterns: Sequence[str]) -> str:
    """Name the weights that match `model.new_weights`: each, or of many the patterns and counts."""
    names = [name for name in weights if is_new(name, patterns)]
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    parts = []
    for pattern in patterns:
        matching = [weights[name] for name in names if is_new(name, [pattern])]
        parameters = sum(weight.numel() for weight in matching)
        parts.append(f"{pattern} ({plural(len(matching), 'weight')}, {parameters:,} parameters)")
    return ", ".join(parts)


def option_lines(options: Mapping[str, Any]) -> list[str]:
    """Describe the options that differ from their defaults, one line per section of the config."""
    sections: dict[str, list[str]] = {}
    for key, (_, value) in differences({}, options).items():
        if key == "out_dir":  # a line above shows it
            continue
        text = value if isinstance(value, str) else strict_json(value)
        sections.setdefault(key.partition(".")[0], []).append(f"{key} {text}")
    return [f"options  {', '.join(options)}" for options in sections.values()]


def summarize_run(config: Config, plan: Plan, state: TrainState, signal_name: str | None) -> str:
    """Return the last lines of a launch: what it did, the folder, and an earlier best step."""
    spent = format_clock(state.seconds)
    if state.step == 0:
        return f"{signal_name}: stopped before the first step; launch again to start"
    if signal_name or state.step < plan.end:
        return (
            f"{signal_name or 'train.stop_at'}: saved at step {state.step:,} of "
            f"{plan.max_steps:,} after {spent}; launch again to continue"
        )
    loss = "" if state.val_loss is None else f", val loss {state.val_loss:.4f}"
    finished = f"finished by {plan.finish.file}: {plan.finish.why}\n" if plan.finish else ""
    best = ""
    if config.checkpoint.keep_best and state.best_step not in (None, state.step):
        best = (
            f"\nbest     step {state.best_step:,}, {config.eval.best} {state.best_value:.4f}; "
            "sample, evaluate, export and push use this checkpoint"
        )
    return (
        f"{finished}{plural(state.step, 'step')}, {state.tokens:,} tokens in {spent}{loss}: "
        f"{config.out_dir}{best}"
    )
