"""Ranks, device, threads and precision of a run; model and optimizer as Accelerate wraps them.

The engine comes from the accelerate config: one process, DDP or FSDP version 2 (HSDP too), all of
which tests/test_matrix.py trains; any other is refused.
"""

import ctypes
import gc
import logging
import os
import platform
import sys
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    LoggerType,
    ProjectConfiguration,
    gather_object,
    parse_flag_from_env,
)
from torch import nn

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Plan
from accel_gpt.cost.devices import bf16_instructions
from accel_gpt.errors import require
from accel_gpt.launcher import (
    is_main,
    launcher_precision,
    local_world_size,
    requested_threads,
    shared_cores,
    started_by_launcher,
    starts_on_gpus,
    world_size,
)
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.machine import rank_identity
from accel_gpt.training.ranks import require_same

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
PRECISIONS = ("no", "bf16", "fp16", "fp8")
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: torchao's and NVIDIA's lists of devices with fp8 products
# A paused process does not hang, and timers that only C code sees cannot tell; assumption
LONGEST_PAUSE = timedelta(days=1)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc, malloc.h


def start_accelerator(config: Config, plan: Plan) -> tuple[Config, Accelerator]:
    """Start the ranks; `config` with a mixed precision in place of auto, and the `Accelerator`."""
    start_processes(config)
    if config.train.mixed_precision == "auto":
        from accel_gpt.training.precision import resolve_precision

        config = resolve_precision(config)
    return config, make_accelerator(config, plan)


def resolve_auto(config: Config, plan: Plan, accelerator: Accelerator) -> tuple[Config, Plan]:
    """`config` and `plan` without auto: micro-batch size and compilation are chosen; a collective.

    Raises `UserError` where `train.compile` is true and torch.compile does not work.
    """
    if config.train.micro_batch_size == "auto":
        from accel_gpt.training.auto_batch import resolve_auto_micro_batch

        config, plan = resolve_auto_micro_batch(config, plan, accelerator)
    if config.train.compile is not False:
        from accel_gpt.training.precision import resolve_compile

        config = resolve_compile(config, plan)
    return config, plan


# --------------------------------------------------------------------------- ranks and precision


def start_processes(config: Config) -> PartialState:
    """Join the ranks into one process group; set threads and the precision of float32 products.

    Raises `UserError` for an engine that is not supported, and for processes that do not form one
    group or differ in config, code or versions: they would train apart.
    """
    check_accelerate_config()
    if config.train.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    # Accelerator reads use_cpu of the accelerate config, PartialState does not
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    check_devices(cpu)
    state, started = PartialState(cpu=cpu, timeout=group_timeout(config)), world_size()
    require(
        state.num_processes == started,
        f"the launcher started {started} processes but Accelerate sees "
        f"{state.num_processes}; start with accelerate launch or with torchrun",
    )
    if state.num_processes > 1:
        require_same(rank_identity(config))
    matmul = config.train.matmul_precision
    if state.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = matmul != "highest"
    else:  # on a CPU TF32 sends small products, as in attention, through a slow path of oneDNN
        torch.set_float32_matmul_precision("highest" if matmul == "auto" else matmul)
    if state.device.type == "cpu":
        torch.set_num_threads(cpu_threads(config.train))
        torch.set_flush_denormal(True)  # Adam moments of unseen tokens decay into denormals
        keep_freed_memory()
    return state


def warn_without_gpu() -> None:
    """Warn if `accelerate launch` is set up for GPUs and this machine shows none."""
    if parse_flag_from_env("ACCELERATE_USE_CPU") or torch.accelerator.is_available():
        return
    if is_main() and starts_on_gpus():
        sys.stderr.write(
            "WARNING: the launcher is set up for GPUs, but PyTorch finds none: this run trains on "
            "the CPU. Check nvidia-smi and torch.cuda.is_available(). If you want the CPU, set "
            "ACCELERATE_USE_CPU=true in the environment\n"
        )


def cpu_threads(train: TrainConfig) -> int:
    """The threads of this process on a CPU."""
    own = 1 if train.reproducible else shared_cores()
    return train.cpu_threads or threads_of_environment(train) or own


