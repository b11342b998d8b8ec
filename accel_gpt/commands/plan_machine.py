"""The machine and the network that the options of `accel-gpt plan` describe."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from accel_gpt.commands.options import PlanCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_yaml
from accel_gpt.config.plan import plural
from accel_gpt.cost.cluster import Network
from accel_gpt.cost.devices import (
    DEVICES,
    FAST_BF16,
    bf16_instructions,
    device_key,
    device_memory,
    fp16_problem,
    half_precision,
    peak_flops,
)
from accel_gpt.cost.memory import Machine
from accel_gpt.errors import UserError, require
from accel_gpt.launcher import PRECISIONS
from accel_gpt.training.checkpoint import earlier_precision

NODE = 8  # most GPUs of a node, if not given: assumption, as in HGX and OAM boards


def make_machine(options: PlanCommand, config: Config) -> Machine:
    """Return the machine that the options and the accelerate config describe.

    Raises `UserError` if they contradict each other or the config.
    """
    launch = read_launch(options.config_file)
    if options.gpu is not None:
        check_gpu(options.gpu)
    nodes, devices = planned_nodes(options, launch)
    sharded, replicas = planned_sharding(options, launch, nodes)
    require(
        isinstance(replicas, int) and replicas > 0 and devices % replicas == 0,
        f"dp_replicate_size in {options.config_file} is {replicas!r}; it must divide the "
        f"number of devices, {devices}",
    )
    precision, source = planned_precision(config, launch, options.config_file, options.gpu, sharded)
    require(
        precision not in ("fp16", "fp8") or options.gpu is not None,
        f"the precision is {precision}, but CPUs do not support it; give --gpu, or "
        "--train.mixed_precision bf16",
    )
    if precision != "no" and options.gpu is not None:
        require(
            peak_flops(options.gpu, precision) is not None,
            f"the precision is {precision}, but {options.gpu} has no matrix units for it; set "
            f"--train.mixed_precision {half_precision(options.gpu)}",
        )
    require(
        not (sharded and precision == "fp16"),
        "the precision is fp16, but fsdp does not support it; set --train.mixed_precision no, or "
        "plan for --distribution ddp",
    )
    require(
        not (config.train.reproducible and (sharded or precision in ("fp16", "fp8"))),
        "train.reproducible is true, but fsdp, fp16 and fp8 do not support it; leave it out, or "
        "plan for --distribution ddp in bf16 or float32",
    )
    memory_bytes: float | None = None
    if options.memory_gb:
        memory_bytes = options.memory_gb * 1e9
    elif options.gpu:
        memory_bytes = device_memory(options.gpu)
    return Machine(
        devices=devices,
        gpu=options.gpu,
        memory_bytes=memory_bytes,
        sharded=sharded,
        precision=precision,
        precision_source=source,
        nodes=nodes,
        replicas=replicas,
    )


def make_network(options: PlanCommand, config: Config, machine: Machine) -> Network:
    """Return the network that the options describe.

    Raises `UserError` for --bandwidth of a single node, and for --mfu without a known peak.
    """
    require(
        not options.mfu or machine.peak(config.train.matmul_precision) is not None,
        f"--mfu is {options.mfu}, but the peak FLOP/s of {machine} is unknown; give "
        "--tokens_per_second",
    )
    require(
        machine.nodes > 1 or not options.bandwidth,
        f"--bandwidth is {options.bandwidth}, but a single node has no network to others; give "
        "--nodes",
    )
    node_speed = None
    if options.bandwidth:
        node_speed = options.bandwidth * 1e9 / 8
    return Network(machine, node_speed, latency_seconds=options.latency / 1e3)


def read_launch(path: str | None) -> Mapping[str, Any]:
    """Return what `accelerate config` wrote; empty without a path."""
    if not path:
        return {}
    launch = read_yaml(path)
    if not isinstance(launch, dict) or "distributed_type" not in launch:
        raise UserError(
            f"--config_file {path} has no distributed_type; expected what accelerate config writes"
        )
    return launch


def check_gpu(gpu: str) -> None:
    """Raise `UserError` if the table of devices does not list the GPU."""
    if "tpu" in gpu.lower():
        raise UserError(f"--gpu {gpu} is a TPU, but accel-gpt does not train on TPUs; give a GPU")
    if device_key(gpu) is not None:
        return
    near = difflib.get_close_matches(gpu.lower(), DEVICES, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(DEVICES)}"
    raise UserError(f"--gpu {gpu} is not in the table of devices; {hint}")


def planned_nodes(options: PlanCommand, launch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of nodes and devices; from two of three options the third follows."""
    each = options.gpus_per_node
    nodes = options.nodes
    processes = launch.get("num_processes", 1)
    require(
        isinstance(processes, int) and processes > 0,
        f"num_processes in {options.config_file} is {processes!r}; expected a number above 0, or "
        "give --gpus",
    )
    if options.gpus:
        devices = options.gpus
    elif each:
        devices = each * (nodes or 1)
    else:
        devices = processes
    if not nodes and not options.gpus and isinstance(launch.get("num_machines"), int):
        nodes = launch["num_machines"]
    if not nodes and each:
        nodes = max(1, devices // each)
    elif not nodes and options.gpu:
        whole = max(size for size in range(1, NODE + 1) if devices % size == 0)
        nodes = devices // whole
    elif not nodes:
        nodes = 1
    require(
        devices == nodes * (each or devices // nodes),
        f"{plural(devices, 'device')} cannot be {plural(nodes, 'node')} of "
        f"{each or 'equal size'}; give two of --gpus, --nodes and --gpus_per_node",
    )
    return nodes, devices


def planned_sharding(
    options: PlanCommand, launch: Mapping[str, Any], nodes: int
) -> tuple[bool, Any]:
    """Return whether the model is sharded, and the number of replicas (groups that hold all)."""
    if options.distribution is not None:
        sharded = options.distribution in ("fsdp", "hsdp")
        return sharded, nodes if options.distribution == "hsdp" else 1
    sharded = str(launch.get("distributed_type")) == "FSDP"
    axes = launch.get("parallelism_config")
    if sharded and isinstance(axes, dict):
        return True, axes.get("parallelism_config_dp_replicate_size", 1)
    return sharded, 1


def planned_precision(
    config: Config, launch: Mapping[str, Any], path: str | None, gpu: str | None, sharded: bool
) -> tuple[str, str]:
    """Return the precision and its source; the config overrides the accelerate config."""
    precision = config.train.mixed_precision
    if precision not in (None, "auto"):
        return precision, "train.mixed_precision"
    found = launch.get("mixed_precision") or "no"  # YAML reads a bare no as false
    if precision == "auto":
        earlier = (
            None if gpu else earlier_precision(config)
        )  # precision of the run, if it trains here
        if earlier:
            resumed, file = earlier
            return resumed, f"train.mixed_precision auto, as in {file}"
        if found == "no":
            fast = fast_precision(gpu)
            if fast == "fp16" and fp16_problem(sharded, config.train.reproducible):
                fast = "no"
            return fast, "train.mixed_precision auto"
    require(
        found in PRECISIONS,
        f"mixed_precision in {path} is {found!r}; expected one of {', '.join(PRECISIONS)}",
    )
    return str(found), str(path) if path else "default"


def fast_precision(gpu: str | None) -> Literal["no", "bf16", "fp16"]:
    """Return the 16-bit precision in which a GPU, or this CPU, is fastest; no if there is none."""
    if gpu is not None:
        return half_precision(gpu) or "no"
    return "bf16" if bf16_instructions() in FAST_BF16 else "no"
