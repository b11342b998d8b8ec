"""`accel-gpt bench CONFIG`: tokens/s, MFU and memory of a config, and where a step's time goes.

Runs `train.update` in a temporary folder, without evaluation, samples, checkpoints and trackers.
"""

import contextlib
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from accel_gpt.config.checks import NotNegative, Positional, Positive, Section
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config, parse_command
from accel_gpt.config.plan import make_plan, plural
from accel_gpt.console import exit_on_sigterm, table, write_out
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.errors import UserError, require
from accel_gpt.launcher import child_error, is_main, run_child, world_size

if TYPE_CHECKING:  # torch is imported once the options are right
    import torch

    from accel_gpt.train import Run

PARTS = ("data", "forward and loss", "backward", "clip and optimizer")
Report = dict[str, Any]
STEP_ALONE = (  # over the config: nothing but the training step
    *("--train.profile=0", "--schedule.warmup_steps=0", "--schedule.warmup_tokens=null"),
    *("--eval.every=0", "--eval.only=false", "--eval.hellaswag=null", "--eval.tasks=[]"),
    *("--sample.every=0", "--checkpoint.every=0", "--checkpoint.every_tokens=null"),
    *("--checkpoint.resume=never", "--checkpoint.async_save=false"),
    *("--log.trackers=[]", "--log.dashboard=false"),
    *("--log.batch_hash=false", "--log.level=warning"),
    "--hub.push=never",
)


@dataclass(frozen=True)
class BenchCommand(Section, prefix="bench."):
    """Measure the training step of a config: tokens a second, MFU, memory, where its time goes.

    Any --section.key of the config may be set as well. No run is kept. On several processes:
    accelerate launch -m accel_gpt.cli bench CONFIG ... Examples:
      accel-gpt bench quickstart
      accel-gpt bench quickstart --compare
      accel-gpt bench gpt2_124m --train.mixed_precision bf16 --steps 50
    """

    config: Positional[str]
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
    from accel_gpt.hub.pretrained import check_initial_tokenizer, inherit

    keys: list[str] = []
    options = parse_command(BenchCommand, argv, "accel-gpt bench", keys)
    config = load_config([options.config, *keys, *STEP_ALONE], "accel-gpt bench", inherit)
    exit_on_sigterm()
    check_initial_tokenizer(config)
    if options.compare:
        write_out(compare_precisions(options, keys))
    elif report := bench(options, config):
        write_out(json.dumps(report, indent=1) + "\n" if options.json else bench_text(report))
    return 0


def bench(options: BenchCommand, config: Config) -> Report | None:
    """Measure the training step; returns None on all ranks but 0."""
    from accel_gpt.train import start
    from accel_gpt.training.accelerator import resolve_auto, start_accelerator, start_processes
    from accel_gpt.training.ranks import peers
    from accel_gpt.training.setup import ensure_data
    from accel_gpt.training.stopping import die_with_launcher
    from accel_gpt.training.terminal import Display

    die_with_launcher()
    length, steps = make_plan(config, 1).max_steps, options.warmup + options.steps + options.parts
    train = replace(config.train, max_steps=max(length, steps), max_tokens=None)
    given = config
    with peers(world_size()), tempfile.TemporaryDirectory() as out:
        config = replace(config, out_dir=out, train=train)
        plan = make_plan(config, world_size())
        start_processes(config)
        ensure_data(given, stdout=sys.stderr)  # the report alone goes to standard output
        config, accelerator = start_accelerator(config, plan)
        config, plan = resolve_auto(config, plan, accelerator)
        with Display(False, config, plan) as display:
            run = start(config, plan, accelerator, display)
        with contextlib.closing(run.loader), contextlib.closing(run.writer):
            report = measure_steps(options, run)
        accelerator.end_training()
    return report if is_main() else None


def measure_steps(options: BenchCommand, run: "Run") -> Report:
    """Warm up, time whole steps, then the parts of further ones."""
    from accel_gpt import train
    from accel_gpt.training.machine import code_versions, describe_machine, memory_gb

    def step() -> None:
        train.update(run)

    device, plan = run.accelerator.device, run.plan
    first = timed(step, device)
    for _ in range(options.warmup - 1):
        step()
    seconds = seconds_of_each(step, device, options.steps)
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


def seconds_of_each(step: Callable[[], None], device: "torch.device", steps: int) -> list[float]:
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


