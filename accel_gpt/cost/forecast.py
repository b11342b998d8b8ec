"""Forecast the speed of a machine, and what the parts of a run take at a speed. No torch.

docs/explanation/cost.md derives the formulas.
"""

from accel_gpt.config.budget import PLANNED_SHARE, fit, with_budget
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Costs
from accel_gpt.cost.data_sizes import evaluated_tokens
from accel_gpt.cost.memory import Machine

FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step
ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
# Activation checkpointing adds a forward pass, a third of the FLOPs, and reduces the MFU to 3 / 4.
SHARE_WITH_RECOMPUTATION = 3 / 4


def assumed_mfu(config: Config) -> float:
    """Return the MFU to assume if no measurement is given."""
    if config.train.activation_checkpointing == "blocks":
        return ASSUMED_MFU * SHARE_WITH_RECOMPUTATION
    return ASSUMED_MFU


def expected_speed(config: Config, flops_per_token: int, machine: Machine) -> float | None:
    """Return the tokens per second of all devices at the assumed MFU; None if it is unknown."""
    peak_flops = machine.peak(config.train.matmul_precision)
    if peak_flops is None:
        return None
    return assumed_mfu(config) * peak_flops * machine.devices / flops_per_token


def expected_costs(config: Config, tokens_per_second: float) -> Costs:
    """Return the seconds of a step and of the evaluations at a speed.

    Leaves out the start, saves, samples and HellaSwag, and evaluations whose length is unknown.
    """
    return Costs(
        step=config.train.tokens_per_step / tokens_per_second,
        evaluation=FORWARD_SHARE * (evaluated_tokens(config) or 0) / tokens_per_second,
    )


def run_hours(config: Config, steps: int, tokens_per_second: float) -> tuple[float, float | None]:
    """Return the hours of a run of `steps` steps, and how many of them evaluations take.

    Evaluations whose length is unknown are left out. Their hours are then None.
    """
    costs = expected_costs(config, tokens_per_second)
    known = evaluated_tokens(config) is not None
    evaluations = costs.pauses(config, steps) / 3600 if known else None
    return costs.total(config, steps) / 3600, evaluations


def with_expected_length(config: Config, tokens_per_second: float | None) -> Config:
    """Return `config` with the steps that its `train.budget` comes to at a speed.

    Returns `config` unchanged if it has no budget, or if the speed is unknown.
    """
    seconds = duration("train.budget", config.train.budget)
    if seconds is None or not tokens_per_second:
        return config
    costs = expected_costs(config, tokens_per_second)
    return with_budget(config, fit(config, costs, PLANNED_SHARE * seconds))
