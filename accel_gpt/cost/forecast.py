"""What a whole run takes: memory, and whether it fits; tokens, FLOPs, disk and hours. No torch.

docs/explanation/cost.md derives the formulas.
"""

import math
from dataclasses import dataclass
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.cost.cluster import Network, host_bytes, step_time
from accel_gpt.cost.flops import FORWARD_SHARE, flops_per_token, parameter_counts
from accel_gpt.cost.memory import Machine, checkpoint_bytes, footprint, largest_size

ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
SHARE_WITH_RECOMPUTATION = 3 / 4  # of the MFU: activation checkpointing adds a forward pass


def run_memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, Any]:
    """Return what one device holds, and whether it fits; `try` lists options if it does not."""
    needed = footprint(config, vocab_size, machine)
    fits = None
    if machine.memory_bytes is not None:
        fits = needed.total <= machine.memory_bytes
    return {
        "moment": needed.moment,
        "parts": needed.parts,
        "total": needed.total,
        "host": host_bytes(config, vocab_size, machine) if machine.gpu else {},
        "device": machine.memory_bytes,
        "fits": fits,
        "compiled": config.train.compile is True,
        "largest_micro_batch_size": largest_size(config, vocab_size, machine) if fits else None,
        "try": options_to_try(config, machine) if fits is False else [],
    }


def options_to_try(config: Config, machine: Machine) -> list[str]:
    """Return the options that save memory and are not set yet, those that cost least time first."""
    options = []
    if machine.precision == "no":
        options.append("--train.mixed_precision bf16")
    if config.train.micro_batch_sequences > 1:
        options.append("a smaller train.micro_batch_size")
    if machine.shards < machine.devices and not config.train.reproducible:
        options.append("--distribution fsdp")
    if config.train.activation_checkpointing != "blocks":
        options.append("--train.activation_checkpointing blocks")
    return options


def run_length(config: Config, vocab_size: int, plan: Plan) -> dict[str, Any]:
    """Return steps, tokens and FLOPs of a run."""
    tokens = plan.max_steps * plan.tokens_per_step
    flops = flops_per_token(config.model, vocab_size)
    parameters = parameter_counts(config.model, vocab_size)["total_unpadded"]
    return {
        "steps": plan.max_steps,
        "warmup_steps": plan.warmup_steps,
        "tokens_per_step": plan.tokens_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "block_size": plan.block_size,
        "accumulation_steps": plan.accumulation_steps,
        "devices": plan.world_size,
        "tokens": tokens,
        "tokens_per_parameter": tokens / parameters,
        "flops_per_token": flops,
        "flops_per_step": flops * plan.tokens_per_step,
        "flops": flops * tokens,
    }


def run_disk(config: Config, vocab_size: int, machine: Machine, plan: Plan) -> dict[str, int]:
    """Return the bytes that a run reads and writes."""
    sequences = plan.max_steps * plan.sequences_per_step
    token_bytes = 2 if vocab_size < 65536 else 4  # in a shard
    checkpoint = checkpoint_bytes(config, vocab_size)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    return {
        "data_read": sequences * (plan.block_size + 1) * token_bytes,
        "checkpoint": checkpoint,
        "checkpoint_by_rank": checkpoint // machine.shards,
        "checkpoints_kept": kept,
        "checkpoints": checkpoint * kept,
    }


# --------------------------------------------------------------------------- time


@dataclass(frozen=True)
class RunTime:
    """The time of a run."""

    step: dict[str, Any]  # where the time of a step goes, see `step_time`
    tokens_per_second: float  # of all devices
    hours: float  # with evaluations, if they are known
    evaluation_hours: float | None  # None: not known


def assumed_mfu(config: Config) -> float:
    """Return the MFU that is assumed if nothing says it."""
    if config.train.activation_checkpointing == "blocks":
        return ASSUMED_MFU * SHARE_WITH_RECOMPUTATION
    return ASSUMED_MFU


def speed_at(mfu: float, config: Config, vocab_size: int, machine: Machine) -> float | None:
    """Return the tokens per second of all devices at an MFU; None if no peak is known.

    Waiting for other devices is not counted.
    """
    peak_flops = machine.peak(config.train.matmul_precision)
    if peak_flops is None:
        return None
    return mfu * peak_flops * machine.devices / flops_per_token(config.model, vocab_size)


def run_time(
    config: Config,
    vocab_size: int,
    network: Network,
    plan: Plan,
    compute_speed: float,
    evaluated: int | None,
) -> RunTime:
    """Return the time of a run whose devices compute `compute_speed` tokens per second together.

    `evaluated`: tokens that all its evaluations read; None: not known, and not counted.
    """
    compute_seconds = plan.tokens_per_step / compute_speed
    step = step_time(config, vocab_size, network, compute_seconds)
    step_seconds = step["total"]
    tokens_per_second = plan.tokens_per_step / step_seconds
    hours = plan.max_steps * step_seconds / 3600
    hours_of_evaluations: float | None = None
    if evaluated is not None:
        hours_of_evaluations = evaluation_hours(evaluated, tokens_per_second)
        hours += hours_of_evaluations
    return RunTime(
        step=step,
        tokens_per_second=tokens_per_second,
        hours=hours,
        evaluation_hours=hours_of_evaluations,
    )


def evaluation_hours(tokens: int, tokens_per_second: float) -> float:
    """Return the hours in which `tokens` are evaluated, at the speed of training."""
    seconds = FORWARD_SHARE * tokens / tokens_per_second
    return seconds / 3600


def evaluation_count(config: Config, steps: int) -> int:
    """Return how often a run of `steps` steps evaluates: after the last step in any case."""
    if not config.eval.every:
        return 1
    return math.ceil(steps / config.eval.every)
