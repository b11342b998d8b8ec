"""`accel-gpt plan CONFIG`: compute size, FLOPs, memory, hours and cost of a config.

Reads the config, and the index of its data if it exists; needs no torch. `cost/` holds the
arithmetic; docs/explanation/cost.md derives it.
"""

import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import (
    Plan,
    fitting_sizes,
    make_plan,
    plural,
    reference_steps,
    with_size,
)
from accel_gpt.console import format_hours, table, write_out
from accel_gpt.cost.data_sizes import (
    evaluation_tokens,
    split_tokens,
    vocabulary_size,
    with_expected_length,
)
from accel_gpt.cost.forecast import assumed_mfu, run_disk, run_hours, run_length, speed_at
from accel_gpt.cost.memory import Machine, footprint, largest_size
from accel_gpt.data.sources import train_paths
from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.launch.devices import (
    DEVICES,
    FAST_BF16,
    bf16_instructions,
    device_key,
    device_memory,
    half_precision,
    peak_flops,
    precision_problem,
)
from accel_gpt.model.sizes import flops_per_token, mfu, parameter_counts

CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3
PRECISION = "--train.mixed_precision"
UNKNOWN_SPEED = "unknown; measure it here with accel-gpt bench, or give --tokens_per_second"


def run(options: PlanCommand) -> int:
    """Print what a config needs, and whether it fits; return 1 if it does not."""
    report = forecast(options, options.loaded)
    if options.json:
        write_out(json.dumps(report, indent=1) + "\n")
    else:
        write_out(plan_text(report))
    return 1 if report["memory"]["fits"] is False else 0


def forecast(options: PlanCommand, config: Config) -> dict[str, Any]:
    """Return the forecast of a config on a machine, as JSON values."""
    machine = make_machine(options, config)
    vocab_size, source = vocabulary_size(config, options.vocab_size)
    if config.train.micro_batch_size == "auto":
        config = with_size(config, largest_size(config, vocab_size, machine) or 1)
    of_budget = []
    if config.train.budget:
        speed, _ = planned_speed(options, config, vocab_size, machine)
        of_budget = [describe_budget(config, speed)]
        config = with_expected_length(config, speed)
    notes = [*uncounted(config), *of_budget]
    plan = make_plan(config, machine.devices)
    config = with_size(config, plan.micro_batch_size)
    return {
        "config": options.config,
        "machine": str(machine),
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": parameter_counts(config.model, vocab_size),
        "length": run_length(config, vocab_size, plan) | {"epochs": epochs(config, plan)},
        "notes": notes,
        "memory": plan_memory(options, config, vocab_size, machine),
        "time": plan_time(options, config, vocab_size, machine, plan),
        "disk": run_disk(config, vocab_size, machine, plan),
    }


def epochs(config: Config, plan: Plan) -> float | None:
    """Return how often a run reads its train tokens; None if they are not prepared here."""
    tokens = split_tokens([source.path for source in train_paths(config.data)], "train", None)
    return plan.max_steps * plan.tokens_per_step / tokens if tokens else None


def describe_budget(config: Config, tokens_per_second: float | None) -> str:
    """Return the line on `train.budget`: what its number of steps depends on."""
    budget = f"train.budget {config.train.budget}: the first launch sets the steps"
    if tokens_per_second:
        return f"{budget}; expected at the speed below"
    steps = plural(reference_steps(config), "step")
    return f"{budget}; the speed is unknown, so the figures below are for {steps}"


def uncounted(config: Config) -> list[str]:
    """Return a line for each function of --code whose memory and time the plan does not know."""
    counted_as = {"loss": "cross entropy", "optimizer": f"optim.name {config.optim.name}"}
    return [
        f"{name}() of {config.own.file} is counted as {what}"
        for name, what in counted_as.items()
        if name in config.own.functions
    ]


# --------------------------------------------------------------------------- the machine


