"""`accel-gpt plan CONFIG`: size, FLOPs, memory, hours and cost of a config; does it fit?

Reads the config, and the index of its data where it is there; needs no torch. docs/cost.md derives
the formulas of `cost/`.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accel_gpt.commands.plan_memory import plan_memory
from accel_gpt.commands.plan_time import plan_time
from accel_gpt.commands.plan_vocabulary import inherit_known, vocabulary_size
from accel_gpt.config.depth import describe_depth
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import Section, option
from accel_gpt.config.parse import load_config, parse_command, read_yaml, to_flat
from accel_gpt.config.plan import make_plan, plural
from accel_gpt.config.shipped import shipped_folder
from accel_gpt.console import table, write_out
from accel_gpt.cost.cluster import NODE_LATENCY
from accel_gpt.cost.devices import (
    DEVICES,
    FAST_BF16,
    bf16_instructions,
    device_key,
    device_memory,
    peak_flops,
)
from accel_gpt.cost.flops import flops_per_token, parameter_counts
from accel_gpt.cost.memory import Machine, checkpoint_bytes, largest_size, with_size
from accel_gpt.errors import require
from accel_gpt.files import read_json

PRECISIONS = ("no", "bf16", "fp16", "fp8")
CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3
NODE = 8  # GPUs of a node where nothing says it: assumption, as in HGX and OAM boards


@dataclass(frozen=True)
class PlanCommand(
    Section,
    prefix="--",
    exclusive=(("mfu", "tokens_per_second", "measure"), ("config", "budget", "hours")),
):
    """Tell what a config will take: size, FLOPs, memory, steps, hours, disk, and whether it fits.

    Any --section.key of the config may be set as well. Nothing is trained; a GPU is not needed.
    Examples:
      accel-gpt plan quickstart
      accel-gpt plan gpt2_124m --gpus 8 --gpu h100 --train.mixed_precision bf16 --price 2.5
      accel-gpt plan llama_7b --nodes 8 --gpus_per_node 8 --gpu h100 --distribution fsdp
    """

    config: str | None = option(
        None,
        "YAML file, or name of a shipped config, as for train; none with --budget or --hours.",
        positional=True,
    )
    ladder: str | None = option(
        None,
        "Folder of accel-gpt ladder, for the expected loss; null: a shipped one that matches.",
    )
    budget: float | None = option(
        None,
        "What a run may cost, at --price: tells what to train for it, by the ladder.",
        above=0,
    )
    hours: float | None = option(
        None,
        "The same by the hours that it may take.",
        above=0,
    )
    out: str = option(
        "budget.yaml",
        "Config to write, which trains what a budget or hours are best spent on.",
    )
    gpus: int | None = option(
        None,
        "Devices of all nodes, one process each; null: those of --config_file, else 1.",
        above=0,
    )
    nodes: int | None = option(
        None,
        "Machines; null: those of --config_file, else enough for 8 GPUs in each.",
        above=0,
    )
    gpus_per_node: int | None = option(
        None,
        "Devices of a machine; null: --gpus divided by --nodes.",
        above=0,
    )
    gpu: str | None = option(
        None,
        "Their kind: h100, h200, b200, a100-80gb, l40s, 'rtx 4090', ...; null: CPUs.",
    )
    memory_gb: float | None = option(
        None,
        "Memory of a device in 1e9 bytes; null: that of its kind.",
        above=0,
    )
    distribution: Literal["ddp", "fsdp", "hsdp"] | None = option(
        None,
        "ddp: each device holds all; fsdp: its share; hsdp: the devices of a node share, each node "
        "holds all; null: what --config_file says, else ddp.",
    )
    config_file: str | None = option(
        None,
        "What `accelerate config` wrote: number of processes, precision, FSDP.",
    )
    mfu: float | None = option(
        None,
        "Share of the peak FLOP/s that is reached, 0 to 1, for the hours.",
        above=0,
        at_most=1,
    )
    tokens_per_second: float | None = option(
        None,
        "Of all devices together, in place of mfu; like it without waiting for other devices.",
        above=0,
    )
    measure: bool = option(
        False,
        "Train some steps on this machine's CPUs, on random tokens, for the speed; takes seconds.",
    )
    bandwidth: float | None = option(
        None,
        "Of the network of a node in Gbit/s, one direction, all its cards together: 8 of 400 are "
        "3200.",
        above=0,
    )
    latency: float = option(
        NODE_LATENCY * 1e3,
        "Of a message from node to node in milliseconds.",
        at_least=0,
    )
    price: float | None = option(
        None,
        "Of a device for an hour, in any currency.",
        above=0,
    )
    vocab_size: int | None = option(
        None,
        "Tokens in the vocabulary, where neither data nor tokenizer tell.",
        above=0,
    )
    json: bool = option(
        False,
        "One JSON object in place of text.",
    )


def main(argv: Sequence[str]) -> int:
    """Print what a config will take, and what would make it fit; 1 where it does not fit."""
    keys: list[str] = []
    options = parse_command(PlanCommand, argv, "accel-gpt plan", keys)
    if options.budget or options.hours:
        from accel_gpt.commands.plan_ladder import budget_text, open_budget, plan_budget

        require(
            not keys,
            f"{(keys or [''])[0]} has no effect with --budget and --hours, whose config is that of "
            "the ladder; set it when the ladder is trained",
        )
        ladder, config = open_budget(options)
        answer = plan_budget(options, ladder, make_machine(options, config))
        write_out(json.dumps(answer, indent=1) + "\n" if options.json else budget_text(answer))
        return 0
    config = load_config([options.config or "", *keys], "accel-gpt plan", inherit_known)
    report = forecast(options, config)
    write_out(json.dumps(report, indent=1) + "\n" if options.json else plan_text(report))
    return int(report["memory"]["fits"] is False)


def forecast(options: PlanCommand, config: Config) -> dict[str, Any]:
    """All that follows from a config and a machine, as JSON; `UserError` where they do not fit."""
    machine = make_machine(options, config)
    vocab_size, source = vocabulary_size(config, options.vocab_size)
    if config.train.micro_batch_size == "auto":
        config = with_size(config, largest_size(config, vocab_size, machine) or 1)
    plan = make_plan(config, machine.devices)
    counts = parameter_counts(config.model, vocab_size)
    tokens, flops = plan.max_steps * plan.tokens_per_step, flops_per_token(config.model, vocab_size)
    checkpoint, saved = checkpoint_bytes(config, vocab_size), config.checkpoint
    sequences = plan.max_steps * plan.sequences_per_step
    token_bytes = 2 if vocab_size < 65536 else 4  # in a shard
    return {
        "config": options.config,
        "machine": str(machine),
        "precision": {"is": machine.precision, "source": machine.precision_source},
        "vocabulary": {"tokens": vocab_size, "source": source},
        "parameters": counts,
        "length": {
            "steps": plan.max_steps,
            "warmup_steps": plan.warmup_steps,
            "tokens_per_step": plan.tokens_per_step,
            "micro_batch_size": plan.micro_batch_size,
            "block_size": plan.block_size,
            "accumulation_steps": plan.accumulation_steps,
            "devices": plan.world_size,
            "tokens": tokens,
            "tokens_per_parameter": tokens / counts["total_unpadded"],
            "flops_per_token": flops,
            "flops_per_step": flops * plan.tokens_per_step,
            "flops": flops * tokens,
        },
        "depth": list(describe_depth(to_flat(config))),
        "loss": expected_loss(options, config, vocab_size),
        "memory": plan_memory(config, vocab_size, machine),
        "time": plan_time(options, config, vocab_size, machine, plan),
        "disk": {
            "data_read": sequences * (plan.block_size + 1) * token_bytes,
            "checkpoint": checkpoint,
            "checkpoint_by_rank": checkpoint // machine.shards,
            "checkpoints_kept": saved.keep_last + saved.keep_best,
            "checkpoints": checkpoint * (saved.keep_last + saved.keep_best),
        },
    }


def expected_loss(options: PlanCommand, config: Config, vocab_size: int) -> dict[str, Any] | None:
    """What a ladder predicts, see `plan_loss`; without one for this data numpy is not loaded."""
    paths = [] if options.ladder else (shipped_folder() / "references").glob("*_ladder.json")
    name = Path(config.data.folder or "").name
    if not options.ladder and all(read_json(path)["data"]["folder"] != name for path in paths):
        return None
    from accel_gpt.commands.plan_ladder import plan_loss

    return plan_loss(options, config, vocab_size)


# --------------------------------------------------------------------------- the machine


def make_machine(options: PlanCommand, config: Config) -> Machine:
    """The machine of the options and the accelerate config; `UserError` where they do not fit."""
    path, gpu, launch = options.config_file, options.gpu, {}
    if path:
        launch = read_yaml(path)
        require(
            isinstance(launch, dict) and "distributed_type" in launch,
            f"--config_file {path} has no distributed_type; expected what accelerate config writes",
        )
    if gpu is not None:
        near = difflib.get_close_matches(gpu.lower(), DEVICES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(DEVICES)}"
        require(
            "tpu" not in gpu.lower(), f"--gpu {gpu} is a TPU, on which accel-gpt does not train"
        )
        require(device_key(gpu) is not None, f"--gpu {gpu} is not in the table of devices; {hint}")
    nodes, devices = planned_nodes(options, launch)
    sharded = options.distribution in ("fsdp", "hsdp")
    replicas = nodes if options.distribution == "hsdp" else 1
    if options.distribution is None:
        sharded = str(launch.get("distributed_type")) == "FSDP"
        axes = launch.get("parallelism_config") if sharded else None
        if isinstance(axes, dict):
            replicas = axes.get("parallelism_config_dp_replicate_size", 1)
    require(
        isinstance(replicas, int) and replicas > 0 and devices % replicas == 0,
        f"dp_replicate_size in {path} is {replicas!r}; it must divide the {devices} devices",
    )
    memory = options.memory_gb * 1e9 if options.memory_gb else device_memory(gpu) if gpu else None
    precision, source = planned_precision(config, launch, path, gpu)
    require(
        precision not in ("fp16", "fp8") or gpu is not None,
        f"the precision is {precision} but no --gpu is given, and a CPU has no {precision} "
        "training; give --gpu, or --train.mixed_precision bf16",
    )
    require(
        not (config.train.reproducible and (sharded or precision in ("fp16", "fp8"))),
        "train.reproducible is true, which goes neither with fsdp, fp16 nor fp8; leave it out, or "
        "plan for --distribution ddp in bf16 or float32",
    )
    return Machine(devices, gpu, memory, sharded, precision, source, nodes, replicas)


def planned_nodes(options: PlanCommand, launch: Mapping[str, Any]) -> tuple[int, int]:
    """Nodes and devices: two of --gpus, --nodes and --gpus_per_node give the third."""
    each, nodes, found = options.gpus_per_node, options.nodes, launch.get("num_processes", 1)
    require(
        isinstance(found, int) and found > 0,
        f"num_processes in {options.config_file} is {found!r}; expected a number above 0, or give "
        "--gpus",
    )
    devices = options.gpus or (each * (nodes or 1) if each else found)
    if not nodes and not options.gpus and isinstance(launch.get("num_machines"), int):
        nodes = launch["num_machines"]
    if not nodes:
        whole = next(n for n in range(NODE, 0, -1) if devices % n == 0) if options.gpu else devices
        nodes = max(1, devices // (each or whole))
    require(
        devices == nodes * (each or devices // nodes),
        f"{devices} devices are not {nodes} nodes of {each or 'equal size'}; give two of --gpus, "
        "--nodes and --gpus_per_node",
    )
    return nodes, devices


def planned_precision(
    config: Config, launch: Mapping[str, Any], path: str | None, gpu: str | None
) -> tuple[str, str]:
    """The precision and who sets it: the config goes before the accelerate config."""
    precision = config.train.mixed_precision
    if precision not in (None, "auto"):
        return precision, "train.mixed_precision"
    found = launch.get("mixed_precision") or "no"  # YAML reads a bare no as false
    resumed = resumed_precision(config, gpu) if precision == "auto" else None
    if resumed is not None:
        return resumed, f"train.mixed_precision auto, as in {config.out_dir}"
    if precision == "auto" and found == "no":
        fits = peak_flops(gpu, "bf16") if gpu else bf16_instructions() in FAST_BF16
        return "bf16" if fits else "no", "train.mixed_precision auto"
    require(
        found in PRECISIONS,
        f"mixed_precision in {path} is {found!r}; planned is for {', '.join(PRECISIONS)}",
    )
    return str(found), str(path) if path else "default"


def resumed_precision(config: Config, gpu: str | None) -> str | None:
    """The precision of the run in `out_dir`, which a launch on this machine would resume."""
    if gpu:
        return None
    from accel_gpt.training.run_folder import RunFolder  # imports numpy

    found = RunFolder(config.out_dir).config.get("train.mixed_precision")
    return str(found) if found in PRECISIONS else None


# --------------------------------------------------------------------------- the table


def plan_text(report: Mapping[str, Any]) -> str:
    """The report as a table; the sections are separated by empty lines."""
    precision, held = report["precision"], report["memory"]
    title = [f"{report['config']} on {report['machine']}"]
    title += [f"precision {precision['is']}: {precision['source']}", *report["depth"], ""]
    verdict = "It does not fit. With these settings it does:\n" + "\n".join(held["remedies"])
    if held["fits"] is None:
        verdict = "Whether it fits is not known; --gpu or --memory_gb tells what it must fit in."
    elif held["fits"]:
        largest = held["largest_micro_batch_size"]
        verdict = f"It fits; train.micro_batch_size may be up to {largest}."
    rows = table([*size_rows(report), *cost_rows(report)], "<25", ">16", "<", gap=3)
    return "\n".join(title) + "\n" + rows + verdict + "\n"


def size_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Parameters by part, vocabulary, length: what, how much, why."""
    counts, words, run = dict(report["parameters"]), report["vocabulary"], report["length"]
    total, real = counts.pop("total"), counts.pop("total_unpadded")
    padding = f"of them {total - real:,} pad the vocabulary" if total > real else ""
    yield "parameters", f"{total:,}", padding
    for part, count in counts.items():
        tied = "shared with the embedding" if part == "head" and not count else ""
        if count or tied:
            yield f"  {part}", f"{count:,}", tied
    yield "vocabulary", f"{words['tokens']:,}", words["source"]
    yield ()
    batch = f"{run['micro_batch_size']:,} x {run['block_size']:,} tokens x "
    batch += plural(run["accumulation_steps"], "micro-step")
    yield "steps", f"{run['steps']:,}", f"{run['warmup_steps']:,} of them warm-up"
    yield (
        "tokens per step",
        f"{run['tokens_per_step']:,}",
        f"{batch} x {plural(run['devices'], 'device')}",
    )
    yield "tokens", f"{run['tokens']:,}", ""
    ratio = f"{run['tokens_per_parameter']:.1f}"
    yield "tokens per parameter", ratio, f"Chinchilla: about {CHINCHILLA}"
    yield "FLOPs per token", f"{run['flops_per_token']:.3e}", "forward and backward"
    yield "  per step", f"{run['flops_per_step']:.3e}", ""
    yield "  of the run", f"{run['flops']:.3e}", ""
    yield ()
    if report["loss"]:
        from accel_gpt.commands.plan_ladder import loss_rows

        yield from loss_rows(report["loss"])


