"""The engines that a run may use: one process, DDP, FSDP version 2 (HSDP too); others are refused.

An engine comes from the accelerate config. tests/test_matrix.py trains on each of them.
"""

import math
import os
import re
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, DistributedType, parse_flag_from_env
from torch import nn

from accel_gpt.config.experiment import Config
from accel_gpt.errors import UserError, require
from accel_gpt.launcher import launcher_precision

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
PRECISIONS = ("no", "bf16", "fp16", "fp8")
ALLOWED = "plain processes (DDP) or FSDP version 2"
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: torchao's and NVIDIA's lists of devices with fp8 products


def requested_precision(config: Config) -> str:
    """The mixed precision of the config, else that of `accelerate launch`, else no."""
    return config.train.mixed_precision or launcher_precision()


def check_requested_engine() -> None:
    """Raise `UserError` for an engine of the accelerate config that no test covers.

    Reads the environment that `accelerate launch` sets: PartialState starts some engines itself.
    """
    get = os.environ.get
    for key, name in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        require(
            not parse_flag_from_env(f"ACCELERATE_USE_{key}"),
            f"the accelerate config asks for {name}, which is not supported; use {ALLOWED}",
        )
    for axis, name in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        size = get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")
        require(
            size == "1",
            f"the accelerate config asks for {name} parallelism over {size} processes, which is "
            f"not supported; use {ALLOWED}",
        )
    precision = launcher_precision()
    require(
        precision in PRECISIONS,
        f"the accelerate config has mixed_precision {precision}; expected one of "
        f"{', '.join(PRECISIONS)}",
    )
    backend = get("ACCELERATE_DYNAMO_BACKEND", "no")
    require(
        backend.lower() == "no",
        f"the accelerate config has dynamo_backend {backend}; remove it and set train.compile",
    )
    sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")
    axes = [get(f"PARALLELISM_CONFIG_DP_{axis}_SIZE", "1") for axis in ("REPLICATE", "SHARD")]
    require(
        all(re.fullmatch("[1-9][0-9]{0,5}", axis) for axis in axes),
        f"the accelerate config has parallelism sizes {' and '.join(axes)}; give whole numbers",
    )
    product, started = math.prod(map(int, axes)), int(get("WORLD_SIZE", "1"))
    require(
        product == 1 or sharded,
        "the accelerate config has a parallelism_config without FSDP, which it needs; use "
        f"{ALLOWED}",
    )
    require(
        product in (1, started),
        f"the parallelism_config of the accelerate config is for {product} processes "
        f"(dp_replicate_size x dp_shard_size) but {started} were started",
    )
    version = get("FSDP_VERSION", "1")
    require(
        not sharded or version == "2",
        f"the accelerate config asks for FSDP version {version}, which is not supported; set "
        "fsdp_version: 2",
    )
    for key, instead in (
        ("offload_params", "use more processes or train.activation_checkpointing blocks"),
        ("activation_checkpointing", "set train.activation_checkpointing to blocks"),
    ):
        require(
            not (sharded and parse_flag_from_env(f"FSDP_{key.upper()}")),
            f"the accelerate config has fsdp_{key}, which is not supported; {instead}",
        )


def check_engine(accelerator: Accelerator, config: Config) -> None:
    """Raise `UserError` unless tests cover what Accelerate made of the accelerate config."""
    kind, device = accelerator.distributed_type, accelerator.device.type
    precision, exact = accelerator.mixed_precision, config.train.reproducible
    sharded = kind == DistributedType.FSDP
    require(
        sharded or kind in REPLICATED,
        f"Accelerate started {kind.value}, which is not supported; use {ALLOWED}",
    )
    require(
        sharded or not parse_flag_from_env("ACCELERATE_USE_FSDP"),
        f"the accelerate config asks for FSDP but Accelerate started {kind.value} on {device}: "
        "FSDP needs GPUs and a launcher such as accelerate launch",
    )
    require(
        precision != "fp16" or device != "cpu",
        "mixed_precision is fp16 but the device is a CPU, which has no fp16 training; set "
        "train.mixed_precision to bf16 or no",
    )
    require(
        precision != "fp16" or not sharded,
        "mixed_precision is fp16 but the model is sharded by FSDP, where the scale of the loss is "
        "not restored; set train.mixed_precision to bf16 or no",
    )
    require(
        not (exact and sharded),
        "train.reproducible is true but the accelerate config asks for FSDP, which sums gradients "
        "in float32; use plain processes or leave train.reproducible out",
    )
    require(
        not (exact and precision in ("fp16", "fp8")),
        f"train.reproducible is true but the precision is {precision}, whose scaled numbers it "
        "cannot sum; set train.mixed_precision to bf16 or no",
    )
    require(
        not (exact and device == "mps"),
        "train.reproducible is true but the device is mps, which has no float64; use a CPU",
    )


def check_fp8(config: Config) -> None:
    """Raise `UserError` where fp8 is requested and something that it needs is missing.

    Accelerate would compute in fp16 on older devices, with a warning. Of its backends torchao alone
    keeps the weights and their names as they are.
    """
    if requested_precision(config) != "fp8":
        return
    missing = []
    if not torch.cuda.is_available():
        missing.append("a GPU of compute capability 8.9 or more, of which there is none")
    elif (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), capability
        missing.append(f"compute capability 8.9 or more, where {name} has {major}.{minor}")
    if find_spec("torchao") is None:
        missing.append("the package torchao, which is not installed")
    if (backend := os.environ.get("ACCELERATE_FP8_BACKEND", "NO")) not in ("NO", "AO"):
        missing.append(f"the fp8 backend AO in the accelerate config, which has {backend}")
    require(
        not missing,
        f"mixed_precision is fp8, which needs {' and '.join(missing)}; set train.mixed_precision "
        "to bf16",
    )


def fp8_recipe(config: Config) -> list[AORecipeKwargs]:
    """Accelerate's recipe where fp8 is requested, without all-gathers in fp8: those replace the
    weights by new parameters, which the optimizer does not have.
    """
    if requested_precision(config) != "fp8":
        return []
    return [AORecipeKwargs(enable_fsdp_float8_all_gather=False)]


def set_up_fsdp(accelerator: Accelerator) -> None:
    """Set the state dict and the precision of FSDP version 2, before `prepare`.

    Gradients are reduced, and accumulated over micro-batches, in float32; the loss stays float32
    and the rotary table is not cast. Accelerate's own policy does all of that in bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = accelerator.state.fsdp_plugin
    # a sharded state dict comes with a list that torch unpickles, and executes what it holds
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # else those of shards stay
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None if accelerator.mixed_precision == "no" else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` unless the optimizer holds the parameters of `model`, all and no other.

    An engine that replaces parameters without telling the optimizer trains nothing, in silence.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    lost = [name for key, name in names.items() if key not in held]
    if lost or len(held) != len(names):
        raise UserError(
            f"after accelerator.prepare the optimizer holds {len(names) - len(lost)} of the "
            f"model's {len(names)} parameters ({', '.join(lost[:2])} would never train): this "
            "combination of engine, precision and versions is not supported; use plain processes "
            "and train.mixed_precision bf16"
        )