def make_machine(options: PlanCommand, config: Config) -> Machine:
    """Return the machine that the options describe.

    Raises `UserError` if the GPU is unknown, or does not support the precision.
    """
    gpu = options.gpu
    if gpu is not None:
        check_gpu(gpu)
    sharded = options.distribution == "fsdp"
    precision: str = config.train.mixed_precision or "no"
    if precision == "auto":
        precision = fast_precision(gpu, sharded, config.train.reproducible)
    problem = precision_problem(precision, sharded, config.train.reproducible)
    require(
        problem is None,
        f"train.mixed_precision is {precision}, but {problem}; set --train.mixed_precision auto",
    )
    require(
        not (sharded and config.train.reproducible),
        "train.reproducible is true, but FSDP sums gradients in float32; leave --distribution fsdp "
        "out",
    )
    supported = peak_flops(gpu, precision) is not None if gpu else precision == "bf16"
    require(
        precision == "no" or supported,
        f"train.mixed_precision is {precision}, but {gpu or 'a CPU'} does not support it; set "
        "--train.mixed_precision auto",
    )
    memory_bytes: float | None = None
    if options.memory_gb:
        memory_bytes = options.memory_gb * 1e9
    elif gpu:
        memory_bytes = device_memory(gpu)
    return Machine(options.gpus, gpu, memory_bytes, sharded, precision)


def check_gpu(gpu: str) -> None:
    """Raise `UserError` if the table of devices does not list the GPU."""
    if device_key(gpu) is not None:
        return
    near = did_you_mean(gpu.lower(), DEVICES, f"expected {', '.join(DEVICES)}", cutoff=0.3)
    raise UserError(f"--gpu {gpu} is not in the table of devices; {near}")


def fast_precision(gpu: str | None, sharded: bool, reproducible: bool) -> str:
    """Return the precision in which a GPU, or this CPU, is fastest and which the run supports."""
    if gpu is None:
        return "bf16" if bf16_instructions() in FAST_BF16 else "no"
    half = half_precision(gpu)
    if half is None or precision_problem(half, sharded, reproducible):
        return "no"
    return half


# --------------------------------------------------------------------------- memory


def plan_memory(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine
) -> dict[str, Any]:
    """Return the memory of one device, whether the run fits, and else what to try."""
    needed = footprint(config, vocab_size, machine)
    fits = machine.holds(needed.total)
    return {
        "moment": needed.moment,
        "parts": needed.parts,
        "total": needed.total,
        "device": machine.memory_bytes,
        "fits": fits,
        "largest_micro_batch_size": largest_size(config, vocab_size, machine) if fits else None,
        "try": try_savings(options, config, vocab_size, machine) if fits is False else None,
    }


def try_savings(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine
) -> dict[str, Any]:
    """Add settings that save memory, one after the other, until the run fits.

    Settings that cost less speed come first. If the run never fits, returns the settings that need
    the least memory.
    """
    tried: list[dict[str, Any]] = []
    for settings, trial, target in savings(options, config, vocab_size, machine):
        total = footprint(trial, vocab_size, target).total
        size = trial.train.micro_batch_sequences
        if size != options.loaded.train.micro_batch_size:
            settings = [*settings, f"--train.micro_batch_size {size}"]
        tried.append({"settings": settings, "total": total, "fits": target.holds(total)})
        if tried[-1]["fits"]:
            return tried[-1]
    return min(tried, key=operator.itemgetter("total"))


