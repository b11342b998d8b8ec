"""Forecast the memory, tokens, FLOPs, disk space and hours of a run. No torch.

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
# Activation checkpointing adds a forward pass, a third of the FLOPs, and reduces the MFU to 3 / 4.
SHARE_WITH_RECOMPUTATION = 3 / 4


def run_memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, Any]:
    """Estimate the memory of one device, and whether the run fits."""
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
        "compiled": config.train.compiled,
        "largest_micro_batch_size": largest_size(config, vocab_size, machine) if fits else None,
    }


def run_length(config: Config, vocab_size: int, plan: Plan) -> dict[str, Any]:
    """Compute the steps, tokens and FLOPs of a run."""
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
    """Compute the bytes of data that a run reads and of checkpoints that it keeps."""
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


# --------------------------------------------------------------------------- time


@dataclass(frozen=True)
class RunTime:
    """The time of a run."""

    step: dict[str, Any]  # the breakdown of a step, see `step_time`
    tokens_per_second: float  # all devices together
    hours: float  # training, and evaluations if `evaluation_hours` is known
    evaluation_hours: float | None  # None: unknown


def assumed_mfu(config: Config) -> float:
    """Return the MFU to assume if no measurement is given."""
    if config.train.activation_checkpointing == "blocks":
        return ASSUMED_MFU * SHARE_WITH_RECOMPUTATION
    return ASSUMED_MFU


def speed_at(mfu: float, config: Config, vocab_size: int, machine: Machine) -> float | None:
    """Compute the tokens per second of all devices at an MFU; None if their peak is unknown.

    The time of collectives is not included.
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
    """Estimate the time of a run.

    `compute_speed` is the tokens per second that all devices compute together, without collectives.
    `evaluated` is the tokens of all evaluations; None if unknown, and then they take no time.
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
    """Estimate the hours to evaluate `tokens` tokens, from the tokens per second of training."""
    seconds = FORWARD_SHARE * tokens / tokens_per_second
    return seconds / 3600


def evaluation_count(config: Config, steps: int) -> int:
    """Compute the number of evaluations in a run of `steps` steps; the last step always has one."""
    if not config.eval.every:
        return 1
    return math.ceil(steps / config.eval.every)
