"""`accel-gpt bench`: how fast the training step of a config is here, and where its time goes.

    accel-gpt bench CONFIG.yaml [--section.key value ...]

Runs `train.update` in a temporary folder, without evaluation, samples, checkpoints and trackers.
"""

import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise, product
from typing import Any

import torch

from accel_gpt import train
from accel_gpt.commands.bench import BenchCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import in_steps, make_plan, plural
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.errors import require
from accel_gpt.launcher import world_size
from accel_gpt.training.accelerator import code_versions, describe_machine, ensure_data, memory_gb
from accel_gpt.training.auto_batch import resolve_auto_micro_batch
from accel_gpt.training.precision import resolve_compile, start_accelerator
from accel_gpt.training.ranks import peers
from accel_gpt.training.stopping import die_with_launcher
from accel_gpt.training.terminal import Display

PARTS = ("data", "forward and loss", "backward", "clip and optimizer")
Report = dict[str, Any]


def bench(asked: BenchCommand, config: Config) -> Report | None:
    """The figures of the training step; None on all processes but the main one."""
    die_with_launcher()
    with peers(world_size()), tempfile.TemporaryDirectory() as out:
        config = bare(config, out, asked.warmup + asked.steps + asked.parts)
        plan = make_plan(config, world_size())
        ensure_data(config.data)
        config, accelerator = start_accelerator(config, plan)
        config, plan = resolve_auto_micro_batch(config, plan, accelerator)
        config = resolve_compile(config, plan)
        with Display(False, config, plan) as display:
            run = train.start(config, plan, accelerator, display)
        try:
            report = measure(asked, run)
        finally:
            run.loader.close()
            run.writer.close()
        main = accelerator.is_main_process
        accelerator.end_training()
    return report if main else None


def bare(config: Config, out: str, steps: int) -> Config:
    """`config` with nothing but the training step, for at least so many of them."""
    asked = config.train
    length = asked.max_steps or in_steps(asked.max_tokens, asked.tokens_per_step)
    return replace(
        config,
        out_dir=out,
        train=replace(asked, profile=0, max_steps=max(length, steps), max_tokens=None),
        schedule=replace(config.schedule, warmup_steps=0, warmup_tokens=None),
        eval=replace(config.eval, every=0, only=False, hellaswag=None),
        sample=replace(config.sample, every=0),
        checkpoint=replace(
            config.checkpoint, every=0, every_tokens=None, resume="never", async_save=False
        ),
        log=replace(
            config.log,
            trackers=(),
            dashboard=False,
            batch_hash=False,
            layer_stats_every=0,
            level="warning",
        ),
        hub=replace(config.hub, push="never"),
    )


def measure(asked: BenchCommand, run: train.Run) -> Report:
    """Warm up, time whole steps, then the parts of further ones."""
    device, plan = run.accelerator.device, run.plan
    first = timed(lambda: train.update(run), device)
    for _ in range(asked.warmup - 1):
        train.update(run)
    seconds = whole_steps(run, asked.steps)
    memory = memory_gb(device)
    parts = parts_of_steps(run, asked.parts) if asked.parts else {}
    median = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    speed = run.reporter.speed
    counts = parameter_counts(run.config.model, run.corpus.vocab_size)
    return {
        "tokens_per_second": plan.tokens_per_step / median,
        "tokens_per_second_quartiles": [plan.tokens_per_step / quarters[i] for i in (2, 0)],
        "step_ms": 1000 * median,
        "steps": asked.steps,
        "warmup": asked.warmup,
        "first_step_seconds": first,
        "mfu": speed.metrics(median).get("perf/mfu"),
        "flops_per_token": speed.flops_per_token,
        "peak_flops": speed.peak,
        "dtype": speed.dtype,
        "memory_gb": memory,
        "memory_of": "device" if device.type == "cuda" else "process",
        "parts_ms": {name: 1000 * spent for name, spent in parts.items()},
        "parts_steps": asked.parts,
        "parameters": counts["total"],
        "compiled": run.config.train.compile is True,
        "plan": asdict(plan) | {"tokens_per_step": plan.tokens_per_step},
        **describe_machine(run.accelerator),
        "versions": code_versions(),
    }


def compare(asked: BenchCommand, options: Sequence[str]) -> str:
    """The speed in float32 and bf16, compiled or not, each in a process of its own: a table, or
    with `--json` one object. `options` are the keys set over the config.
    """
    require(world_size() == 1, "--compare measures one process; start it without a launcher")
    reports: dict[str, Any] = {}
    for precision, compiled in product(("no", "bf16"), ("false", "true")):
        name = "float32" if precision == "no" else precision
        name += ", compiled" if compiled == "true" else ""
        words = [sys.executable, "-m", "accel_gpt.cli", "bench", asked.config, *options, "--json"]
        words += ["--warmup", str(asked.warmup), "--steps", str(asked.steps), "--parts", "0"]
        words += ["--train.mixed_precision", precision, "--train.compile", compiled]
        sys.stderr.write(f"measuring {name}\n")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reports[name] = {"error": lines[-1]} if done.returncode else json.loads(done.stdout)
    if asked.json:
        return json.dumps(reports, indent=1) + "\n"
    return "".join(compared_line(name, report) for name, report in reports.items())


