"""`accel-gpt plan CONFIG`: compute size, FLOPs, memory, hours and cost of a config.

With --gpus or prices of kinds, and without --gpu, it compares all kinds of GPUs.

Reads the config, and the index of its data if it exists; needs no torch. `cost/` holds the
arithmetic; docs/explanation/cost.md derives it.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan, with_sizes
from accel_gpt.config.stages import stage_configs
from accel_gpt.console import format_clock, table, write_out
from accel_gpt.cost.forecast import (
    StageWork,
    assumed_mfu,
    expected_speed,
    run_hours,
    split_tokens,
    stage_work,
    vocabulary_size,
    with_expected_length,
)
from accel_gpt.cost.memory import Machine, checkpoint_bytes, footprint, largest_size
from accel_gpt.data.sources import all_train_paths, train_names, train_paths
from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.files import strict_json
from accel_gpt.launch.devices import (
    DEVICES,
    device_key,
    device_memory,
    fast_precision,
)
from accel_gpt.model.sizes import flops_per_token, mfu, parameter_counts

OF_TIME = ("hours", "device_hours", "cost")  # of the forecast, in a row for each kind
NEEDS_GPU = "--price needs --gpu, whose price it is, or kinds as in h100=2.5,l40s=0.8"


def run(options: PlanCommand) -> int:
    """Print what a config needs on a machine, or on each kind; return 1 if none holds it."""
    require(
        options.loaded.own.model is None,
        f"plan does not know the model() of {options.loaded.own.file}; accel-gpt bench measures it",
    )
    vocabulary = vocabulary_size(options.loaded)
    of_kinds = options.gpus is not None or any(read_prices(options))
    if of_kinds and options.gpu is None:
        rows = compare_kinds(options, vocabulary)
        write_out(f"{strict_json(rows, indent=1)}\n" if options.json else text_of(rows, options))
        return 0 if any(row["fits"] for row in rows) else 1
    report = forecast(options, vocabulary)
    write_report(report, options.json)
    return 1 if report["memory"]["fits"] is False else 0


def forecast(options: PlanCommand, vocabulary: tuple[int, str]) -> dict[str, Any]:
    """Return the forecast of a config on a machine, as JSON values.

    `vocabulary`: see `vocabulary_size`.
    """
    config = options.loaded
    machine = make_machine(options, config)
    vocab_size, source = vocabulary
    parameters = parameter_counts(config.model, vocab_size)
    flops = flops_per_token(stage_configs(config)[0].model, vocab_size)
    config = with_sizes(config, micro_batch_sizes(config, vocab_size, machine))
    speed = expected_speed(config, flops, machine)  # of the first stage
    config = with_expected_length(config, speed)
    plan = make_plan(config, machine.devices)
    batches = [plan.stage(number) for number in range(len(plan.stages) or 1)]
    config = with_sizes(config, [batch.micro_batch_size for batch in batches])
    work = stage_work(config, plan.max_steps, vocab_size)
    report = {
        "config": options.config,
        "machine": str(machine),
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": dict(parameters),
        "length": {
            "budget": options.loaded.train.budget,
            **plan_length(config, parameters, work, plan),
        },
        "memory": plan_memory(config, vocab_size, machine),
        "time": speed and plan_time(options, config, work, machine, plan, speed),
        "disk": plan_disk(config, vocab_size, plan),
    }
    if config.stages:
        report["stages"] = {
            str(number): plan_stage(config, one, batch, speed and speed * flops)
            for number, (one, batch) in enumerate(zip(work, batches, strict=True), start=1)
        }
    return report


def micro_batch_sizes(config: Config, vocab_size: int, machine: Machine) -> list[Any]:
    """Return train.micro_batch_size of each stage: in place of `auto`, the largest that fits."""
    sizes = []
    for stage in stage_configs(config):
        size = stage.train.micro_batch_size
        sizes.append(largest_size(stage, vocab_size, machine) or 1 if size == "auto" else size)
    return sizes


# --------------------------------------------------------------------------- the machine


def make_machine(options: PlanCommand, config: Config) -> Machine:
    """Return the machine that the options describe."""
    gpu = options.gpu
    if gpu is not None:
        check_kind("--gpu", gpu)
    sharded = options.distribution == "fsdp"
    precision: str = config.train.mixed_precision or "no"
    if precision == "auto":
        precision = fast_precision(gpu, sharded, config.train.reproducible)
    return Machine(options.devices, gpu, sharded, precision, options.memory_gb)


def check_kind(name: str, gpu: str) -> None:
    """Raise `UserError` for the option `name` unless the table of devices has `gpu`."""
    if device_key(gpu) is None:
        near = did_you_mean(gpu.lower(), DEVICES, f"expected {', '.join(DEVICES)}", cutoff=0.3)
        raise UserError(f"{name} {gpu} is not in the table of devices; {near}")


def read_prices(options: PlanCommand) -> dict[str, float]:
    """Return the price of each kind that --price names; of "" if it names none."""
    prices: dict[str, float] = {}
    if options.price is None:
        return prices
    parts = options.price.split(",")
    for part in parts:
        kind, equals, text = part.strip().rpartition("=")
        is_whole = not equals and len(parts) == 1  # --price 2,5 is no number
        price = math.nan
        with contextlib.suppress(ValueError):
            price = float(text)
        require(
            0 < price < math.inf and (is_whole or bool(kind)),
            f"--price is {options.price}; expected a number above 0, or h100=2.5,l40s=0.8",
        )
        if kind:
            check_kind("--price", kind)
        prices[kind] = price
    return prices


def has_one_price(options: PlanCommand) -> bool:
    """Return whether --price is a number without a kind."""
    return "" in read_prices(options)


def price_of(options: PlanCommand) -> float | None:
    """Return the price of a device hour on --gpu; None if it is unknown."""
    prices = read_prices(options)
    for kind, price in prices.items():
        same = kind and options.gpu and device_key(kind) == device_key(options.gpu)
        if same and device_memory(kind) == device_memory(options.gpu or ""):
            return price
    return prices.get("")


# --------------------------------------------------------------------------- all kinds


def compare_kinds(options: PlanCommand, vocabulary: tuple[int, str]) -> list[dict[str, Any]]:
    """Return a row of JSON values for each kind of GPU.

    Those that hold the run come first, ascending by cost, then by hours. A kind without a rate for
    the config's precision has a row only if it has a price.
    """
    require(not has_one_price(options), NEEDS_GPU)
    require(options.memory_gb is None, "--memory_gb needs --gpu, whose memory it is")
    rows = []
    for key, device in DEVICES.items():
        for size in device.memory_gb:
            kind = key if size == device.memory_gb[0] else f"{key}-{size}gb"
            of_kind = replace(options, gpu=kind)
            report = forecast(of_kind, vocabulary)
            if report["time"] is None and price_of(of_kind) is None:
                continue
            row = {
                "gpu": kind,
                "fits": report["memory"]["fits"],
                "largest_micro_batch_size": report["memory"]["largest_micro_batch_size"],
                "tokens": report["length"]["tokens"],
            }
            time = report["time"] or {}
            rows.append(row | {name: time.get(name) for name in OF_TIME})
    rows.sort(key=rank)
    return rows


def rank(row: Mapping[str, Any]) -> tuple[bool, float, float, int]:
    """Return by what a row is sorted."""
    hours, cost = (math.inf if row[name] is None else row[name] for name in ("hours", "cost"))
    return not row["fits"], cost, hours, -row["tokens"]


def shown(value: float | None) -> str:
    """Format device hours or a cost; a small one with two digits that count."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def text_of(rows: Sequence[Mapping[str, Any]], options: PlanCommand) -> str:
    """Format the rows as a table that fits into 80 columns."""
    config = options.loaded
    lines = [["gpu", "fits", "micro-batch", "tokens", "time", "device hours", "cost"]]
    for row in rows:
        cells = [
            row["gpu"],
            "yes" if row["fits"] else "no",
            str(row["largest_micro_batch_size"] or "-"),
            f"{row['tokens'] / 1e6:,.0f}M",
            "-" if row["hours"] is None else format_clock(3600 * row["hours"]),
            shown(row["device_hours"]),
            shown(row["cost"]),
        ]
        lines.append(cells)
    return (
        table(lines, "<", "<", *">" * 5)
        + f"\n{options.devices} of each. Computed, times for an assumed MFU of "
        f"{assumed_mfu(config):.0%}.\nfits: with train.micro_batch_size "
        f"{config.train.micro_batch_size}. micro-batch: the largest that fits.\n"
    )


