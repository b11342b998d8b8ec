"""Check that tests cover the engine, precision and devices that a run asks for.

Reads the environment that `accelerate launch` sets. Supported engines: one process, DDP, FSDP
version 2 (HSDP too); tests/test_matrix.py trains all of them.
"""

import os
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType, parse_flag_from_env

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.launcher import (
    PRECISIONS,
    launcher_precision,
    local_world_size,
    started_by_launcher,
)
from accel_gpt.training.precision import requested_precision

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: torchao's and NVIDIA's lists of devices with fp8 products
USE_ENGINE = "use plain processes (DDP) or FSDP version 2"
USE_BLOCKS = "use train.activation_checkpointing blocks"


def check_accelerate_config() -> None:
    """Raise `UserError` for an option of the accelerate config that no test covers.

    Called before `PartialState`, which starts some engines itself.
    """
    refuse_option(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"), "DeepSpeed", USE_ENGINE)
    refuse_option(parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"), "Megatron-LM", USE_ENGINE)
    check_parallelism()
    check_fsdp_options()
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    refuse_option(
        backend.lower() != "no", f"dynamo_backend {backend}", "remove it and set train.compile"
    )
    precision = launcher_precision()
    refuse_option(
        precision not in PRECISIONS,
        f"mixed_precision {precision}",
        f"set one of {', '.join(PRECISIONS)}",
    )


def check_parallelism() -> None:
    """Raise `UserError` unless the parallelism_config only replicates or shards, over all ranks."""
    for axis, name in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        size = parallelism(axis)
        refuse_option(size > 1, f"{name} parallelism over {size} processes", USE_ENGINE)
    size = parallelism("DP_REPLICATE") * parallelism("DP_SHARD")
    fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    refuse_option(size > 1 and not fsdp, "a parallelism_config without FSDP", USE_ENGINE)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    refuse_option(
        size not in (1, ranks), f"parallelism over {size} processes", f"{ranks} were started"
    )


def parallelism(axis: str) -> int:
    """Return the number of processes along an axis of the parallelism_config."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1"))


def check_fsdp_options() -> None:
    """Raise `UserError` for FSDP version 1, and for options that are set elsewhere."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    refuse_option(version != "2", f"FSDP version {version}", "set fsdp_version: 2")
    for option in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
        refuse_option(parse_flag_from_env(option.upper()), option, USE_BLOCKS)


def refuse_option(unsupported: bool, what: str, instead: str) -> None:
    """Raise `UserError` if the accelerate config has `what`, which is `unsupported`."""
    require(
        not unsupported,
        f"the accelerate config has {what}, which is not supported; {instead}",
    )


def check_devices(cpu: bool) -> None:
    """Raise `UserError` if a launcher started more processes than there are devices.

    Accelerate would give one device to several processes, which NCCL refuses. `srun` may show each
    process another device.
    """
    if cpu or not started_by_launcher():
        return
    processes = local_world_size()
    devices = torch.accelerator.device_count()
    require(
        processes <= devices,
        f"{processes} processes were started on this machine, which shows {devices} devices; "
        "start at most one for each GPU: --num_processes counts those of all machines",
    )


def check_engine(accelerator: Accelerator, config: Config) -> None:
    """Raise `UserError` unless tests cover the engine that Accelerate started."""
    kind = accelerator.distributed_type
    device = accelerator.device.type
    precision = accelerator.mixed_precision
    fsdp = kind == DistributedType.FSDP
    other_precision = "set train.mixed_precision to bf16 or no"
    require(
        fsdp or kind in REPLICATED,
        f"Accelerate started {kind.value}, which is not supported; {USE_ENGINE}",
    )
    require(
        fsdp or not parse_flag_from_env("ACCELERATE_USE_FSDP"),
        f"the accelerate config asks for FSDP but Accelerate started {kind.value} on {device}, "
        "as FSDP needs GPUs and a launcher such as accelerate launch",
    )
    require(
        precision != "fp16" or device != "cpu",
        "mixed_precision is fp16 but the device is a CPU, which has no fp16 training; "
        f"{other_precision}",
    )
    require(
        precision != "fp16" or not fsdp,
        "mixed_precision is fp16 but the model is sharded by FSDP, where the scale of the loss is "
        f"not restored; {other_precision}",
    )
    if config.train.reproducible:
        require(
            not fsdp,
            "train.reproducible is true but the accelerate config asks for FSDP, which sums "
            "gradients in float32; use plain processes",
        )
        require(
            precision not in ("fp16", "fp8"),
            f"train.reproducible is true but the precision is {precision}, whose scaled numbers it "
            f"cannot sum; {other_precision}",
        )
        require(
            device != "mps",
            "train.reproducible is true but the device is mps, which has no float64; use a CPU",
        )
    recomputes = config.train.activation_checkpointing == "blocks"
    require(
        not (device == "mps" and recomputes and config.model.dropout > 0),
        "train.activation_checkpointing is blocks and the device is mps, where PyTorch recomputes "
        "with another dropout; set one of them to its default",
    )


def check_fp8(config: Config) -> None:
    """Raise `UserError` if fp8 is requested and its GPU, package or backend is missing.

    Accelerate would compute in fp16 on older devices, with a warning. Of its backends torchao alone
    keeps the weights and their names as they are.
    """
    if requested_precision(config) != "fp8":
        return
    missing = []
    if not torch.cuda.is_available():
        missing.append("a GPU of compute capability 8.9 or more, of which there is none")
    elif torch.cuda.get_device_capability() < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        missing.append(f"compute capability 8.9 or more, where {name} has {major}.{minor}")
    if find_spec("torchao") is None:
        missing.append("the package torchao, which is not installed")
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO")
    if backend not in ("NO", "AO"):
        missing.append(f"the fp8 backend AO in the accelerate config, which has {backend}")
    require(
        not missing,
        f"mixed_precision is fp8, which needs {' and '.join(missing)}; set train.mixed_precision "
        "to bf16",
    )


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that Accelerate does not know or would silently drop."""
    known = [str(kind) for kind in LoggerType if str(kind) != "all"]
    usable = [str(kind) for kind in get_available_trackers()]
    for name in names:
        require(name in known, f"log.trackers has {name!r}; Accelerate knows {', '.join(known)}")
        require(name in usable, f"log.trackers has {name} but it is not installed; pip install it")
