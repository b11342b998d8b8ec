"""Choose the mixed precision, for `train.mixed_precision: auto`.

A precision that the launcher sets is used. If there is none, the device and the flags of the
processor decide. `with_precision` in `launch/resolve.py` asks on rank 0, for all ranks.
"""

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.launch.devices import fast_precision
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
    if device.type not in ("cpu", "cuda"):
        return "no", f"bf16 on {device.type} has not been measured"
    name = device_name(device)
    nvidia = device.type == "cuda" and torch.version.hip is None
    if nvidia and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
        return "bf16", f"{name} has matrix units for it"
    gpu = name if device.type == "cuda" else None
    sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")
    precision = fast_precision(gpu, sharded, reproducible)
    if precision == "no":
        return (
            "no",
            f"{name} is not known to be faster in bf16 or fp16, as this run can use them",
        )
    return precision, f"{name} has instructions for it"