# --------------------------------------------------------------------------- the forecast


def plan_length(
    config: Config, parameters: Mapping[str, int], work: Sequence[StageWork], plan: Plan
) -> dict[str, Any]:
    """Return the steps, tokens, epochs and FLOPs of a run, and the batch of its first stage."""
    tokens = plan.total_tokens
    flops = sum(stage.flops for stage in work)
    prepared = split_tokens([source.path for source in all_train_paths(config)], "train", None)
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
        "tokens_per_parameter": tokens / parameters["total_unpadded"],
        "flops_per_token": flops // tokens,
        "flops": flops,
    }


def plan_stage(
    config: Config, stage: StageWork, batch: Plan, flops_per_second: float | None
) -> dict[str, Any]:
    """Return the steps, the batch, the epochs of each source, and the hours of a stage."""
    sources = train_paths(stage.config.data)
    names = train_names(config)
    weights = sum(source.weight for source in sources)
    epochs = {}
    for source in sources:
        prepared = split_tokens([source.path], "train", None)
        read = stage.tokens * source.weight / weights
        epochs[names[source.path]] = read / prepared if prepared else None
    return {
        "first_step": stage.first_step,
        "steps": stage.steps,
        "tokens": stage.tokens,
        "epochs": epochs,
        "tokens_per_step": batch.tokens_per_step,
        "micro_batch_size": batch.micro_batch_size,
        "block_size": batch.block_size,
        "accumulation_steps": batch.accumulation_steps,
        "sequences": stage.steps * batch.sequences_per_step,
        "flops_per_token": stage.flops_per_token,
        "hours": flops_per_second and stage.flops / flops_per_second / 3600,
    }