def savings(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine
) -> Iterator[tuple[list[str], Config, Machine]]:
    """Yield settings with the config and machine that they give; each adds to the one before.

    The last is float32, which is the slowest, but needs no second copy of the weights in bf16 or
    fp16.
    """
    settings: list[str] = []
    in_float32 = machine.precision == "no"
    several = machine.devices > 1
    reproducible = config.train.reproducible
    if config.train.compile == "graphs":  # CUDA graphs need one GPU and one micro-step
        settings.append("--train.compile true")
        config = with_train(config, compile=True)
    fast = fast_precision(options.gpu, several, reproducible)
    if in_float32 and fast != "no":
        settings.append(f"{PRECISION} {fast}")
        machine = replace(machine, precision=fast)
        yield list(settings), config, machine
    yield list(settings), with_largest_size(config, vocab_size, machine), machine
    precision = fast if config.train.mixed_precision == "auto" else machine.precision
    if several and not machine.sharded and precision != "fp16" and not reproducible:
        settings.append("--distribution fsdp")
        machine = replace(machine, sharded=True, precision=precision)
        yield list(settings), with_largest_size(config, vocab_size, machine), machine
    if config.train.activation_checkpointing != "blocks":
        settings.append("--train.activation_checkpointing blocks")
        config = with_train(config, activation_checkpointing="blocks")
        yield list(settings), with_largest_size(config, vocab_size, machine), machine
    if machine.sharded and not config.train.sync_each_batch:
        settings.append("--train.sync_each_batch true")
        config = with_train(config, sync_each_batch=True)
        yield list(settings), with_largest_size(config, vocab_size, machine), machine
    if machine.precision != "no":
        settings = [setting for setting in settings if not setting.startswith(PRECISION)]
        if not in_float32:
            settings.append(f"{PRECISION} no")
        machine = replace(machine, precision="no")
        yield list(settings), with_largest_size(config, vocab_size, machine), machine


def with_train(config: Config, **changes: Any) -> Config:
    """Return `config` with other keys of its section train."""
    return replace(config, train=replace(config.train, **changes))


def with_largest_size(config: Config, vocab_size: int, machine: Machine) -> Config:
    """Return `config` with the largest micro-batch that fits, up to its own; else the smallest."""
    size = largest_size(config, vocab_size, machine) or fitting_sizes(config, machine.devices)[-1]
    return with_size(config, min(size, config.train.micro_batch_sequences))


# --------------------------------------------------------------------------- time


def plan_time(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine, plan: Plan
) -> dict[str, Any]:
    """Return speed, hours and cost of a run; without a speed, only why it is unknown."""
    speed, source = planned_speed(options, config, vocab_size, machine)
    if speed is None:
        return {"tokens_per_second": None, "hours": None, "source": source}
    evaluated = evaluation_tokens(config, plan.max_steps)
    hours, evaluating = run_hours(plan.max_steps * plan.tokens_per_step, speed, evaluated)
    peak = machine.peak(config.train.matmul_precision)
    reached = None
    if peak is not None:
        reached = mfu(speed, flops_per_token(config.model, vocab_size), peak, machine.devices)
    device_hours = hours * machine.devices
    return {
        "tokens_per_second": speed,
        "mfu": reached,
        "source": source,
        "hours": hours,
        "evaluation_hours": evaluating,
        "device_hours": device_hours,
        "cost": device_hours * options.price if options.price else None,
    }


def planned_speed(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine
) -> tuple[float | None, str]:
    """Return the tokens per second of all devices together, and the source."""
    if options.tokens_per_second:
        return options.tokens_per_second, "--tokens_per_second"
    peak = machine.peak(config.train.matmul_precision)
    require(
        peak is not None or not options.mfu,
        f"--mfu is {options.mfu}, but the peak FLOP/s of {machine} is unknown; give "
        "--tokens_per_second",
    )
    if options.mfu:
        return speed_at(options.mfu, config, vocab_size, machine), "--mfu"
    assumed = assumed_mfu(config)
    speed = speed_at(assumed, config, vocab_size, machine)
    return speed, UNKNOWN_SPEED if speed is None else f"an assumed MFU of {assumed:.0%}"


# --------------------------------------------------------------------------- the table


def plan_text(report: Mapping[str, Any]) -> str:
    """Format the report as a table; the sections are separated by empty lines."""
    lines = [f"{report['config']} on {report['machine']}"]
    lines.extend(report["notes"])
    lines.append("")
    rows = table([*size_rows(report), *cost_rows(report)], "<25", ">16", "<", gap=3)
    return "\n".join(lines) + "\n" + rows + verdict(report["memory"]) + "\n"


