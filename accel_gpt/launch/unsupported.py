"""Reject an engine, precision or device that is not supported.

Reads the environment that `accelerate launch` sets. Supported engines: one process, DDP, FSDP
version 2 and HSDP. tests/test_matrix.py trains all of them.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, is_torchao_available, parse_flag_from_env

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.errors import did_you_mean, install_extra, require
from accel_gpt.launch.devices import precision_problem
from accel_gpt.launcher import PRECISIONS, launcher_precision

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
ENGINES = "one process, DDP, FSDP version 2 or HSDP"
FP8_CAPABILITY = (8, 9)  # Ada, the first with fp8 products: lists of torchao and NVIDIA


def check_accelerate_config() -> None:
    """Raise `UserError` if the accelerate config has an unsupported option.

    Called before `PartialState`, since `PartialState` itself starts some engines.
    """
    fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    version = os.environ.get("FSDP_VERSION", "1")
    shards = parallelism("DP_REPLICATE") * parallelism("DP_SHARD")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    precision = launcher_precision()
    fp8_backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO")
    refused = {
        "DeepSpeed": parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"),
        "Megatron-LM": parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"),
        "tensor parallelism": parallelism("TP") > 1,
        "context parallelism": parallelism("CP") > 1,
        "sequence parallelism": parallelism("SP") > 1,
        "a parallelism_config without FSDP": shards > 1 and not fsdp,
        f"sharding over {shards} of {ranks} processes": shards not in (1, ranks),
        f"FSDP version {version}": fsdp and version != "2",
        "fsdp_offload_params": fsdp and parse_flag_from_env("FSDP_OFFLOAD_PARAMS"),
        "fsdp_activation_checkpointing (use train.activation_checkpointing)": (
            fsdp and parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
        ),
        f"dynamo_backend {backend} (use train.compile)": backend.lower() != "no",
        f"mixed_precision {precision}": precision not in PRECISIONS,
        # torchao (AO) is the only backend that keeps the weights and their names
        f"fp8 backend {fp8_backend}": fp8_backend not in ("NO", "AO"),
    }
    for feature, is_set in refused.items():
        require(
            not is_set,
            f"{feature} in the accelerate config is not supported; expected {ENGINES}",
        )


def parallelism(axis: str) -> int:
    """Return the number of processes along an axis of the parallelism_config."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1"))


def check_engine(accelerator: Accelerator, train: TrainConfig, dropout: float) -> None:
    """Raise `UserError` unless the engine that Accelerate started is supported."""
    kind = accelerator.distributed_type
    device = accelerator.device.type
    precision = accelerator.mixed_precision
    fsdp = kind == DistributedType.FSDP
    asks_fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    require(
        fsdp or not asks_fsdp,
        f"the accelerate config sets FSDP but Accelerate started {kind.value} on {device}; start "
        "the run with accelerate launch or torchrun",
    )
    require(
        fsdp or kind in REPLICATED,
        f"Accelerate started {kind.value} but it is not supported; expected {ENGINES}",
    )
    problem = precision_problem(precision, fsdp, train.reproducible)
    if precision == "fp16" and device == "cpu":
        problem = "a CPU cannot train in fp16"
    require(
        problem is None,
        f"mixed_precision is {precision} but {problem}; set train.mixed_precision to bf16 or no",
    )
    require(
        not (train.reproducible and fsdp),
        "train.reproducible is true but FSDP sums gradients in float32; use DDP",
    )
    recomputes = train.activation_checkpointing == "blocks"
    require(
        not (device == "mps" and recomputes and dropout > 0),
        "train.activation_checkpointing is blocks but on mps PyTorch recomputes with another "
        "dropout mask; set it to none, or model.dropout to 0",
    )


def check_fp8(precision: str) -> None:
    """Raise `UserError` if the precision is fp8 but the device or torchao is missing for it.

    Accelerate would compute in fp16 on an older device, or raise ImportError.
    """
    if precision != "fp8":
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    require(
        capability >= FP8_CAPABILITY,
        "mixed_precision is fp8 but there is no GPU of compute capability 8.9 or more; set "
        "train.mixed_precision to bf16",
    )
    require(
        is_torchao_available(),
        f"mixed_precision is fp8 but torchao is not installed; {install_extra('torchao')}",
    )


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that is not installed: Accelerate would leave it out."""
    installed = [str(kind) for kind in get_available_trackers()]
    for name in names:
        expected = did_you_mean(name, installed, f"expected {installed}")
        require(name in installed, f"log.trackers: {name!r} is not installed; {expected}")