def plan_memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, Any]:
    """Return the memory of one device in the most demanding stage, and whether the run fits."""
    stages = stage_configs(config)
    needs = [footprint(stage, vocab_size, machine) for stage in stages]
    number = max(range(len(stages)), key=lambda n: needs[n].total)
    needed = needs[number]
    device = machine.device_bytes
    return {
        **({"stage": number + 1} if config.stages else {}),
        "moment": needed.moment,
        "parts_gb": {part: size / 1e9 for part, size in needed.parts.items()},
        "total_gb": needed.total / 1e9,
        "device_gb": device and device / 1e9,
        "fits": machine.holds(needed.total),
        "largest_micro_batch_size": largest_size(stages[number], vocab_size, machine),
    }


def plan_time(
    options: PlanCommand,
    config: Config,
    work: Sequence[StageWork],
    machine: Machine,
    plan: Plan,
    speed: float,
) -> dict[str, Any]:
    """Return hours and cost of a run; `speed`: tokens per second of all devices in stage 1."""
    flops = work[0].flops_per_token
    mean_flops = sum(stage.flops for stage in work) // plan.total_tokens  # per token
    hours, evaluation_hours = run_hours(config, plan.max_steps, speed)
    device_hours = hours * machine.devices
    price = price_of(options)
    peak = machine.peak(config.train.matmul_precision)
    return {
        "tokens_per_second": expected_speed(config, mean_flops, machine),
        "source": f"an assumed MFU of {assumed_mfu(config):.0%}",
        "mfu": peak and mfu(speed, flops, peak, machine.devices),
        "hours": hours,
        "evaluation_hours": evaluation_hours,
        "device_hours": device_hours,
        "cost": price and device_hours * price,
    }


def plan_disk(config: Config, vocab_size: int, plan: Plan) -> dict[str, Any]:
    """Return the data that a run reads, and the checkpoints that it keeps."""
    sequences = plan.total_sequences
    token_bytes = 2 if vocab_size <= 65_536 else 4  # of a token in a shard, as in data/shards.py
    checkpoint_gb = checkpoint_bytes(config, vocab_size) / 1e9
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    return {
        "data_read_gb": sequences * (config.model.block_size + 1) * token_bytes / 1e9,
        "checkpoint_gb": checkpoint_gb,
        "checkpoints_kept": kept,
        "checkpoints_gb": checkpoint_gb * kept,
    }