def verdict(memory: Mapping[str, Any]) -> str:
    """Say whether a run fits, and what to try if it does not."""
    if memory["fits"] is None:
        return (
            "The memory of the device is unknown; give --gpu or --memory_gb to see if the run fits."
        )
    if memory["fits"]:
        largest = memory["largest_micro_batch_size"]
        return f"It fits; train.micro_batch_size may be up to {largest}."
    tried = memory["try"]
    if not tried["settings"]:
        return (
            "It does not fit, and no other settings need less memory. Use devices with more "
            "memory, more devices, or a smaller model."
        )
    settings = f"{' '.join(tried['settings'])} ({gigabytes(tried['total'])})"
    if tried["fits"]:
        return f"It does not fit. It fits with {settings}."
    return (
        f"It does not fit, and no settings make it fit; {settings} comes nearest. "
        "Use devices with more memory, more devices, or a smaller model."
    )


def size_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield parameters by part, vocabulary and length: what, how much, why."""
    counts = dict(report["parameters"])
    total = counts.pop("total")
    real = counts.pop("total_unpadded")
    padding = f"{total - real:,} of them pad the vocabulary" if total > real else ""
    yield "parameters", f"{total:,}", padding
    for part, count in counts.items():
        if count:
            yield f"  {part}", f"{count:,}", ""
        elif part == "head":
            yield "  head", "0", "shared with the embedding"
    vocabulary = report["vocabulary"]
    yield "vocabulary", f"{vocabulary['tokens']:,}", vocabulary["source"]
    yield ()
    length = report["length"]
    yield "steps", f"{length['steps']:,}", f"{length['warmup_steps']:,} of them warm-up"
    batch = (
        f"{length['micro_batch_size']:,} x {length['block_size']:,} tokens x "
        f"{plural(length['accumulation_steps'], 'micro-step')} x "
        f"{plural(length['devices'], 'device')}"
    )
    yield "tokens per step", f"{length['tokens_per_step']:,}", batch
    read = "" if length["epochs"] is None else f"{length['epochs']:,.1f} epochs of data.train"
    yield "tokens", f"{length['tokens']:,}", read
    ratio = f"{length['tokens_per_parameter']:.1f}"
    yield "tokens per parameter", ratio, f"Chinchilla: about {CHINCHILLA}"
    yield "FLOPs per token", f"{length['flops_per_token']:.3e}", "forward and backward"
    yield "  per step", f"{length['flops_per_step']:.3e}", ""
    yield "  of the run", f"{length['flops']:.3e}", ""
    yield ()


def cost_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield memory, speed, hours and disk: what, how much, why."""
    yield from memory_rows(report["memory"])
    yield ()
    yield from time_rows(report["time"])
    yield ()
    disk = report["disk"]
    kept = f"{disk['checkpoints_kept']} kept: {gigabytes(disk['checkpoints'])}"
    if disk["checkpoint_by_rank"] < disk["checkpoint"]:
        kept += f"; each rank writes {gigabytes(disk['checkpoint_by_rank'])}"
    yield "data read", gigabytes(disk["data_read"]), ""
    yield "checkpoint", gigabytes(disk["checkpoint"]), kept
    yield ()


def memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the memory of a device and its parts."""
    limit = f"of {gigabytes(memory['device'])}" if memory["device"] else ""
    yield "memory of a device", gigabytes(memory["total"]), limit
    for part, size in memory["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at the peak", "", memory["moment"]


def time_rows(time: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield speed, hours and cost."""
    speed = time["tokens_per_second"]
    if speed is None:
        yield "tokens per second", "?", time["source"]
        return
    yield "tokens per second", f"{speed:,.0f}", time["source"]
    if time["mfu"] is not None:
        yield "  MFU", f"{time['mfu']:.1%}", "of the peak of all devices"
    evaluating = time["evaluation_hours"]
    share = "without evaluations"
    if evaluating is not None:
        share = f"including {evaluating / time['hours']:.0%} for evaluations"
    yield "time", format_hours(time["hours"]), share
    yield "device hours", f"{time['device_hours']:,.2f}", ""
    if time["cost"] is not None:
        yield "cost", f"{time['cost']:,.2f}", "device hours x --price"


def gigabytes(size: float) -> str:
    """Format bytes as GB (1e9 bytes), or as MB if there are few."""
    if size >= 1e8:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB"