def cost_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Memory, speed, hours and disk: what, how much, why."""
    held, found, disk = report["memory"], report["time"], report["disk"]
    limit = f"of {gigabytes(held['device'])}" if held["device"] else ""
    yield "memory of a device", gigabytes(held["total"]), limit
    for part, size in held["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at its fullest", "", held["moment"]
    if held["compiled"]:
        yield "", "", "train.compile keeps less; how much is not counted"
    if host := dict(held["host"]):
        libraries, most = host.pop("libraries"), max(host, key=lambda part: held["host"][part])
        yield "memory of a node's host", gigabytes(libraries + host[most]), f"libraries and {most}"
        for part, size in held["host"].items():
            yield f"  {part}", gigabytes(size), ""
    yield ()
    if found["step"]:
        yield from step_rows(found["step"])
    rate, evaluation = found["tokens_per_second"], found["evaluation_hours"]
    yield "tokens per second", f"{rate:,.0f}" if rate else "?", found["source"]
    if found["mfu"] is not None:
        yield "  MFU", f"{found['mfu']:.1%}", "of the peak of all devices"
    if rate is not None:
        share = "without" if evaluation is None else f"{evaluation / found['hours']:.0%} of them"
        yield "time", format_hours(found["hours"]), f"{share} evaluations"
        yield "device hours", f"{found['device_hours']:,.2f}", ""
    if found["cost"] is not None:
        yield "cost", f"{found['cost']:,.2f}", "at --price a device hour"
    yield ()
    kept = f"{disk['checkpoints_kept']} kept: {gigabytes(disk['checkpoints'])}"
    if disk["checkpoint_by_rank"] < disk["checkpoint"]:
        kept += f"; each rank writes {gigabytes(disk['checkpoint_by_rank'])}"
    yield "data read", gigabytes(disk["data_read"]), ""
    yield "checkpoint", gigabytes(disk["checkpoint"]), kept
    yield ()


def format_hours(hours: float) -> str:
    """`40 s`, `25 min`, `2 h 10 min`, `3.4 days`."""
    minutes = round(60 * hours)
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if minutes < 2:
        return f"{3600 * hours:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def step_rows(step: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where the time of a step goes."""
    rows = [("step", step["total"], f"limited by {step['limit']}" if "limit" in step else "")]
    rows += [("  compute", step["compute"], "")]
    for one in step.get("collectives", ()):
        what = f"{gigabytes(one['sent'])} from each device, {plural(one['calls'], 'call')}"
        rows += [(f"  {one['name']}", one["seconds"], what)]
    if step["exposed"]:
        rows += [("  not hidden by compute", step["exposed"], "of the collectives")]
    yield from ((name, f"{1e3 * seconds:,.1f} ms", why) for name, seconds, why in rows)
    if step["exposed"] is None:
        yield "  collectives", "?", "not known; give --bandwidth"


def gigabytes(size: float) -> str:
    """Bytes in 1e9, or in 1e6 where there are few."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
