"""`accel-gpt plan CONFIG --code FILE` for a file with a `model()`.

Builds the model without storage, and counts its parameters and FLOPs. The memory of its activations
is not known, so it does not say whether a run fits.
"""

import json
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.plan import describe_budget, gigabytes, make_machine
from accel_gpt.config.plan import make_plan, with_size
from accel_gpt.console import format_hours, table, write_out
from accel_gpt.cost.data_sizes import evaluation_tokens, vocabulary_size, with_expected_length
from accel_gpt.cost.forecast import ASSUMED_MFU, run_hours
from accel_gpt.errors import require
from accel_gpt.model.make import make_model
from accel_gpt.model.sizes import FLOAT_BYTES

MOMENTS = 2  # tensors of AdamW for each parameter
MEMORY = (
    "weights, gradients and two moments of AdamW; activations come on top: measure them with "
    "accel-gpt bench"
)


def run(options: PlanCommand) -> int:
    """Print what the config and the model need."""
    report = forecast_own(options)
    if options.json:
        write_out(json.dumps(report, indent=1) + "\n")
    else:
        write_out(own_plan_text(report))
    return 0


def forecast_own(options: PlanCommand) -> dict[str, Any]:
    """Return the forecast as JSON values."""
    config = options.loaded
    machine = make_machine(options, config)
    vocab_size, source = vocabulary_size(config, options.vocab_size)
    require(
        config.train.micro_batch_size != "auto",
        "train.micro_batch_size is auto, but the memory of your model is known only on the "
        "device; set a number, such as --train.micro_batch_size 8",
    )
    model = make_model(config, vocab_size, "meta")
    parameters = model.parameter_count()
    flops = model.flops_per_token()
    peak = machine.peak(config.train.matmul_precision)
    speed = options.tokens_per_second
    if speed is None and peak is not None:
        speed = (options.mfu or ASSUMED_MFU) * peak * machine.devices / flops
    budget = describe_budget(config, speed) if config.train.budget else None
    config = with_expected_length(config, speed)
    plan = make_plan(config, machine.devices)
    config = with_size(config, plan.micro_batch_size)
    tokens = plan.max_steps * plan.tokens_per_step
    hours = None
    if speed is not None:
        hours, _ = run_hours(tokens, speed, evaluation_tokens(config, plan.max_steps))
    return {
        "config": options.config,
        "code": config.own.file,
        "machine": str(machine),
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": parameters,
        "budget": budget,
        "steps": plan.max_steps,
        "tokens_per_step": plan.tokens_per_step,
        "accumulation_steps": plan.accumulation_steps,
        "tokens": tokens,
        "flops_per_token": flops,
        "memory": FLOAT_BYTES * (2 + MOMENTS) * parameters // machine.shards,
        "checkpoint": FLOAT_BYTES * (1 + MOMENTS) * parameters,
        "tokens_per_second": speed,
        "hours": hours,
        "cost": hours * machine.devices * options.price if hours and options.price else None,
    }


def own_plan_text(report: dict[str, Any]) -> str:
    """Format the report as a table."""
    tokens = report["vocabulary"]
    speed = report["tokens_per_second"]
    rows = [
        ("parameters", f"{report['parameters']:,}", f"of the model() in {report['code']}"),
        ("vocabulary", f"{tokens['tokens']:,}", tokens["source"]),
        ("steps", f"{report['steps']:,}", f"of {report['tokens_per_step']:,} tokens"),
        ("  micro-steps", f"{report['accumulation_steps']:,}", "in a step"),
        ("tokens", f"{report['tokens']:,}", ""),
        ("FLOPs per token", f"{report['flops_per_token']:.3e}", "flops_per_token() or 6 a weight"),
        ("memory, at least", gigabytes(report["memory"]), MEMORY),
        ("checkpoint", gigabytes(report["checkpoint"]), "with two moments of AdamW"),
    ]
    if speed is None:
        rows.append(("tokens per second", "?", "give --tokens_per_second from accel-gpt bench"))
    else:
        rows.append(("tokens per second", f"{speed:,.0f}", ""))
        rows.append(("time", format_hours(report["hours"]), "without saves and samples"))
    if report["cost"] is not None:
        rows.append(("cost", f"{report['cost']:,.2f}", "device hours x --price"))
    title = f"{report['config']} with {report['code']} on {report['machine']}"
    note = f"{report['budget']}\n\n" if report["budget"] else ""
    return f"{title}\n\n{note}" + table(rows, "<25", ">16", "<", gap=3)