def threads_of_environment(train: TrainConfig) -> int | None:
    """The threads that OMP_NUM_THREADS sets for a run on a CPU; None if the config decides."""
    if train.cpu_threads or train.reproducible:
        return None
    return requested_threads()


def make_accelerator(config: Config, plan: Plan) -> Accelerator:
    """The `Accelerator` of a run, after `start_processes`, with a precision that is not auto.

    Raises `UserError` for an engine, precision or tracker that is not supported.
    """
    check_trackers(config.log.trackers)
    check_fp8(config)
    # at every save it logs that tied weights are stored once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # twice a step Accelerate would search all of sys.path for this optimizer: 0.25 ms
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
    # torch 2.13 has another name for it, which Accelerate 1.15 cannot pass on
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        cpu=PartialState().device.type == "cpu",
        mixed_precision=config.train.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=plan.accumulation_steps,
            sync_with_dataloader=False,
            sync_each_batch=config.train.sync_each_batch,
        ),
        log_with=list(config.log.trackers) or None,
        project_config=ProjectConfiguration(
            config.out_dir, logging_dir=str(Path(config.out_dir) / "tensorboard")
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            *fp8_recipe(config),
        ],
    )
    check_engine(accelerator, config)
    if accelerator.distributed_type == DistributedType.FSDP:
        set_up_fsdp(accelerator)
    bf16_on_cpu = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    if bf16_on_cpu and is_main() and bf16_instructions() is None:
        sys.stderr.write(
            "WARNING: mixed_precision is bf16, for which this CPU has no instructions: a step "
            "takes several times as long as in float32; set train.mixed_precision to auto or no\n"
        )
    return accelerator


def requested_precision(config: Config) -> str:
    """The mixed precision of the config, else that of `accelerate launch`, else no."""
    return config.train.mixed_precision or launcher_precision()


def collective_timeout(config: Config) -> timedelta:
    """How long a collective waits for the other ranks.

    The watchdog ends a run that hangs. A collective that a pause interrupts must not fail after it.
    """
    seconds = duration("train.step_timeout", config.train.step_timeout)
    return timedelta(seconds=seconds or 0) + LONGEST_PAUSE


def group_timeout(config: Config) -> timedelta:
    """How long a collective may take before the first step or after it: the watchdog is exact."""
    seconds = duration("train.init_timeout", config.train.init_timeout)
    return max(collective_timeout(config), timedelta(seconds=seconds or 0))


def host_group(config: Config, accelerator: Accelerator) -> dist.ProcessGroup | None:
    """A gloo process group beside that of the devices; None for one rank. A collective."""
    if accelerator.num_processes == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=collective_timeout(config))
    return group


def keep_freed_memory() -> None:
    """Have the C library keep freed blocks rather than return them to the system.

    A training step frees and allocates the same blocks again; mapping each anew costs a page fault
    per 4 KiB, measured in benchmarks/RESULTS.md. glibc only: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 64 * 2**20)


def set_up_fsdp(accelerator: Accelerator) -> None:
    """Set the precision of FSDP version 2, before `prepare`, and that the model has no weights yet.

    Gradients are reduced, and accumulated over micro-batches, in float32; the loss stays float32
    and the rotary table is not cast. Accelerate's own policy does all of that in bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # of a model that rank 0 has in its memory
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None if accelerator.mixed_precision == "no" else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def fp8_recipe(config: Config) -> list[AORecipeKwargs]:
    """Accelerate's recipe where fp8 is requested, without all-gathers in fp8: those replace the
    weights by new parameters, which the optimizer does not have.
    """
    if requested_precision(config) != "fp8":
        return []
    return [AORecipeKwargs(enable_fsdp_float8_all_gather=False)]


# --------------------------------------------------------------------------- what is supported


