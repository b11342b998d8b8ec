"""Make the `Accelerator`, and wrap model and optimizer with it.

The accelerate config sets the engine: one process, DDP, FSDP version 2 or HSDP.
"""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    convert_outputs_to_fp32,
    gather_object,
    parse_flag_from_env,
    patch_environment,
)
from torch import nn

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import require
from accel_gpt.launch.compile import GRAPH_OPTIONS, forget_compiled, use_compile_cache
from accel_gpt.launch.precision import requested_precision
from accel_gpt.launch.process import collective_timeout
from accel_gpt.launch.unsupported import REPLICATED, check_engine, check_fp8
from accel_gpt.launcher import local_world_size
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.make import OwnModel, make_model
from accel_gpt.optim.adamw import GuardedAdamW
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.optim.own import OwnOptimizer, make_own_optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# MiB of gradients in an all-reduce of DDP. A block of GPT-2 124M has 7.1 million parameters, and so
# 28 MB of gradients. At PyTorch's 25 MiB (26 MB) each block is a bucket: 13 buckets in all. DDP
# splits a compiled model between them, into 14 graphs. At 100 MiB there are 4 buckets and 5 graphs.
BUCKET_MIB = 100
NOISY_LOGGER = "accelerate.utils.other"  # repeats at every save that tied weights are stored once


# --------------------------------------------------------------------------- the `Accelerator`


def make_accelerator(config: Config, plan: Plan) -> Accelerator:
    """Make the `Accelerator` of a run, once the ranks have joined and the precision is known.

    Raises `UserError` if the engine or precision is not supported.
    """
    check_fp8(requested_precision(config.train))
    logging.getLogger(NOISY_LOGGER).setLevel(logging.ERROR)
    # Accelerate would search all of sys.path for this optimizer twice a step: 0.25 ms
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]  # None blocks the import
    # torch 2.13 renamed `broadcast_buffers`, and Accelerate 1.15 cannot pass the new name
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    cpu = PartialState().device.type == "cpu"
    sharded = PartialState().use_distributed and parse_flag_from_env("ACCELERATE_USE_FSDP")
    if cpu and sharded:
        cpu = False
        # Accelerate starts FSDP only for kinds of processes on GPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    with patch_environment(accelerate_use_cpu=cpu):
        accelerator = Accelerator(
            cpu=cpu,
            mixed_precision=config.train.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=plan.accumulation_steps,
                sync_with_dataloader=False,
                # FSDP would keep all gradients between micro-batches, 4 bytes per parameter
                sync_each_batch=sharded,
            ),
            log_with=list(config.log.trackers) or None,
            project_config=ProjectConfiguration(
                config.out_dir, logging_dir=str(Path(config.out_dir) / "tensorboard")
            ),
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    bucket_cap_mb=BUCKET_MIB,
                ),
                *fp8_recipe(config),
            ],
        )
    check_engine(accelerator, config.train, config.model.dropout)
    if accelerator.distributed_type == DistributedType.FSDP:
        set_up_fsdp(accelerator)
        if config.own.model is not None:  # the accelerate config may name the blocks of GPT
            plugin: Any = accelerator.state.fsdp_plugin
            plugin.transformer_cls_names_to_wrap = None
    return accelerator


def set_up_fsdp(accelerator: Accelerator) -> None:
    """Set the precision of FSDP version 2. Call this before `prepare`.

    Gradients are reduced, and accumulated over micro-batches, in float32. The loss and the rotary
    table stay in float32. Accelerate's own policy uses bf16 for all of these.

    `cpu_ram_efficient_loading` is turned off: it sends weights from rank 0, and the model is on
    the meta device.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None if accelerator.mixed_precision == "no" else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def fp8_recipe(config: Config) -> list[AORecipeKwargs]:
    """Return Accelerate's fp8 recipe in a list; the list is empty unless fp8 is requested.

    All-gathers stay out of fp8: they would replace the parameters that the optimizer holds.
    """
    if requested_precision(config.train) != "fp8":
        return []
    return [AORecipeKwargs(enable_fsdp_float8_all_gather=False)]


def fp8_filter(gpt: LanguageModel) -> Callable[[nn.Module, str], bool]:
    """Return the filter that tells which layers multiply in fp8.

    torchao replaces a linear layer by another class. A layer stays as it is if its class has
    methods, or if it has a hook or further weights. Accelerate's rule applies to the rest.
    """
    from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers

    first_and_last = list(find_first_last_linear_layers(gpt))

    def multiplies_in_fp8(layer: nn.Module, name: str) -> bool:
        hooks = (
            layer._forward_pre_hooks,
            layer._forward_hooks,
            layer._backward_pre_hooks,
            layer._backward_hooks,
        )
        if has_methods(layer) or any(hooks) or layer.state_dict().keys() - {"weight", "bias"}:
            return False
        return bool(filter_linear_layers(layer, name, first_and_last))

    return multiplies_in_fp8


def has_methods(layer: nn.Module) -> bool:
    """Return whether a linear layer, or its class below `nn.Linear`, defines methods."""
    kinds = takewhile(lambda kind: kind is not nn.Linear, type(layer).mro())
    names: list[Mapping[str, Any]] = [vars(layer), *(vars(kind) for kind in kinds)]
    return any(
        callable(value) and not key.startswith("_")
        for defined in names
        for key, value in defined.items()
    )


def keep_attributes(layers: Mapping[str, nn.Module], gpt: LanguageModel) -> None:
    """Copy the attributes of `layers`, and of their classes, to those that have replaced them.

    Initialization and optimizers read them, such as `muon_rows` of a linear layer in fp8.
    """
    for name, layer in gpt.named_modules():
        before = layers.get(name, layer)
        lost = set(dir(before)) - set(dir(layer)) if before is not layer else ()
        for key in lost:
            setattr(layer, key, getattr(before, key))


# --------------------------------------------------------------------------- model and optimizer


def build_model(
    config: Config, accelerator: Accelerator, vocab_size: int
) -> tuple[LanguageModel, nn.Module, AcceleratedOptimizer]:
    """Build a model with uninitialized weights, and its optimizer.

    Returns the model, the model wrapped by Accelerate, and the optimizer. Under FSDP the model is
    sharded on the meta device, so that each rank allocates only its shards.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    gpt = make_model(config, vocab_size, "meta" if sharded else "cpu")
    set_up_model(gpt, config.train)
    optimizer: torch.optim.Optimizer
    if sharded:
        # `prepare` finds an optimizer's parameters by their data pointers. Meta tensors have none,
        # so `prepare` gets a dummy optimizer.
        optimizer = torch.optim.SGD(gpt.parameters())
        if config.own.draws and accelerator.mixed_precision != "no":
            compute_as_replicas(gpt, accelerator.device.type)
    else:
        divides = config.own.optimizer is None and config.optim.name == "muon"
        mesh = machine_mesh(config.train, accelerator) if divides else None
        optimizer = build_optimizer(gpt, config, mesh)
    layers = dict(gpt.named_modules())
    if accelerator.ao_recipe_handler is not None:
        accelerator.ao_recipe_handler.module_filter_func = fp8_filter(gpt)
    # if device_placement is given, Accelerate does not search for DTensors: saves 0.6 s of start-up
    placement = [True, True] if accelerator.distributed_type == DistributedType.NO else None
    model, wrapped = accelerator.prepare(gpt, optimizer, device_placement=placement)
    keep_attributes(layers, gpt)
    if sharded:
        gpt.materialize(accelerator.device)
        wrapped.optimizer = build_optimizer(gpt, config)
    check_parameters(gpt, wrapped)
    gc.collect()
    gc.freeze()  # these objects live to the end, so later collections skip them
    return gpt, model, wrapped


