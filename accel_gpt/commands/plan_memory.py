"""The part of `accel-gpt plan` about memory: what is held, whether it fits, what makes it fit."""

from dataclasses import replace
from itertools import product
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.cost.cluster import host_bytes
from accel_gpt.cost.memory import Machine, fitting_sizes, footprint, largest_size, with_size

LARGEST_GROUP = 4096  # devices
PRECISION, SHARDS = "--train.mixed_precision bf16", "--distribution fsdp"
SAVING = (PRECISION, SHARDS, "--train.activation_checkpointing blocks")


def plan_memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, Any]:
    """What one device holds, whether it fits, and what would make it fit."""
    needed = footprint(config, vocab_size, machine)
    fits = None if machine.memory is None else needed.total <= machine.memory
    return {
        "moment": needed.moment,
        "parts": needed.parts,
        "total": needed.total,
        "host": host_bytes(config, vocab_size, machine) if machine.gpu else {},
        "device": machine.memory,
        "fits": fits,
        "compiled": config.train.compile is True,
        "largest_micro_batch_size": largest_size(config, vocab_size, machine) if fits else None,
        "remedies": remedies(config, vocab_size, machine) if fits is False else [],
    }


def remedies(config: Config, vocab_size: int, machine: Machine) -> list[str]:
    """Options that make the run fit, the fewest first; else the devices that it takes."""
    train = config.train
    blocks = replace(config, train=replace(train, activation_checkpointing="blocks"))
    replicated = machine.shards < machine.devices and not train.reproducible
    can = (machine.precision == "no", replicated, train.activation_checkpointing != "blocks")
    found, best = [], 0
    # a later one costs more: precision no time, sharding collectives, recomputing a third
    choices = product(*((False, True)[: 1 + possible] for possible in can))
    for chosen in sorted(choices, key=lambda choice: (sum(choice), choice[::-1])):
        half, shard, recompute = chosen
        other = replace(machine, precision="bf16") if half else machine
        other = replace(other, sharded=True, replicas=1) if shard else other
        changed = blocks if recompute else config
        size = min(largest_size(changed, vocab_size, other) or 0, train.sequences)
        if size <= best:
            continue  # a larger change for no larger micro-batch
        best = size
        words = [option for option, take in zip(SAVING, chosen, strict=True) if take]
        if size < train.sequences:
            words += [f"--train.micro_batch_size {size}"]
        needed = footprint(with_size(changed, size), vocab_size, other).total
        found.append(f"{' '.join(words)}: {needed / 1e9:.1f} GB")
    devices, one = machine.devices, with_size(blocks, 1)
    while not found and devices <= LARGEST_GROUP:
        devices *= 2
        other = replace(machine, devices=devices, sharded=True, replicas=1, precision="bf16")
        if fitting_sizes(one, devices):
            taken = footprint(one, vocab_size, other).total
            if machine.memory and taken <= machine.memory:
                words = [f"--gpus {devices}", *SAVING, "--train.micro_batch_size 1"]
                found.append(f"{' '.join(words)}: {taken / 1e9:.1f} GB")
    return found or [
        "no setting makes it fit on devices of this kind; take larger ones, a smaller model or a "
        "shorter model.block_size"
    ]
