"""Choose the mixed precision, for `train.mixed_precision: auto`.

A precision that the launcher sets is used. If there is none, the device and the flags of the
processor decide. `with_precision` in `resolve.py` asks on rank 0, for all ranks.
"""

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.launch.devices import (
    FAST_BF16,
    bf16_instructions,
    half_precision,
    precision_problem,
)
from accel_gpt.launch.machine import device_name
from accel_gpt.launcher import launcher_precision

BF16_CAPABILITY = (8, 0)  # Ampere: NVIDIA's first matrix units for bf16


def requested_precision(train: TrainConfig) -> str:
    """Return the mixed precision of the config; if it is not set, of the launcher, default no."""
    return train.mixed_precision or launcher_precision()


def choose_precision(reproducible: bool) -> tuple[str, str]:
    """Return the mixed precision of a run that starts on this device, and the reason."""
    launcher = launcher_precision()
    if launcher != "no":
        return launcher, "set by accelerate launch"
    device = PartialState().device
    if device.type == "cuda":
        return choose_precision_on_gpu(device, reproducible)
    if device.type == "cpu":
        return choose_precision_on_cpu()
    return "no", f"bf16 on {device.type} has not been measured"


def choose_precision_on_gpu(device: torch.device, reproducible: bool) -> tuple[str, str]:
    """Choose bf16 if the GPU has matrix units for it, else fp16 if it has them for that."""
    name = device_name(device)
    nvidia = torch.version.hip is None
    capable = nvidia and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    precision = "bf16" if capable else half_precision(name)
    if precision is None:
        return "no", f"{name} is not known to have matrix units for bf16 or fp16"
    sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if problem := precision_problem(precision, sharded, reproducible):
        return "no", f"{name} has no matrix units for bf16, and {problem}"
    return precision, f"{name} has matrix units for it"


def choose_precision_on_cpu() -> tuple[str, str]:
    """Choose bf16 if the processor has instructions that make it faster than float32."""
    instructions = bf16_instructions()
    if instructions is None:
        return "no", "this CPU has no bf16 instructions"
    if instructions not in FAST_BF16:
        return "no", f"bf16 with {instructions} has not been measured"
    return "bf16", f"this CPU has instructions for it ({instructions})"