def compared_line(name: str, report: Report) -> str:
    """One candidate: tokens/s, time of a step and of the first one, or why there are none."""
    if "error" in report:
        return f"{name:<18} {report['error']}\n"
    return (
        f"{name:<18} {report['tokens_per_second']:>12,.0f} tokens/s {report['step_ms']:>10,.1f} ms "
        f"a step, the first {report['first_step_seconds']:.1f} s\n"
    )


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, the device included."""
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def whole_steps(run: train.Run, steps: int) -> list[float]:
    """Seconds of each of so many steps in a row; on CUDA nothing waits between them."""
    device = run.accelerator.device
    settle(device)
    if device.type != "cuda":
        return [timed(lambda: train.update(run), device) for _ in range(steps)]
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(steps + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        train.update(run)
        mark.record()
    settle(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


class Timed:
    """Stands for an object of a run, and times some of what is asked of it."""

    def __init__(self, real: Any, clock: "Clock", part: str, *names: str) -> None:
        self.real, self.clock, self.part, self.names = real, clock, part, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        return self.clock.around(found, self.part) if name in self.names else found

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.clock.around(self.real, self.part)(*given, **named)

    def __next__(self) -> Any:
        return self.clock.around(self.real.__next__, self.part)()


class Clock:
    """Seconds of each part; the device is waited for at both ends of one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.spent = device, dict.fromkeys(PARTS, 0.0)

    def around(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`work`, timed."""

        def timed_work(*given: Any, **named: Any) -> Any:
            with self.during(part):
                return work(*given, **named)

        return timed_work

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """What happens inside belongs to `part`."""
        settle(self.device)
        start = time.perf_counter()
        yield
        settle(self.device)
        self.spent[part] += time.perf_counter() - start


def parts_of_steps(run: train.Run, steps: int) -> dict[str, float]:
    """Seconds of each part of a step, and of all the rest: means over so many steps."""
    clock = Clock(run.accelerator.device)
    data, forward, backward, optimizer = PARTS
    stand_ins: dict[str, Any] = {
        "loader": Timed(run.loader, clock, data),
        "model": Timed(run.model, clock, forward),
        "gradients": Timed(run.gradients, clock, backward, "backward"),
        "optimizer": Timed(run.optimizer, clock, optimizer, "step", "zero_grad"),
    }
    stand_ins["gradients"] = Timed(stand_ins["gradients"], clock, optimizer, "clip")
    observed: Any = copy.copy(run)  # of the same state
    for name, stand_in in stand_ins.items():
        setattr(observed, name, stand_in)
    whole = sum(timed(lambda: train.update(observed), clock.device) for _ in range(steps))
    spent = clock.spent | {"rest": whole - sum(clock.spent.values())}
    return {name: seconds / steps for name, seconds in spent.items()}


def table(report: Report) -> str:
    """The figures for a person."""
    plan = report["plan"]
    low, high = report["tokens_per_second_quartiles"]
    lines = [
        f"model      {report['parameters']:,} parameters, "
        f"{report['flops_per_token'] / 1e6:,.1f} MFLOP a token",
        f"step       {plan['tokens_per_step']:,} tokens = "
        f"{plural(plan['micro_batch_size'], 'sequence')} x {plan['block_size']:,} tokens x "
        f"{plural(plan['accumulation_steps'], 'micro-step')} x "
        f"{plural(plan['world_size'], 'process', 'processes')}",
        f"device     {report['processes']} x {report['device']}, precision "
        f"{report['mixed_precision']}, {'' if report['compiled'] else 'not '}compiled, "
        f"{report['threads_per_process']} threads",
        f"speed      {report['tokens_per_second']:,.0f} tokens/s, median of "
        f"{plural(report['steps'], 'step')}; middle half {low:,.0f} to {high:,.0f}",
        f"           {report['step_ms']:,.1f} ms a step; the first took "
        f"{report['first_step_seconds']:.2f} s",
        f"MFU        {mfu_line(report)}",
        f"memory     {report['memory_gb']:.2f} GB at most, of the {report['memory_of']}",
    ]
    if report["parts_ms"]:
        whole = sum(report["parts_ms"].values())
        lines += [
            "",
            f"where a step's time goes ({plural(report['parts_steps'], 'further step')}, each part "
            f"waited for: {whole:,.1f} ms)",
            *(
                f"  {n:<20} {ms / whole:>6.1%} {ms:>10,.2f} ms"
                for n, ms in report["parts_ms"].items()
            ),
        ]
    return "\n".join(lines) + "\n"


def mfu_line(report: Report) -> str:
    """The share of the peak that is reached, with its formula, or why there is none."""
    if report["mfu"] is None:
        return f"not known: no {report['dtype']} peak of this device is kept"
    return (
        f"{report['mfu']:.1%} = {report['tokens_per_second']:,.0f} tokens/s x "
        f"{report['flops_per_token'] / 1e6:,.1f} MFLOP / ({report['processes']} x "
        f"{report['peak_flops'] / 1e12:,.1f} TFLOP/s of {report['dtype']})"
    )