def compute_as_replicas(gpt: LanguageModel, device_type: str) -> None:
    """Let a model compute under FSDP as Accelerate lets it under DDP, for the file of --code.

    FSDP casts the weights to bf16, and nothing else. A module of yours may also have buffers in
    float32, so it needs autocast; a loss of yours needs logits in float32.
    """
    forward: Any = gpt.forward
    if isinstance(gpt, OwnModel):
        forward = torch.autocast(device_type, torch.bfloat16)(forward)
    own: Any = gpt
    own.forward = convert_outputs_to_fp32(forward)


def compute_as_prepared(model: LanguageModel, accelerator: Accelerator) -> None:
    """Let a model compute under autocast and return float32, as `Accelerator.prepare` lets it.

    For a model that is not trained: the Accelerator does not hold it.
    """
    own: Any = model
    own.forward = convert_outputs_to_fp32(accelerator.autocast()(model.forward))


def build_optimizer(
    gpt: LanguageModel, config: Config, mesh: "DeviceMesh | None" = None
) -> GuardedAdamW | OwnOptimizer:
    """Build the optimizer of the file of --code, else AdamW or Muon; see `make_optimizer`."""
    if config.own.optimizer is not None:
        return make_own_optimizer(gpt, config)
    return make_optimizer(gpt, config.optim, config.train.compiled, mesh)


def set_up_model(gpt: LanguageModel, train: TrainConfig) -> None:
    """Set the options of `train` that concern the model, before Accelerate wraps it."""
    gpt.recompute = train.activation_checkpointing == "blocks"
    gpt.bf16_residual = True
    forget_compiled()
    if train.compiled or torch.cuda.is_available():  # FlexAttention is compiled on CUDA
        use_compile_cache()
    if train.compiled:
        # in place: a wrapper would rename the weights
        gpt.compile(options=dict(GRAPH_OPTIONS) if train.compile == "graphs" else None)


def machine_mesh(train: TrainConfig, accelerator: Accelerator) -> "DeviceMesh | None":
    """Make a mesh of the ranks on this machine. Under DDP, Muon divides its matrices among them.

    A collective. Returns None for other engines and single ranks. Also returns None with
    `train.reproducible`, since products of smaller batches may round differently, and if machines
    have different numbers of ranks.
    """
    ddp = accelerator.distributed_type in REPLICATED and accelerator.num_processes > 1
    if train.reproducible or not ddp:
        return None
    ranks = local_world_size()
    ranks_of_machines = gather_object([ranks])
    if ranks == 1 or set(ranks_of_machines) != {ranks}:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    new_subgroups: Any = dist.new_subgroups
    group, _ = new_subgroups(ranks, timeout=collective_timeout(train))
    return DeviceMesh.from_group(group, accelerator.device.type)


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` unless the optimizer holds exactly the trained parameters of `model`.

    If an engine replaces parameters but the optimizer keeps the old ones, nothing is trained. An
    optimizer of --code may also hold parameters that are not trained.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held -= {id(p) for p in model.parameters() if not p.requires_grad}
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    lost = [name for key, name in names.items() if key not in held]
    require(
        held == names.keys(),
        f"after accelerator.prepare the optimizer holds {len(names) - len(lost)} of the "
        f"model's {len(names)} parameters ({', '.join(lost[:2])} would never train)",
    )
