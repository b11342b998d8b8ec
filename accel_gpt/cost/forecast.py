"""Forecast the memory, tokens, FLOPs, disk space and hours of a run. No torch.

docs/explanation/cost.md derives the formulas.
"""

from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.cost.memory import Machine, checkpoint_bytes
from accel_gpt.model.sizes import flops_per_token, parameter_counts

FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step
ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
# Activation checkpointing adds a forward pass, a third of the FLOPs, and reduces the MFU to 3 / 4.
SHARE_WITH_RECOMPUTATION = 3 / 4


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


def assumed_mfu(config: Config) -> float:
    """Return the MFU to assume if no measurement is given."""
    if config.train.activation_checkpointing == "blocks":
        return ASSUMED_MFU * SHARE_WITH_RECOMPUTATION
    return ASSUMED_MFU


def speed_at(mfu: float, config: Config, vocab_size: int, machine: Machine) -> float | None:
    """Compute the tokens per second of all devices at an MFU; None if their peak is unknown."""
    peak_flops = machine.peak(config.train.matmul_precision)
    if peak_flops is None:
        return None
    return mfu * peak_flops * machine.devices / flops_per_token(config.model, vocab_size)


def run_hours(
    tokens: int, tokens_per_second: float, evaluated: int | None
) -> tuple[float, float | None]:
    """Estimate the hours to train on `tokens`, and the hours of evaluations; None if unknown.

    `evaluated` is the tokens of all evaluations; None if unknown, and then they take no time.
    """
    hours = tokens / tokens_per_second / 3600
    if evaluated is None:
        return hours, None
    evaluating = FORWARD_SHARE * evaluated / tokens_per_second / 3600
    return hours + evaluating, evaluating
