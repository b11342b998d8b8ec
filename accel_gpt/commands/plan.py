"""`accel-gpt plan CONFIG`: compute size, FLOPs, memory, hours and cost of a config.

Reads the config, and the index of its data if it exists; needs no torch. `cost/` holds the
arithmetic; docs/explanation/cost.md derives it.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.plan_machine import fast_precision, make_machine, make_network
from accel_gpt.config.depth import describe_depth
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat
from accel_gpt.config.plan import Plan, make_plan, plural
from accel_gpt.console import format_hours, table, write_out
from accel_gpt.cost.devices import device_key
from accel_gpt.cost.flops import flops_per_token, mfu, parameter_counts
from accel_gpt.cost.forecast import (
    assumed_mfu,
    run_disk,
    run_length,
    run_memory,
    run_time,
    speed_at,
)
from accel_gpt.cost.memory import Machine, fitting_sizes, largest_size, with_size
from accel_gpt.data.planning import evaluation_tokens, vocabulary_size
from accel_gpt.errors import UserError
from accel_gpt.training.run_folder import RunFolder

CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3
# settings that save memory, from the least loss of speed
SAVINGS = ("precision", "micro-batch", "distribution", "recomputation")
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
    plan = make_plan(config, machine.devices)
    config = with_size(config, plan.micro_batch_size)
    memory = run_memory(config, vocab_size, machine)
    memory["try"] = try_savings(options, config, vocab_size) if memory["fits"] is False else []
    return {
        "config": options.config,
        "machine": str(machine),
        "precision": {"is": machine.precision, "source": machine.precision_source},
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": parameter_counts(config.model, vocab_size),
        "length": run_length(config, vocab_size, plan),
        "depth": list(describe_depth(to_flat(config))),
        "memory": memory,
        "time": plan_time(options, config, vocab_size, machine, plan),
        "disk": run_disk(config, vocab_size, machine, plan),
    }


# --------------------------------------------------------------------------- what makes it fit


def try_savings(options: PlanCommand, config: Config, vocab_size: int) -> list[dict[str, Any]]:
    """Plan with settings that save memory, with as few as possible; return the plans that fit.

    Settings that cost less speed come first. If no plan fits, returns only the plan that needs the
    least memory.
    """
    found: list[dict[str, Any]] = []
    for count in range(1, len(SAVINGS) + 1):
        for chosen in combinations(SAVINGS, count):
            planned = plan_savings(options, config, vocab_size, chosen)
            if planned is not None:
                found.append(planned)
        fitting = [planned for planned in found if planned["fits"]]
        if fitting:
            return fitting

    def total(planned: dict[str, Any]) -> int:
        return int(planned["total"])

    return [min(found, key=total)] if found else []


def plan_savings(
    options: PlanCommand, config: Config, vocab_size: int, chosen: Collection[str]
) -> dict[str, Any] | None:
    """Plan with settings that save memory; None if one of them is set already, or is rejected."""
    settings = []
    train = config.train
    if "precision" in chosen:
        precision = fast_precision(options.gpu)
        if precision == "no" or make_machine(options, config).precision != "no":
            return None
        train = replace(train, mixed_precision=precision)
        settings.append(f"--train.mixed_precision {precision}")
    if "distribution" in chosen:
        machine = make_machine(options, config)
        if machine.shards == machine.devices:
            return None
        options = replace(options, distribution="fsdp")
        settings.append("--distribution fsdp")
    if "recomputation" in chosen:
        if train.activation_checkpointing == "blocks":
            return None
        train = replace(train, activation_checkpointing="blocks")
        settings.append("--train.activation_checkpointing blocks")
    config = replace(config, train=train)
    try:
        machine = make_machine(options, config)
    except UserError:
        return None
    found_at_start = options.loaded.train.micro_batch_size == "auto"
    if "micro-batch" in chosen or found_at_start:
        sizes = fitting_sizes(config, machine.devices)
        size = largest_size(config, vocab_size, machine) or sizes[-1]
        if "micro-batch" in chosen and size >= train.micro_batch_sequences:
            return None
        config = with_size(config, size)
        if not found_at_start or machine.sharded:  # fsdp does not support auto
            settings.append(f"--train.micro_batch_size {size}")
    needed = run_memory(config, vocab_size, machine)
    return {"settings": settings, "total": needed["total"], "fits": needed["fits"]}


# --------------------------------------------------------------------------- time


def plan_time(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine, plan: Plan
) -> dict[str, Any]:
    """Return speed, hours and cost of a run; None if the speed is unknown."""
    network = make_network(options, config, machine)
    speed, source = planned_speed(options, config, vocab_size, machine)
    if speed is None:
        return {
            "tokens_per_second": None,
            "mfu": None,
            "hours": None,
            "evaluation_hours": None,
            "device_hours": None,
            "cost": None,
            "step": None,
            "source": source,
        }
    time = run_time(
        config=config,
        vocab_size=vocab_size,
        network=network,
        plan=plan,
        compute_speed=speed,
        evaluated=evaluation_tokens(config, plan.max_steps),
    )
    reached = None
    peak = machine.peak(config.train.matmul_precision)
    if peak is not None:
        flops = flops_per_token(config.model, vocab_size)
        reached = mfu(time.tokens_per_second, flops, peak, machine.devices)
    device_hours = time.hours * machine.devices
    return {
        "step": time.step,
        "tokens_per_second": time.tokens_per_second,
        "mfu": reached,
        "source": source,
        "hours": time.hours,
        "evaluation_hours": time.evaluation_hours,
        "device_hours": device_hours,
        "cost": device_hours * options.price if options.price else None,
    }


def planned_speed(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine
) -> tuple[float | None, str]:
    """Return the tokens per second that all devices compute together, and the source."""
    if options.tokens_per_second:
        return options.tokens_per_second, "--tokens_per_second"
    if options.mfu:
        return speed_at(options.mfu, config, vocab_size, machine), "--mfu"
    assumed = assumed_mfu(config)
    speed = speed_at(assumed, config, vocab_size, machine)
    if speed is not None:
        return speed, f"an assumed MFU of {assumed:.0%}"
    if machine.gpu is None:
        flops = flops_per_token(config.model, vocab_size)
        speed = trained_speed(config, flops, machine.devices)
        if speed is not None:
            source = f"measured by the run in {config.out_dir}"
            return speed, f"{source}, maybe on another machine"
    return None, UNKNOWN_SPEED


def trained_speed(config: Config, flops: float, processes: int) -> float | None:
    """Return the median tokens per second of the run in `out_dir`; None if it does not match.

    A run matches if its model takes `flops` per token and it trained on `processes` CPU processes.
    """
    run = RunFolder(config.out_dir)
    if run.last_launch("processes") != processes:
        return None
    if run.last_launch("model", "flops_per_token") != flops:
        return None
    if device_key(str(run.last_launch("device"))) is not None:
        return None
    speeds = run.metrics.curve("perf/tokens_per_second")[1]
    if not len(speeds):
        return None
    return float(sorted(speeds)[len(speeds) // 2])


# --------------------------------------------------------------------------- the table


def plan_text(report: Mapping[str, Any]) -> str:
    """Format the report as a table; the sections are separated by empty lines."""
    precision = report["precision"]
    lines = [f"{report['config']} on {report['machine']}"]
    lines.append(f"precision {precision['is']}: {precision['source']}")
    lines.extend(report["depth"])
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
    texts = []
    for planned in tried:
        texts.append(f"{join_words(planned['settings'], 'and')} ({gigabytes(planned['total'])})")
    if tried and tried[0]["fits"]:
        return f"It does not fit. It fits with {join_words(texts, 'or with')}."
    others = "Use devices with more memory, more devices, or a smaller model."
    if not tried:
        return f"It does not fit. {others}"
    return f"It does not fit, and no settings make it fit; {texts[0]} comes nearest. {others}"


def join_words(words: Sequence[str], last: str) -> str:
    """Join words with commas, and the last one with `last`."""
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end


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
    yield "tokens", f"{length['tokens']:,}", ""
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
    """Yield the memory of a device, and the host memory of a node."""
    limit = f"of {gigabytes(memory['device'])}" if memory["device"] else ""
    yield "memory of a device", gigabytes(memory["total"]), limit
    for part, size in memory["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at the peak", "", memory["moment"]
    if memory["compiled"]:
        yield "", "", "train.compile saves more than the estimate counts"
    if memory["host"]:
        host = dict(memory["host"])
        libraries = host.pop("libraries")
        most = max(host, key=host.__getitem__)
        yield "host memory of a node", gigabytes(libraries + host[most]), f"libraries and {most}"
        for part, size in memory["host"].items():
            yield f"  {part}", gigabytes(size), ""


def time_rows(time: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield speed, hours and cost."""
    if time["step"]:
        yield from step_rows(time["step"])
    speed = time["tokens_per_second"]
    evaluation = time["evaluation_hours"]
    yield "tokens per second", f"{speed:,.0f}" if speed else "?", time["source"]
    if time["mfu"] is not None:
        yield "  MFU", f"{time['mfu']:.1%}", "of the peak of all devices"
    if speed is not None:
        share = "without evaluations"
        if evaluation is not None:
            share = f"including {evaluation / time['hours']:.0%} for evaluations"
        yield "time", format_hours(time["hours"]), share
        yield "device hours", f"{time['device_hours']:,.2f}", ""
    if time["cost"] is not None:
        yield "cost", f"{time['cost']:,.2f}", "device hours x --price"


def step_rows(step: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the time of a step and of its parts."""
    limit = f"limited by {step['limit']}" if "limit" in step else ""
    yield "step", milliseconds(step["total"]), limit
    yield "  compute", milliseconds(step["compute"]), ""
    for one in step.get("collectives", ()):
        sent = f"{gigabytes(one['sent'])} from each device, {plural(one['calls'], 'call')}"
        yield f"  {one['name']}", milliseconds(one["seconds"]), sent
    if step["exposed"]:
        yield "  not hidden by compute", milliseconds(step["exposed"]), "of the collectives"
    if step["exposed"] is None:
        yield "  collectives", "?", "unknown; give --bandwidth"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:,.1f} ms"


def gigabytes(size: float) -> str:
    """Format bytes as GB (1e9 bytes), or as MB if there are few."""
    if size >= 1e8:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB"
