"""`accel-gpt plan CONFIG`: compute size, FLOPs, memory, hours and cost of a config.

Reads the config, and the index of its data if it exists; needs no torch. `cost/` holds the
arithmetic; docs/explanation/cost.md derives it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan, plural, reference_steps, with_size
from accel_gpt.console import format_hours, table, write_out
from accel_gpt.cost.data_sizes import evaluated_tokens, split_tokens, vocabulary_size
from accel_gpt.cost.forecast import (
    assumed_mfu,
    expected_costs,
    expected_speed,
    with_expected_length,
)
from accel_gpt.cost.memory import Machine, checkpoint_bytes, footprint, largest_size
from accel_gpt.data.sources import train_paths
from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.launch.devices import (
    DEVICES,
    device_key,
    fast_precision,
    peak_flops,
    precision_problem,
)
from accel_gpt.model.sizes import flops_per_token, mfu, parameter_counts

CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3


@dataclass(frozen=True)
class Sizes:
    """What a model has, by part and in total, and computes."""

    parameters: Mapping[str, int]  # see `parameter_counts`
    flops_per_token: int
    code: str | None = None  # file of --code that makes the model


def run(options: PlanCommand) -> int:
    """Print what a config needs, and whether it fits; return 1 if it does not."""
    model = options.loaded.model
    vocab_size, _ = vocabulary_size(options.loaded)
    sizes = Sizes(parameter_counts(model, vocab_size), flops_per_token(model, vocab_size))
    return print_forecast(options, sizes)


def print_forecast(options: PlanCommand, sizes: Sizes) -> int:
    """Print the forecast for a model of these sizes; return 1 if it does not fit."""
    report = forecast(options, sizes)
    write_out(f"{json.dumps(report, indent=1)}\n" if options.json else plan_text(report))
    return 1 if report["memory"] and report["memory"]["fits"] is False else 0


def forecast(options: PlanCommand, sizes: Sizes) -> dict[str, Any]:
    """Return the forecast of a config on a machine, as JSON values."""
    config = options.loaded
    machine = make_machine(options, config)
    vocab_size, source = vocabulary_size(config)
    if config.train.micro_batch_size == "auto":
        config = with_size(config, largest_size(config, vocab_size, machine) or 1)
    speed = options.tokens_per_second
    speed_source = "--tokens_per_second"
    if speed is None:
        speed = expected_speed(config, sizes.flops_per_token, machine)
        speed_source = f"an assumed MFU of {assumed_mfu(config):.0%}"
    notes = uncounted(config)
    if config.train.budget:
        notes.append(describe_budget(config, speed))
        config = with_expected_length(config, speed)
    plan = make_plan(config, machine.devices)
    config = with_size(config, plan.micro_batch_size)
    own = sizes.code is not None
    return {
        "config": options.config,
        "code": sizes.code,
        "machine": str(machine),
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": dict(sizes.parameters),
        "length": plan_length(config, sizes, plan),
        "notes": notes,
        "memory": None if own else plan_memory(config, vocab_size, machine),
        "time": speed and plan_time(options, config, sizes, machine, plan, speed, speed_source),
        "disk": None if own else plan_disk(config, vocab_size, machine, plan),
    }


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
    if gpu is not None and device_key(gpu) is None:
        near = did_you_mean(gpu.lower(), DEVICES, f"expected {', '.join(DEVICES)}", cutoff=0.3)
        raise UserError(f"--gpu {gpu} is not in the table of devices; {near}")
    sharded = options.distribution == "fsdp"
    reproducible = config.train.reproducible
    precision: str = config.train.mixed_precision or "no"
    if precision == "auto":
        precision = fast_precision(gpu, sharded, reproducible)
    problem = precision_problem(precision, sharded, reproducible)
    require(problem is None, f"train.mixed_precision is {precision}, but {problem}")
    require(
        not (sharded and reproducible),
        "train.reproducible is true, but FSDP sums gradients in float32",
    )
    supported = peak_flops(gpu, precision) is not None if gpu else precision == "bf16"
    require(
        precision == "no" or supported,
        f"train.mixed_precision is {precision}, but {gpu or 'a CPU'} does not support it",
    )
    return Machine(options.gpus, gpu, sharded, precision, options.memory_gb)


# --------------------------------------------------------------------------- the forecast


def plan_length(config: Config, sizes: Sizes, plan: Plan) -> dict[str, Any]:
    """Return the steps, tokens, epochs and FLOPs of a run."""
    tokens = plan.max_steps * plan.tokens_per_step
    prepared = split_tokens([source.path for source in train_paths(config.data)], "train", None)
    parameters = sizes.parameters.get("total_unpadded", sizes.parameters["total"])
    return {
        "steps": plan.max_steps,
        "warmup_steps": plan.warmup_steps,
        "tokens_per_step": plan.tokens_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "block_size": plan.block_size,
        "accumulation_steps": plan.accumulation_steps,
        "devices": plan.world_size,
        "tokens": tokens,
        "epochs": tokens / prepared if prepared else None,
        "tokens_per_parameter": tokens / parameters,
        "flops_per_token": sizes.flops_per_token,
        "flops_per_step": sizes.flops_per_token * plan.tokens_per_step,
        "flops": sizes.flops_per_token * tokens,
    }


def plan_memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, Any]:
    """Return the memory of one device, and whether the run fits."""
    needed = footprint(config, vocab_size, machine)
    return {
        "moment": needed.moment,
        "parts": needed.parts,
        "total": needed.total,
        "device": machine.device_bytes,
        "fits": machine.holds(needed.total),
        "largest_micro_batch_size": largest_size(config, vocab_size, machine),
    }


def plan_time(
    options: PlanCommand,
    config: Config,
    sizes: Sizes,
    machine: Machine,
    plan: Plan,
    speed: float,
    source: str,
) -> dict[str, Any]:
    """Return hours and cost of a run at a speed, the tokens per second of all devices."""
    costs = expected_costs(config, speed)
    hours = costs.total(config, plan.max_steps) / 3600
    peak = machine.peak(config.train.matmul_precision)
    reached = peak and mfu(speed, sizes.flops_per_token, peak, machine.devices)
    known = evaluated_tokens(config) is not None
    return {
        "tokens_per_second": speed,
        "source": source,
        "mfu": reached,
        "hours": hours,
        "evaluation_hours": costs.pauses(config, plan.max_steps) / 3600 if known else None,
        "device_hours": hours * machine.devices,
        "cost": options.price and hours * machine.devices * options.price,
    }


def plan_disk(config: Config, vocab_size: int, machine: Machine, plan: Plan) -> dict[str, int]:
    """Return the bytes of data that a run reads and of checkpoints that it keeps."""
    sequences = plan.max_steps * plan.sequences_per_step
    token_bytes = 2 if vocab_size <= 65_536 else 4  # of a token in a shard, as in data/shards.py
    checkpoint = checkpoint_bytes(config, vocab_size)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    return {
        "data_read": sequences * (plan.block_size + 1) * token_bytes,
        "checkpoint": checkpoint,
        "checkpoint_by_rank": checkpoint // machine.shards,
        "checkpoints_kept": kept,
        "checkpoints": checkpoint * kept,
    }


# --------------------------------------------------------------------------- the table


def plan_text(report: Mapping[str, Any]) -> str:
    """Format the report as a table; the sections are separated by empty lines."""
    lines = [f"{report['config']} on {report['machine']}", *report["notes"], ""]
    rows = [*size_rows(report), *memory_rows(report), *time_rows(report["time"])]
    rows += disk_rows(report["disk"])
    return "\n".join(lines) + "\n" + table(rows, "<25", ">16", "<", gap=3) + verdict(report)


def verdict(report: Mapping[str, Any]) -> str:
    """Say whether a run fits."""
    memory = report["memory"]
    if memory is None:
        return f"The memory of the model() in {report['code']} is unknown; accel-gpt bench tells.\n"
    if memory["fits"] is None:
        return "The memory of the device is unknown; give --gpu or --memory_gb.\n"
    largest = memory["largest_micro_batch_size"]
    if memory["fits"]:
        return f"It fits; train.micro_batch_size may be up to {largest}.\n"
    if largest:
        return f"It does not fit; it fits with --train.micro_batch_size {largest}.\n"
    return "It does not fit with any train.micro_batch_size.\n"


def size_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield parameters by part, vocabulary and length: what, how much, why."""
    counts = dict(report["parameters"])
    total = counts.pop("total")
    padding = total - counts.pop("total_unpadded", total)
    why = f"{padding:,} of them pad the vocabulary" if padding else ""
    yield (
        "parameters",
        f"{total:,}",
        f"of the model() in {report['code']}" if report["code"] else why,
    )
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