class TimedLoader:
    """The loader of a run; `following` stands for its `__next__`."""

    def __init__(self, loader: Any, following: Callable[[], Any]) -> None:
        self.loader, self.following = loader, following

    def __next__(self) -> Any:
        return self.following()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def part_seconds(run: "Run", steps: int) -> dict[str, float]:
    """Mean seconds of each part of a step, and of the rest, over the last `steps` steps of a run.

    Each part is waited for: the objects of `run` get methods that do so.
    """
    from accel_gpt import train

    seconds, device = dict.fromkeys(PARTS, 0.0), run.accelerator.device

    def part(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            results = []
            seconds[name] += timed(lambda: results.append(work(*args, **kwargs)), device)
            return results[0]

        return timed_work

    data, forward, backward, optimizer = PARTS
    observed: Any = copy.copy(run)  # `run` keeps its loader, which is closed
    observed.loader = TimedLoader(run.loader, part(data, run.loader.__next__))
    observed.model = part(forward, run.model)
    observed.gradients.backward = part(backward, run.gradients.backward)
    observed.gradients.clip = part(optimizer, run.gradients.clip)
    observed.optimizer.step = part(optimizer, run.optimizer.step)
    observed.optimizer.zero_grad = part(optimizer, run.optimizer.zero_grad)
    whole = sum(timed(lambda: train.update(observed), device) for _ in range(steps))
    seconds["rest"] = whole - sum(seconds.values())
    return {name: spent / steps for name, spent in seconds.items()}


def compare_precisions(options: BenchCommand, keys: Sequence[str]) -> str:
    """The speed in float32 and bf16, compiled or not, each in a process of its own: a table, or
    with `--json` one object. `keys` are the options set over the config.
    """
    require(world_size() == 1, "--compare measures one process; start it without a launcher")
    reports: dict[str, Any] = {}
    for precision, compiled in product(("no", "bf16"), ("false", "true")):
        name = precision.replace("no", "float32") + (", compiled" if compiled == "true" else "")
        words = ["bench", options.config, *keys, "--json"]
        words += ["--warmup", str(options.warmup), "--steps", str(options.steps), "--parts", "0"]
        words += ["--train.mixed_precision", precision, "--train.compile", compiled]
        sys.stderr.write(f"measuring {name}\n")
        done = run_child(words, capture=True)
        error = child_error(done.stderr, done.returncode)
        reports[name] = {"error": error} if done.returncode else json.loads(done.stdout)
    if all("error" in report for report in reports.values()):
        raise UserError(error)
    if options.json:
        return json.dumps(reports, indent=1) + "\n"
    rows = [
        (name, f"error: {report['error']}", "")
        if "error" in report
        else (
            name,
            f"{report['tokens_per_second']:,.0f} tokens/s",
            f"{report['step_ms']:,.1f} ms a step, the first {report['first_step_seconds']:.1f} s",
        )
        for name, report in reports.items()
    ]
    return table(rows, "<18", ">12", ">10")


def bench_text(report: Report) -> str:
    """The report as text."""
    plan, parts = report["plan"], report["parts_ms"]
    low, high = report["tokens_per_second_quartiles"]
    work = f"{report['flops_per_token'] / 1e6:,.1f} MFLOP"
    speed = f"{report['tokens_per_second']:,.0f} tokens/s"
    reached = f"not known: no {report['dtype']} peak of this device is kept"
    if report["mfu"] is not None:
        peak = f"{report['peak_flops'] / 1e12:,.1f} TFLOP/s of {report['dtype']}"
        reached = f"{report['mfu']:.1%} = {speed} x {work} / ({report['processes']} x {peak})"
    step = (
        f"{plan['tokens_per_step']:,} tokens = {plural(plan['micro_batch_size'], 'sequence')} x "
        f"{plan['block_size']:,} tokens x {plural(plan['accumulation_steps'], 'micro-step')} x "
        f"{plural(plan['world_size'], 'process', 'processes')}"
    )
    rows = [
        ("model", f"{report['parameters']:,} parameters, {work} a token"),
        ("step", step),
        (
            "device",
            f"{report['processes']} x {report['device']}, precision {report['mixed_precision']}, "
            f"{'' if report['compiled'] else 'not '}compiled, "
            f"{plural(report['threads_per_process'], 'thread')}",
        ),
        (
            "speed",
            f"{speed}, median of {plural(report['steps'], 'step')}; middle half {low:,.0f} to "
            f"{high:,.0f}",
        ),
        (
            "",
            f"{report['step_ms']:,.1f} ms a step; the first took "
            f"{report['first_step_seconds']:.2f} s",
        ),
        ("MFU", reached),
        ("memory", f"{report['memory_gb']:.2f} GB at most, of the {report['memory_of']}"),
    ]
    text = table(rows, "<9", "<")
    if parts:
        whole = sum(parts.values())
        further = plural(report["parts_steps"], "further step")
        text += f"\nwhere a step's time goes ({further}, each waited for: {whole:,.1f} ms)\n"
        shares = [(f"  {n}", f"{ms / whole:.1%}", f"{ms:,.2f} ms") for n, ms in parts.items()]
        text += table(shares, "<22", ">6", ">13")
    return text
