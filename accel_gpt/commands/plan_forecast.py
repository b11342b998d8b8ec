"""All that follows from a config and a machine, as one mapping: what `accel-gpt plan` prints."""

from typing import Any

from accel_gpt.commands.plan import PlanCommand
from accel_gpt.commands.plan_pace import FORWARD_SHARE, evaluation_tokens, pace
from accel_gpt.commands.plan_vocabulary import vocabulary
from accel_gpt.config.depth import describe
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.cost.advice import largest_size, remedies, with_size
from accel_gpt.cost.flops import flops_per_token, parameter_counts
from accel_gpt.cost.machine import Machine, make_machine
from accel_gpt.cost.memory import checkpoint_bytes, footprint

CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3


def forecast(asked: PlanCommand, config: Config) -> dict[str, Any]:
    """The numbers of a run, as JSON; `UserError` where they do not fit together."""
    machine = make_machine(
        *(config, asked.gpus, asked.gpu, asked.memory_gb, asked.distribution, asked.config_file)
    )
    vocab_size, source = vocabulary(config, asked.vocab_size)
    if config.train.micro_batch_size == "auto":
        config = with_size(config, largest_size(config, vocab_size, machine) or 1)
    plan = make_plan(config, machine.devices)
    return {
        "config": asked.config,
        "machine": machine.spoken(),
        "precision": {"is": machine.precision, "source": machine.precision_source},
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": parameter_counts(config.model, vocab_size),
        "length": length(config, vocab_size, plan),
        "depth": list(describe(to_flat(to_plain(config)))),
        "memory": memory(config, vocab_size, machine, plan),
        "time": time(asked, config, vocab_size, machine, plan),
        "disk": disk(config, vocab_size, plan),
    }


def length(config: Config, vocab_size: int, plan: Plan) -> dict[str, Any]:
    """Steps, tokens and FLOPs."""
    tokens = plan.max_steps * plan.tokens_per_step
    work = flops_per_token(config.model, vocab_size)
    real = parameter_counts(config.model, vocab_size)["total_unpadded"]
    return {
        "steps": plan.max_steps,
        "warmup_steps": plan.warmup_steps,
        "tokens_per_step": plan.tokens_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "block_size": plan.block_size,
        "accumulation_steps": plan.accumulation_steps,
        "devices": plan.world_size,
        "tokens": tokens,
        "tokens_per_parameter": tokens / real,
        "flops_per_token": work,
        "flops_per_step": work * plan.tokens_per_step,
        "flops": work * tokens,
    }


def memory(config: Config, vocab_size: int, machine: Machine, plan: Plan) -> dict[str, Any]:
    """What one device holds, whether it fits, and what would make it fit."""
    taken = footprint(config, vocab_size, machine, plan.accumulation_steps)
    fits = None if machine.memory is None else taken.total <= machine.memory
    return {
        "moment": taken.moment,
        "parts": taken.parts,
        "total": taken.total,
        "host": taken.host,
        "device": machine.memory,
        "fits": fits,
        "compiled": config.train.compile is True,
        "largest_micro_batch_size": largest_size(config, vocab_size, machine) if fits else None,
        "remedies": [] if fits is not False else remedies(config, vocab_size, machine),
    }


def time(
    asked: PlanCommand, config: Config, vocab_size: int, machine: Machine, plan: Plan
) -> dict[str, Any]:
    """Hours and cost; None where the speed is not known."""
    speed = pace(asked, config, vocab_size, machine)
    told = {"tokens_per_second": speed.tokens_per_second, "mfu": speed.mfu, "source": speed.source}
    if speed.tokens_per_second is None:
        return told | {"hours": None, "evaluation_hours": None, "device_hours": None, "cost": None}
    training = plan.max_steps * plan.tokens_per_step / speed.tokens_per_second / 3600
    evaluated = evaluation_tokens(config, plan.max_steps)
    evaluating = FORWARD_SHARE * (evaluated or 0) / speed.tokens_per_second / 3600
    device_hours = (training + evaluating) * machine.devices
    return told | {
        "hours": training + evaluating,
        "evaluation_hours": None if evaluated is None else evaluating,
        "device_hours": device_hours,
        "cost": device_hours * asked.price if asked.price else None,
    }


def disk(config: Config, vocab_size: int, plan: Plan) -> dict[str, Any]:
    """Bytes read and written."""
    sequences = plan.max_steps * plan.sequences_per_step
    width = 2 if vocab_size < 65536 else 4  # of a token in a shard
    one, kept = checkpoint_bytes(config, vocab_size), config.checkpoint
    return {
        "data_read": sequences * (plan.block_size + 1) * width,
        "checkpoint": one,
        "checkpoints_kept": kept.keep_last + kept.keep_best,
        "checkpoints": one * (kept.keep_last + kept.keep_best),
    }
