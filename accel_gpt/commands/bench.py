"""`accel-gpt bench CONFIG`: tokens/s, MFU and memory of a config, and where a step's time goes.

Runs `train.update` in a temporary folder, without evaluation, samples, checkpoints and trackers.
"""

import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from accel_gpt.config.checks import NotNegative, Positive, Section
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config, parse_command
from accel_gpt.config.plan import in_steps, make_plan, plural
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.errors import require
from accel_gpt.launcher import world_size

if TYPE_CHECKING:  # torch is imported once the options are right
    import torch

    from accel_gpt.train import Run

PARTS = ("data", "forward and loss", "backward", "clip and optimizer")
Report = dict[str, Any]


@dataclass(frozen=True)
class BenchCommand(Section, prefix="bench."):
    """Measure the training step of a config: tokens a second, MFU, memory, where its time goes.

    Any --section.key of the config may be set as well. Nothing is kept. On several processes:
    accelerate launch -m accel_gpt.cli bench CONFIG ...
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    warmup: Positive[int] = 5
    """Steps before those that are measured."""
    steps: Positive[int] = 20
    """Steps that are measured."""
    parts: NotNegative[int] = 5
    """Further steps, in which each part is waited for and timed by itself; 0: none."""
    compare: bool = False
    """Measure float32 and bf16, compiled or not, side by side: what auto chooses between."""
    json: bool = False
    """One JSON object in place of text."""


def main(argv: Sequence[str]) -> int:
    """Measure the training step of a config on this machine."""
    from accel_gpt.hub.pretrained import inherit

    keys: list[str] = []
    options = parse_command(BenchCommand, argv, "accel-gpt bench", keys)
    config = load_config([options.config, *keys], "accel-gpt bench", inherit)
    exit_on_sigterm()
    if options.compare:
        write_out(compare(options, keys))
    elif report := bench(options, config):
        write_out(json.dumps(report, indent=1) + "\n" if options.json else as_text(report))
    return 0


def bench(options: BenchCommand, config: Config) -> Report | None:
    """Measure the training step; returns None on all ranks but 0."""
    from accel_gpt import train
    from accel_gpt.training.accelerator import resolve_auto, start_accelerator
    from accel_gpt.training.ranks import peers
    from accel_gpt.training.setup import ensure_data
    from accel_gpt.training.stopping import die_with_launcher
    from accel_gpt.training.terminal import Display

    die_with_launcher()
    with peers(world_size()), tempfile.TemporaryDirectory() as out:
        config = bare(config, out, options.warmup + options.steps + options.parts)
        plan = make_plan(config, world_size())
        ensure_data(config.data)
        config, accelerator = start_accelerator(config, plan)
        config, plan = resolve_auto(config, plan, accelerator)
        with Display(False, config, plan) as display:
            run = train.start(config, plan, accelerator, display)
        try:
            report = measure(options, run)
        finally:
            run.loader.close()
            run.writer.close()
        main = accelerator.is_main_process
        accelerator.end_training()
    return report if main else None


def bare(config: Config, out: str, steps: int) -> Config:
    """`config` with nothing but the training step, for at least so many of them."""
    train = config.train
    length = train.max_steps or in_steps(train.max_tokens, train.tokens_per_step)
    return replace(
        config,
        out_dir=out,
        train=replace(train, profile=0, max_steps=max(length, steps), max_tokens=None),
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


def measure(options: BenchCommand, run: "Run") -> Report:
    """Warm up, time whole steps, then the parts of further ones."""
    from accel_gpt import train
    from accel_gpt.training.machine import code_versions, describe_machine, memory_gb

    def step() -> None:
        train.update(run)

    device, plan = run.accelerator.device, run.plan
    first = timed(step, device)
    for _ in range(options.warmup - 1):
        step()
    seconds = step_seconds(step, device, options.steps)
    memory = memory_gb(device)
    parts = part_seconds(run, options.parts) if options.parts else {}
    median = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    speed = run.reporter.speed
    counts = parameter_counts(run.config.model, run.corpus.vocab_size)
    return {
        "tokens_per_second": plan.tokens_per_step / median,
        "tokens_per_second_quartiles": [plan.tokens_per_step / quarters[i] for i in (2, 0)],
        "step_ms": 1000 * median,
        "steps": options.steps,
        "warmup": options.warmup,
        "first_step_seconds": first,
        "mfu": speed.metrics(median).get("perf/mfu"),
        "flops_per_token": speed.flops_per_token,
        "peak_flops": speed.peak,
        "dtype": speed.dtype,
        "memory_gb": memory,
        "memory_of": "device" if device.type == "cuda" else "process",
        "parts_ms": {name: 1000 * spent for name, spent in parts.items()},
        "parts_steps": options.parts,
        "parameters": counts["total"],
        "compiled": run.config.train.compile is True,
        "plan": asdict(plan) | {"tokens_per_step": plan.tokens_per_step},
        **describe_machine(run.accelerator),
        "versions": code_versions(),
    }


def synchronize(device: "torch.device") -> None:
    """Wait until the device has finished its work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(work: Callable[[], object], device: "torch.device") -> float:
    """Seconds that `work` takes, the device included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def step_seconds(step: Callable[[], None], device: "torch.device", steps: int) -> list[float]:
    """Seconds of each of `steps` steps in a row; on CUDA nothing waits between them."""
    import torch

    if device.type != "cuda":
        return [timed(step, device) for _ in range(steps)]
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(steps + 1)
    ]
    synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


class Timed:
    """Wraps an object of a run and adds the seconds of some of its methods to the parts of a step.

    `parts`: the part of a step by the name of a method; `__call__` and `__next__` count, too.
    """

    def __init__(
        self, wrapped: Any, seconds: dict[str, float], device: "torch.device", **parts: str
    ) -> None:
        self.wrapped, self.seconds, self.device, self.parts = wrapped, seconds, device, parts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        if name not in self.parts:
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            results = []
            spent = timed(lambda: results.append(found(*args, **kwargs)), self.device)
            self.seconds[self.parts[name]] += spent
            return results[0]

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()


def part_seconds(run: "Run", steps: int) -> dict[str, float]:
    """Mean seconds of each part of a step, and of the rest, over `steps` steps."""
    from accel_gpt import train

    seconds, device = dict.fromkeys(PARTS, 0.0), run.accelerator.device
    data, forward, backward, optimizer = PARTS
    observed: Any = copy.copy(run)  # shares its state
    observed.loader = Timed(run.loader, seconds, device, __next__=data)
    observed.model = Timed(run.model, seconds, device, __call__=forward)
    observed.gradients = Timed(run.gradients, seconds, device, backward=backward, clip=optimizer)
    observed.optimizer = Timed(run.optimizer, seconds, device, step=optimizer, zero_grad=optimizer)
    whole = sum(timed(lambda: train.update(observed), device) for _ in range(steps))
    seconds["rest"] = whole - sum(seconds.values())
    return {part: spent / steps for part, spent in seconds.items()}


def compare(options: BenchCommand, keys: Sequence[str]) -> str:
    """The speed in float32 and bf16, compiled or not, each in a process of its own: a table, or
    with `--json` one object. `keys` are the options set over the config.
    """
    require(world_size() == 1, "--compare measures one process; start it without a launcher")
    reports: dict[str, Any] = {}
    for precision, compiled in product(("no", "bf16"), ("false", "true")):
        name = "float32" if precision == "no" else precision
        name += ", compiled" if compiled == "true" else ""
        words = [sys.executable, "-m", "accel_gpt.cli", "bench", options.config, *keys, "--json"]
        words += ["--warmup", str(options.warmup), "--steps", str(options.steps), "--parts", "0"]
        words += ["--train.mixed_precision", precision, "--train.compile", compiled]
        sys.stderr.write(f"measuring {name}\n")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reports[name] = {"error": lines[-1]} if done.returncode else json.loads(done.stdout)
    if options.json:
        return json.dumps(reports, indent=1) + "\n"
    return "".join(
        f"{name:<18} {report['error']}\n"
        if "error" in report
        else f"{name:<18} {report['tokens_per_second']:>12,.0f} tokens/s "
        f"{report['step_ms']:>10,.1f} ms a step, the first {report['first_step_seconds']:.1f} s\n"
        for name, report in reports.items()
    )


def as_text(report: Report) -> str:
    """The report as text."""
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
