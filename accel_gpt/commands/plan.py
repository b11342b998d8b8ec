"""`accel-gpt plan CONFIG`: size, FLOPs, memory, hours and cost of a config; does it fit?

Reads the config, and the index of its data if it is there; needs no torch. The arithmetic is that
of `cost/`, and docs/explanation/cost.md derives it.
"""

import json
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.plan_ladder import budget_text, open_budget, plan_budget, plan_loss
from accel_gpt.commands.plan_machine import make_machine, make_network
from accel_gpt.commands.plan_text import plan_text
from accel_gpt.config.depth import describe_depth
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.console import write_out
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
from accel_gpt.cost.memory import Machine, largest_size, with_size
from accel_gpt.data.planning import evaluation_tokens, vocabulary_size
from accel_gpt.training.run_folder import RunFolder

UNKNOWN_SPEED = "not known; measure it here with accel-gpt bench, or give --tokens_per_second"


def run(options: PlanCommand) -> int:
    """Print what a config will take, and whether it fits; return 1 if it does not."""
    if options.loaded is None:
        return plan_a_budget(options)
    report = forecast(options, options.loaded)
    if options.json:
        write_out(json.dumps(report, indent=1) + "\n")
    else:
        write_out(plan_text(report))
    return 1 if report["memory"]["fits"] is False else 0


def plan_a_budget(options: PlanCommand) -> int:
    """Print what to train for a budget or in some hours, by a ladder."""
    ladder, config = open_budget(options)
    machine = make_machine(options, config)
    answer = plan_budget(options, ladder, make_network(options, config, machine))
    if options.json:
        write_out(json.dumps(answer, indent=1) + "\n")
    else:
        write_out(budget_text(answer))
    return 0


def forecast(options: PlanCommand, config: Config) -> dict[str, Any]:
    """Return all that follows from a config and a machine, as JSON."""
    machine = make_machine(options, config)
    vocab_size, source = vocabulary_size(config, options.vocab_size)
    if config.train.micro_batch_size == "auto":
        config = with_size(config, largest_size(config, vocab_size, machine) or 1)
    plan = make_plan(config, machine.devices)
    return {
        "config": options.config,
        "machine": str(machine),
        "precision": {"is": machine.precision, "source": machine.precision_source},
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": parameter_counts(config.model, vocab_size),
        "length": run_length(config, vocab_size, plan),
        "depth": list(describe_depth(to_flat(config))),
        "loss": plan_loss(options, config, vocab_size),
        "memory": run_memory(config, vocab_size, machine),
        "time": plan_time(options, config, vocab_size, machine, plan),
        "disk": run_disk(config, vocab_size, machine, plan),
    }


# --------------------------------------------------------------------------- time


def plan_time(
    options: PlanCommand, config: Config, vocab_size: int, machine: Machine, plan: Plan
) -> dict[str, Any]:
    """Return speed, hours and cost of a run; null if the speed is not known."""
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
    """Return the tokens per second that all devices compute together, and what says so."""
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
            return speed, f"{source}, which may have been on another machine"
    return None, UNKNOWN_SPEED


def trained_speed(config: Config, flops: float, processes: int) -> float | None:
    """Return the median tokens per second of the run in `out_dir`, if it is of such a model.

    None if that run has another number of processes, or trained on GPUs.
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
