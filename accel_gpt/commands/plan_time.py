"""The part of `accel-gpt plan` about time: of a step, what limits it, of the run, and its cost."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_gpt.commands.plan_vocabulary import data_folders
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import Plan, plural
from accel_gpt.cost.cluster import Network, step_time
from accel_gpt.cost.devices import device_key
from accel_gpt.cost.flops import flops_per_token, mfu
from accel_gpt.cost.memory import Machine
from accel_gpt.errors import require
from accel_gpt.launcher import child_error, run_child

if TYPE_CHECKING:
    from accel_gpt.commands.plan import PlanCommand

ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
RECOMPUTED = 3 / 4  # of it with activation checkpointing: a second forward pass
UNKNOWN = "not known; give --tokens_per_second, or --measure it here"
MEASURED_STEPS, MEASURED_FLOPS = 3, 2e11  # steps; of each, a second or two on two cores
FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step: the backward pass takes two


def plan_time(
    options: "PlanCommand", config: Config, vocab_size: int, machine: Machine, plan: Plan
) -> dict[str, Any]:
    """Speed, hours and cost; None where the speed is not known."""
    flops = flops_per_token(config.model, vocab_size)
    peak = machine.peak(config.train.matmul_precision)
    rate, source = options.tokens_per_second, "--tokens_per_second"
    require(
        not options.mfu or peak is not None,
        f"--mfu {options.mfu} is a share of a peak, and none is known for {machine}; "
        "give --tokens_per_second",
    )
    require(
        machine.nodes > 1 or not options.bandwidth,
        f"--bandwidth {options.bandwidth} is that of a network between nodes, but there is one "
        "node; give --nodes",
    )
    if not rate and peak:
        recomputed = config.train.activation_checkpointing == "blocks"
        assumed = ASSUMED_MFU * (RECOMPUTED if recomputed else 1)
        rate = (options.mfu or assumed) * peak * machine.devices / flops
        source = "--mfu" if options.mfu else f"an assumed MFU of {assumed:.0%}"
    if options.measure:
        rate, source = measured_rate(config, vocab_size, machine)
    if not rate and machine.gpu is None and (rate := trained_rate(config, flops, machine.devices)):
        source = f"measured by the run in {config.out_dir}, which may have been on another machine"
    if not rate:
        unknown = ("tokens_per_second", "mfu", "hours", "evaluation_hours", "device_hours", "cost")
        return dict.fromkeys((*unknown, "step")) | {"source": UNKNOWN}
    network = Network(machine, (options.bandwidth or 0) * 1e9 / 8 or None, options.latency / 1e3)
    step = step_time(config, vocab_size, network, plan.tokens_per_step / rate)
    rate = plan.tokens_per_step / step["total"]
    evaluated = evaluation_tokens(config, plan.max_steps)
    evaluation_hours = FORWARD_SHARE * (evaluated or 0) / rate / 3600
    hours = plan.max_steps * step["total"] / 3600 + evaluation_hours
    return {
        "step": step,
        "tokens_per_second": rate,
        "mfu": mfu(rate, flops, peak, machine.devices) if peak else None,
        "source": source,
        "hours": hours,
        "evaluation_hours": None if evaluated is None else evaluation_hours,
        "device_hours": hours * machine.devices,
        "cost": hours * machine.devices * options.price if options.price else None,
    }


def trained_rate(config: Config, flops: float, processes: int) -> float | None:
    """Median tokens per second of the run in `out_dir`, if it is of such a model, on CPUs."""
    from accel_gpt.training.run_folder import RunFolder  # imports numpy

    run = RunFolder(config.out_dir)
    known = ("processes", processes), ("model", "flops_per_token", flops)
    if any(run.last_launch(*keys) != value for *keys, value in known):
        return None
    device, rates = str(run.last_launch("device")), run.metrics.curve("perf/tokens_per_second")[1]
    return float(sorted(rates)[len(rates) // 2]) if len(rates) and not device_key(device) else None


def measured_rate(config: Config, vocab_size: int, machine: Machine) -> tuple[float, str]:
    """Tokens per second of this machine's CPUs, by a few steps on random tokens, and what it is.

    The steps are those of `accel-gpt bench`, uncompiled, of fewer sequences where a step is long.
    """
    import numpy as np

    require(
        machine.gpu is None and machine.devices == 1,
        f"--measure trains on the CPUs of this machine in one process, but the plan is for "
        f"{machine}; leave out --gpu and --gpus",
    )
    T, flops = config.model.block_size, flops_per_token(config.model, vocab_size)
    sequences = min(config.train.sequences, math.ceil(MEASURED_FLOPS / (flops * T)))
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(256, size=100 * (T + 1)).astype(np.uint16)
        for split in ("train", "val"):
            np.save(Path(folder, f"random_{split}_000000.npy"), tokens)
        path = Path(folder, "config.yaml")
        path.write_text(to_yaml(config), encoding="utf-8")
        own = {
            **{"data.train": folder, "data.tokenizer": "bytes", "data.val": "null"},
            **{"data.prepare.source": "null", "model.vocab_size": max(vocab_size, 257)},
            **{"model.init_from": "scratch", "train.compile": "false"},
            **{"train.micro_batch_size": sequences, "train.tokens_per_step": sequences * T},
            **{"eval.tokens": T, "eval.whole_at_end": "false"},
            "train.mixed_precision": machine.precision,
        }
        words = ["bench", str(path), "--json", "--parts=0"]
        words += ["--warmup=1", f"--steps={MEASURED_STEPS}"]
        words += [f"--{key}={value}" for key, value in own.items()]
        done = run_child(words, capture=True)
    error = child_error(done.stderr, done.returncode)
    require(not done.returncode, f"--measure failed: {error}")
    report = json.loads(done.stdout)
    precision = report["mixed_precision"].replace("no", "float32")
    source = (
        f"measured here: {MEASURED_STEPS} steps of {plural(sequences, 'sequence')} in {precision}, "
        "uncompiled"
    )
    return report["tokens_per_second"], source


def evaluation_tokens(config: Config, steps: int) -> int | None:
    """Tokens that all evaluations read; None where they are whole splits that are not there yet."""
    limit, train = config.eval.tokens, [str(folder) for folder in data_folders(config)]
    val = config.data.val
    folders = list(val.values()) if isinstance(val, Mapping) else [val] if val else train
    sets = [[folder] for folder in folders] if isinstance(val, Mapping) else [folders]
    read = [split_tokens(train, "train", limit), *(split_tokens(s, "val", limit) for s in sets)]
    last = split_tokens(folders, "val", None) if config.eval.whole_at_end else 0
    if last is None or None in read:
        return None
    times = -(-steps // config.eval.every) if config.eval.every else 1
    return times * sum(tokens or 0 for tokens in read) + last


def split_tokens(folders: list[str], split: str, limit: int | None) -> int | None:
    """Tokens of a split of all `folders` together, at most `limit`; None: not known."""
    indexes = [Path(folder) for folder in folders if (Path(folder) / "dataset.json").is_file()]
    if not folders or len(indexes) < len(folders):
        return limit
    from accel_gpt.data.shards import read_index

    shards = [shard for folder in indexes for shard in read_index(folder)["splits"].get(split, ())]
    whole = sum(int(shard["tokens"]) for shard in shards)
    return whole if limit is None else min(limit, whole)