def check_accelerate_config() -> None:
    """Raise `UserError` for what no test covers in the accelerate config.

    Reads the environment that `accelerate launch` sets: PartialState starts some engines itself.
    """
    get, flag = os.environ.get, parse_flag_from_env
    fsdp, engine = flag("ACCELERATE_USE_FSDP"), "use plain processes (DDP) or FSDP version 2"
    tensor, context, sequence, replicate, shard = (
        int(get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1"))
        for axis in ("TP", "CP", "SP", "DP_REPLICATE", "DP_SHARD")
    )
    size, ranks, version = replicate * shard, int(get("WORLD_SIZE", "1")), get("FSDP_VERSION", "1")
    precision, backend = launcher_precision(), get("ACCELERATE_DYNAMO_BACKEND", "no")
    blocks, precisions = "use train.activation_checkpointing blocks", ", ".join(PRECISIONS)
    for unsupported, what, instead in (
        (flag("ACCELERATE_USE_DEEPSPEED"), "DeepSpeed", engine),
        (flag("ACCELERATE_USE_MEGATRON_LM"), "Megatron-LM", engine),
        (tensor > 1, f"tensor parallelism over {tensor} processes", engine),
        (context > 1, f"context parallelism over {context} processes", engine),
        (sequence > 1, f"sequence parallelism over {sequence} processes", engine),
        (size > 1 and not fsdp, "a parallelism_config without FSDP", engine),
        (size not in (1, ranks), f"parallelism over {size} processes", f"{ranks} were started"),
        (fsdp and version != "2", f"FSDP version {version}", "set fsdp_version: 2"),
        (fsdp and flag("FSDP_OFFLOAD_PARAMS"), "fsdp_offload_params", blocks),
        (fsdp and flag("FSDP_ACTIVATION_CHECKPOINTING"), "fsdp_activation_checkpointing", blocks),
        (backend.lower() != "no", f"dynamo_backend {backend}", "remove it and set train.compile"),
        (precision not in PRECISIONS, f"mixed_precision {precision}", f"set one of {precisions}"),
    ):
        message = f"the accelerate config has {what}, which is not supported; {instead}"
        require(not unsupported, message)


def check_devices(cpu: bool) -> None:
    """Raise `UserError` where a launcher started more processes than there are devices: Accelerate
    would give one to several, which NCCL refuses. `srun` may show each process another one.
    """
    if cpu or not started_by_launcher():
        return
    processes, devices = local_world_size(), torch.accelerator.device_count()
    require(
        processes <= devices,
        f"{processes} processes were started on this machine, which shows {devices} devices; "
        "start at most one for each GPU: --num_processes counts those of all machines",
    )


def check_engine(accelerator: Accelerator, config: Config) -> None:
    """Raise `UserError` unless tests cover what Accelerate made of the accelerate config."""
    kind, device = accelerator.distributed_type, accelerator.device.type
    precision, exact = accelerator.mixed_precision, config.train.reproducible
    dropout = config.model.dropout > 0
    fsdp, other = kind == DistributedType.FSDP, "set train.mixed_precision to bf16 or no"
    for unsupported, what, why in (
        (
            not fsdp and kind not in REPLICATED,
            f"Accelerate started {kind.value}",
            "which is not supported; use plain processes (DDP) or FSDP version 2",
        ),
        (
            not fsdp and parse_flag_from_env("ACCELERATE_USE_FSDP"),
            f"the accelerate config asks for FSDP but Accelerate started {kind.value} on {device}",
            "as FSDP needs GPUs and a launcher such as accelerate launch",
        ),
        (
            precision == "fp16" and device == "cpu",
            "mixed_precision is fp16 but the device is a CPU",
            f"which has no fp16 training; {other}",
        ),
        (
            precision == "fp16" and fsdp,
            "mixed_precision is fp16 but the model is sharded by FSDP",
            f"where the scale of the loss is not restored; {other}",
        ),
        (
            exact and fsdp,
            "train.reproducible is true but the accelerate config asks for FSDP",
            "which sums gradients in float32; use plain processes",
        ),
        (
            exact and precision in ("fp16", "fp8"),
            f"train.reproducible is true but the precision is {precision}",
            f"whose scaled numbers it cannot sum; {other}",
        ),
        (
            exact and device == "mps",
            "train.reproducible is true but the device is mps",
            "which has no float64; use a CPU",
        ),
        (
            device == "mps" and config.train.activation_checkpointing == "blocks" and dropout,
            "train.activation_checkpointing is blocks and the device is mps",
            "where PyTorch recomputes with another dropout; set one of them to its default",
        ),
    ):
        require(not unsupported, f"{what}, {why}")


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


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that Accelerate does not know or would silently drop."""
    known = [str(kind) for kind in LoggerType if str(kind) != "all"]
    usable = [str(kind) for kind in get_available_trackers()]
    for name in names:
        require(name in known, f"log.trackers has {name!r}; Accelerate knows {', '.join(known)}")
        require(name in usable, f"log.trackers has {name} but it is not installed; pip install it")


# --------------------------------------------------------------------------- model and optimizer


def build_model(
    config: Config, accelerator: Accelerator, vocab_size: int
) -> tuple[GPT, nn.Module, AcceleratedOptimizer]:
    """A model with uninitialized weights, the same as Accelerate wraps it, and its optimizer.

    Under FSDP the model is sharded on the meta device: no rank allocates more than its shards.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    gpt = GPT.allocate(config.model, vocab_size, "meta" if sharded else "cpu")
    set_up_model(gpt, config.train)
    compiled = config.train.compile is True
    optimizer: torch.optim.Optimizer
    if sharded:  # Accelerate tells parameters by their storage, of which there is none: a stand-in
        optimizer = torch.optim.SGD(gpt.parameters())
    else:
        optimizer = make_optimizer(gpt, config.optim, compiled, machine_mesh(config, accelerator))
    # with a device_placement Accelerate does not look for FSDP's tensors: 0.6 s of start-up
    placement = [True, True] if accelerator.distributed_type == DistributedType.NO else None
    model, wrapped = accelerator.prepare(gpt, optimizer, device_placement=placement)
    if sharded:
        gpt.materialize(accelerator.device)
        wrapped.optimizer = make_optimizer(gpt, config.optim, compiled)
    check_parameters(gpt, wrapped)
    gc.collect()  # what there is now lives to the end: the garbage collector need not search it
    gc.freeze()
    return gpt, model, wrapped


def machine_mesh(config: Config, accelerator: Accelerator) -> "DeviceMesh | None":
    """The ranks of this machine, among which Muon shares its matrices under DDP; a collective.

    None with `train.reproducible`: a product of fewer matrices at once may round in another way.
    None where machines have different numbers of ranks.
    """
    local, ddp = local_world_size(), accelerator.distributed_type in REPLICATED
    if config.optim.name != "muon" or config.train.reproducible or not ddp:
        return None
    if accelerator.num_processes == 1 or set(gather_object([local])) != {local} or local == 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    new_subgroups: Any = dist.new_subgroups
    group, _ = new_subgroups(local, timeout=collective_timeout(config))
    return DeviceMesh.from_group(group, accelerator.device.type)


def set_up_model(gpt: GPT, train: TrainConfig) -> None:
    """Set activation checkpointing and torch.compile of `gpt`, before Accelerate wraps it."""
    from accel_gpt.training.precision import forget_compiled, use_compile_cache

    gpt.recompute = train.activation_checkpointing == "blocks"
    forget_compiled()
    if train.compile is True or torch.cuda.is_available():  # which compiles FlexAttention
        use_compile_cache()
    if train.compile is True:
        gpt.compile()  # in place: no wrapper, the names of the weights stay


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` unless the optimizer holds the parameters of `model`, all and no other.

    An engine that replaces parameters without telling the optimizer trains nothing, in silence.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    lost = [name for key, name in names.items() if key not in held]
    require(
        held == names.keys(),
        f"after accelerator.prepare the optimizer holds {len(names) - len(lost)} of the "
        f"model's {len(names)} parameters ({', '.join(lost[:2])} would never train): this "
        "combination of engine, precision and versions is not supported; use plain processes "
        "and train.mixed_precision bf16",
    )