def memory_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the memory of a device and its parts."""
    memory = report["memory"]
    if memory is None:
        return
    limit = f"of {gigabytes(memory['device'])}" if memory["device"] else ""
    yield "memory of a device", gigabytes(memory["total"]), limit
    for part, size in memory["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at the peak", "", memory["moment"]
    yield ()


def time_rows(time: Mapping[str, Any] | None) -> Iterator[tuple[str, ...]]:
    """Yield speed, hours and cost."""
    if time is None:
        yield "tokens per second", "?", "measure it with accel-gpt bench"
        yield ()
        return
    yield "tokens per second", f"{time['tokens_per_second']:,.0f}", time["source"]
    if time["mfu"] is not None:
        yield "  MFU", f"{time['mfu']:.1%}", "of the peak of all devices"
    share = "without evaluations"
    if time["evaluation_hours"] is not None:
        share = f"including {time['evaluation_hours'] / time['hours']:.0%} for evaluations"
    yield "time", format_hours(time["hours"]), share
    yield "device hours", f"{time['device_hours']:,.2f}", ""
    if time["cost"] is not None:
        yield "cost", f"{time['cost']:,.2f}", "device hours x --price"
    yield ()


def disk_rows(disk: Mapping[str, int] | None) -> Iterator[tuple[str, ...]]:
    """Yield the data that is read, and the checkpoints."""
    if disk is None:
        return
    kept = f"{disk['checkpoints_kept']} kept: {gigabytes(disk['checkpoints'])}"
    if disk["checkpoint_by_rank"] < disk["checkpoint"]:
        kept += f"; each rank writes {gigabytes(disk['checkpoint_by_rank'])}"
    yield "data read", gigabytes(disk["data_read"]), ""
    yield "checkpoint", gigabytes(disk["checkpoint"]), kept
    yield ()


def gigabytes(size: float) -> str:
    """Format bytes as GB (1e9 bytes), or as MB if there are few."""
    if size >= 1e8:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB"
