"""Reject an engine, precision or device that is not supported.

Reads the environment that `accelerate launch` sets. Supported engines: one process, DDP, FSDP
version 2 and HSDP. tests/test_matrix.py trains all of them.
"""

import os
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType, parse_flag_from_env

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.config.plan import plural
from accel_gpt.errors import install_extra, require
from accel_gpt.launch.devices import precision_problem
from accel_gpt.launcher import PRECISIONS, launcher_precision, local_world_size, started_by_launcher

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
FP8_CAPABILITY = (8, 9)  # Ada, the first with fp8 products: lists of torchao and NVIDIA
TRACKER_EXTRAS = ("wandb", "trackio", "mlflow")  # trackers that are extras of this package
USE_ENGINE = "use plain processes (DDP) or FSDP version 2"
USE_BLOCKS = "set train.activation_checkpointing blocks"


def check_accelerate_config() -> None:
    """Raise `UserError` if the accelerate config has an unsupported option.

    Called before `PartialState`, since `PartialState` itself starts some engines.
    """
    reject_option(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"), "DeepSpeed", USE_ENGINE)
    reject_option(parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"), "Megatron-LM", USE_ENGINE)
    check_parallelism()
    check_fsdp_options()
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    reject_option(
        backend.lower() != "no", f"dynamo_backend {backend}", "remove it and set train.compile"
    )
    precision = launcher_precision()
    reject_option(
        precision not in PRECISIONS,
        f"mixed_precision {precision}",
        f"set one of {', '.join(PRECISIONS)}",
    )


def check_parallelism() -> None:
    """Raise `UserError` unless the parallelism_config only replicates or shards over all ranks."""
    for axis, name in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        size = parallelism(axis)
        reject_option(size > 1, f"{name} parallelism over {size} processes", USE_ENGINE)
    size = parallelism("DP_REPLICATE") * parallelism("DP_SHARD")
    fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    reject_option(size > 1 and not fsdp, "a parallelism_config without FSDP", USE_ENGINE)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    reject_option(
        size not in (1, ranks),
        f"parallelism over {size} processes",
        f"set sizes whose product is {ranks}, the number of processes",
    )


def parallelism(axis: str) -> int:
    """Return the number of processes along an axis of the parallelism_config."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1"))


def check_fsdp_options() -> None:
    """Raise `UserError` for FSDP version 1, and for options that the config of the run replaces."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    reject_option(version != "2", f"FSDP version {version}", "set fsdp_version: 2")
    for option in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
        reject_option(parse_flag_from_env(option.upper()), option, USE_BLOCKS)


def reject_option(unsupported: bool, feature: str, fix: str) -> None:
    """Raise `UserError` if `unsupported`. `feature` names the option, `fix` what to do instead."""
    require(
        not unsupported,
        f"{feature} in the accelerate config is not supported; {fix}",
    )


def check_devices(cpu: bool) -> None:
    """Raise `UserError` if a launcher started more processes than there are devices.

    Accelerate would give one device to several processes, and NCCL does not support this. Checks
    only processes of torchrun or `accelerate launch`: `srun` may show one device to each process.
    """
    if cpu or not started_by_launcher():
        return
    processes = local_world_size()
    devices = torch.accelerator.device_count()
    require(
        processes <= devices,
        f"{processes} processes were started on this machine but it has only "
        f"{plural(devices, 'device')}; start at most one process per GPU (--num_processes counts "
        "the processes of all machines)",
    )


def check_engine(accelerator: Accelerator, train: TrainConfig, dropout: float) -> None:
    """Raise `UserError` unless the engine that Accelerate started is supported."""
    kind = accelerator.distributed_type
    device = accelerator.device.type
    precision = accelerator.mixed_precision
    fsdp = kind == DistributedType.FSDP
    other_precision = "set train.mixed_precision to bf16 or no"
    require(
        fsdp or kind in REPLICATED,
        f"Accelerate started {kind.value} but it is not supported; {USE_ENGINE}",
    )
    require(
        fsdp or not parse_flag_from_env("ACCELERATE_USE_FSDP"),
        f"the accelerate config sets FSDP but Accelerate started {kind.value} on {device}: FSDP "
        "needs a launcher; start the run with accelerate launch or torchrun",
    )
    require(
        precision != "fp16" or device != "cpu",
        f"mixed_precision is fp16 but a CPU cannot train in fp16; {other_precision}",
    )
    problem = precision_problem(precision, fsdp, train.reproducible)
    require(problem is None, f"mixed_precision is {precision} but {problem}; {other_precision}")
    if train.reproducible:
        require(
            not fsdp,
            "train.reproducible is true but FSDP sums gradients in float32; use plain processes "
            "(DDP)",
        )
        require(
            device != "mps",
            "train.reproducible is true but the device mps has no float64; use a CPU",
        )
    recomputes = train.activation_checkpointing == "blocks"
    require(
        not (device == "mps" and recomputes and dropout > 0),
        "train.activation_checkpointing is blocks but on mps PyTorch recomputes with another "
        "dropout mask; set train.activation_checkpointing to none, or model.dropout to 0",
    )


def check_fp8(precision: str) -> None:
    """Raise `UserError` if the precision is fp8 but its GPU, package or backend is missing.

    On older devices Accelerate would warn and compute in fp16. torchao is the only backend of
    Accelerate that keeps the weights and their names.
    """
    if precision != "fp8":
        return
    problems = []
    if not torch.cuda.is_available():
        problems.append("there is no GPU of compute capability 8.9 or more")
    elif torch.cuda.get_device_capability() < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        problems.append(f"{name} has compute capability {major}.{minor}, less than 8.9")
    missing = "the package torchao is not installed"
    if find_spec("torchao") is None:
        problems.append(missing)
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO")
    if backend not in ("NO", "AO"):
        problems.append(f"the fp8 backend of the accelerate config is {backend}, not AO")
    advice = "set train.mixed_precision to bf16"
    if problems == [missing]:
        advice = f"{install_extra('torchao')}, or {advice}"
    require(not problems, f"mixed_precision is fp8 but {' and '.join(problems)}; {advice}")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that Accelerate does not know or that is not installed."""
    known = [str(kind) for kind in LoggerType if str(kind) != "all"]
    usable = [str(kind) for kind in get_available_trackers()]
    for name in names:
        require(
            name in known,
            f"log.trackers has {name!r}; choose from {', '.join(known)}, and repeat --log.trackers "
            "for several, or set it to [] for none",
        )
        install = install_extra(name) if name in TRACKER_EXTRAS else f"run pip install {name}"
        require(name in usable, f"log.trackers has {name} but it is not installed; {install}")
