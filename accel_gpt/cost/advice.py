"""Which setting would make a run fit, each checked by the arithmetic that found it does not."""

from collections.abc import Iterator
from dataclasses import replace

from accel_gpt.config.experiment import Config
from accel_gpt.cost.machine import Machine
from accel_gpt.cost.memory import footprint

LARGEST_GROUP = 4096  # devices


def fitting_sizes(config: Config, devices: int) -> list[int]:
    """Values of train.micro_batch_size that divide the step, largest first."""
    sequences, rest = divmod(config.train.tokens_per_step, config.model.block_size * devices)
    if rest:
        return []
    return [size for size in range(min(sequences, 4096), 0, -1) if sequences % size == 0]


def need(config: Config, vocab_size: int, machine: Machine) -> int | None:
    """Bytes of one device; None where the step does not divide."""
    sequences = config.train.tokens_per_step // config.model.block_size
    if config.train.sequences not in fitting_sizes(config, machine.devices):
        return None
    accumulation = sequences // (config.train.sequences * machine.devices)
    return footprint(config, vocab_size, machine, accumulation).total


def largest_size(config: Config, vocab_size: int, machine: Machine) -> int | None:
    """The largest train.micro_batch_size that fits; None where not even 1 does."""
    for size in fitting_sizes(config, machine.devices):
        taken = need(with_size(config, size), vocab_size, machine)
        if taken is not None and machine.memory and taken <= machine.memory:
            return size
    return None


def with_size(config: Config, size: int) -> Config:
    """The config with another train.micro_batch_size."""
    return replace(config, train=replace(config.train, micro_batch_size=size))


def variants(config: Config, machine: Machine) -> Iterator[tuple[list[str], Machine]]:
    """Other ways to run, from the smallest change on, with the options that ask for them."""
    yield [], machine
    can_halve = machine.precision == "no"
    half = replace(machine, precision="bf16")
    if can_halve:
        yield ["--train.mixed_precision bf16"], half
    if machine.devices > 1 and not machine.sharded and not config.train.reproducible:
        yield ["--distribution fsdp"], replace(machine, sharded=True)
        if can_halve:
            words = ["--train.mixed_precision bf16", "--distribution fsdp"]
            yield words, replace(half, sharded=True)


def remedies(config: Config, vocab_size: int, machine: Machine) -> list[str]:
    """Options that make it fit, the smallest changes first; what it takes where none do."""
    if machine.memory is None:
        return []
    found, best = [], 0
    for words, other in variants(config, machine):
        size = min(largest_size(config, vocab_size, other) or 0, config.train.sequences)
        if size <= best:
            continue  # more of a change for no larger a micro-batch
        best = size
        if size < config.train.sequences:
            words = [*words, f"--train.micro_batch_size {size}"]
        taken = need(with_size(config, size), vocab_size, other) or 0
        found.append(f"{' '.join(words)}: {taken / 1e9:.1f} GB")
    return found or [more_devices(config, vocab_size, machine)]


def more_devices(config: Config, vocab_size: int, machine: Machine) -> str:
    """How many devices it takes, sharded, in bf16 and one sequence at a time."""
    devices = machine.devices
    while devices <= LARGEST_GROUP:
        devices *= 2
        other = replace(machine, devices=devices, sharded=True, precision="bf16")
        taken = need(with_size(config, 1), vocab_size, other)
        if taken is not None and machine.memory and taken <= machine.memory:
            return (
                f"--gpus {devices} --distribution fsdp --train.mixed_precision bf16 "
                f"--train.micro_batch_size 1: {taken / 1e9:.1f} GB"
            )
    return (
        "no setting makes it fit on devices of this kind; take larger ones, a smaller model or a "
        "shorter model.block_size"
    )
