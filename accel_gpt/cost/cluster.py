"""Estimate the collectives of a step, their time, and the host memory of a node. No torch.

docs/explanation/cost.md derives the formulas and compares them with measurements.
Sizes are in bytes, times in seconds, speeds in bytes per second.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import accumulation
from accel_gpt.cost.devices import DEVICES, device_key
from accel_gpt.cost.flops import (
    BACKWARD_SHARE,
    FLOAT_BYTES,
    FORWARD_SHARE,
    hidden_matrices,
    padded_vocab_size,
    parameter_counts,
)
from accel_gpt.cost.memory import (
    BUCKET_MIB,
    LIBRARIES_CPU_BYTES,
    Machine,
    checkpoint_bytes,
    table_bytes,
)

# Share of the data sheet's rate that collectives reach. NVIDIA/nccl-tests issue 212 measures 370 of
# 450 GB/s.
LINK_SHARE = 0.8
# NCCL's src/graph/tuning.cc: `hwLatencies` of the ring algorithm with the protocol Simple
LINK_LATENCY_SECONDS = 3.4e-6  # between devices of a node
NODE_LATENCY_SECONDS = 14e-6  # between nodes

# Devices of one collective: all of them, those that share one model, or those with the same shard
Group = Literal["all", "shards", "replicas"]


class Collective(NamedTuple):
    """All collectives of one kind in a step."""

    name: str
    calls: float
    sent_bytes: float  # by each device
    transfer_seconds: float
    latency_seconds: float

    @property
    def seconds(self) -> float:
        """Return the time of all calls, without overlap with computation."""
        return self.transfer_seconds + self.latency_seconds

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `accel-gpt plan --json`."""
        return {
            "name": self.name,
            "calls": self.calls,
            "sent": self.sent_bytes,
            "transfer": self.transfer_seconds,
            "latency": self.latency_seconds,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Network:
    """The links between the nodes of a machine, and between the devices of a node."""

    machine: Machine
    node_speed: float | None  # bytes per second of a node in each direction; None: unknown
    latency_seconds: float = NODE_LATENCY_SECONDS  # between nodes

    @property
    def link_speed(self) -> float:
        """Return the bytes per second from a device to the next device in its node."""
        key = device_key(self.machine.gpu or "")
        if key is None:
            return math.inf
        return LINK_SHARE * DEVICES[key].link_speed

    @property
    def nodes_are_slower(self) -> bool:
        """Return whether the network between nodes is slower than the links within a node.

        Returns false if the speed of the network is unknown.
        """
        if self.machine.nodes == 1 or self.node_speed is None:
            return False
        return self.node_speed < self.link_speed

    def group(self, name: Group) -> tuple[int, int]:
        """Return the number of ranks and the number of nodes in a group of devices."""
        machine = self.machine
        if name == "shards":
            return machine.shards, max(1, machine.nodes // machine.replicas)
        if name == "replicas":
            return machine.replicas, min(machine.nodes, machine.replicas)
        return machine.devices, machine.nodes

    def ring(
        self,
        name: str,
        size: float,
        calls: int,
        passes: int,
        group: Group = "all",
        rings: int = 1,
    ) -> Collective:
        """Estimate `calls` ring collectives in a group.

        `size` is the bytes of all calls together. `passes` is 1 for an all-gather or a
        reduce-scatter and 2 for an all-reduce. `rings` is the number of rings that share the
        network of a node.
        """
        ranks, nodes = self.group(group)
        hops = passes * (ranks - 1)
        sent_bytes = hops / ranks * size
        speed = self.link_speed
        if nodes > 1 and self.node_speed is not None:
            speed = min(speed, self.node_speed / rings)
        return Collective(
            name=name,
            calls=calls,
            sent_bytes=sent_bytes,
            transfer_seconds=sent_bytes / speed,
            latency_seconds=calls * hops * self.hop_seconds(ranks, nodes),
        )

    def hop_seconds(self, ranks: int, nodes: int) -> float:
        """Return the mean latency of a hop in a ring."""
        if self.machine.gpu is None:
            # In gloo, a hop is a round trip, and all ranks wait for the slowest hop.
            return 2 * self.latency_seconds if nodes > 1 else 0.0
        crossing = nodes / ranks if nodes > 1 else 0.0  # share of hops between nodes
        return crossing * self.latency_seconds + (1 - crossing) * LINK_LATENCY_SECONDS


def step_time(
    config: Config, vocab_size: int, network: Network, compute_seconds: float
) -> dict[str, Any]:
    """Break down the time of a step into computation and collectives.

    `compute_seconds` is the computation of the step. If the speed of the network between nodes is
    unknown, the result leaves out the collectives, and `exposed` is None.
    """
    machine = network.machine
    if machine.nodes > 1 and network.node_speed is None:
        return {"total": compute_seconds, "compute": compute_seconds, "exposed": None}
    micro_steps = accumulation(config, machine.devices)
    micro_seconds = compute_seconds / micro_steps
    if machine.shards > 1:
        during, exposed = sharded_step(config, vocab_size, network, micro_seconds, micro_steps)
    else:
        during, exposed = replicated_step(config, vocab_size, network, micro_seconds)
    after = after_backward(config, network)
    exposed += sum(collective.seconds for collective in after)
    collectives = [*during, *after]
    transfer = "the bandwidth within a node"
    if network.nodes_are_slower:
        transfer = "the bandwidth between nodes"
    terms = {
        "compute": compute_seconds,
        transfer: sum(collective.transfer_seconds for collective in collectives),
        "the latency of collectives": sum(one.latency_seconds for one in collectives),
    }
    limit = max(terms, key=lambda term: terms[term])
    return {
        "total": compute_seconds + exposed,
        "compute": compute_seconds,
        "exposed": exposed,  # seconds of collectives that do not overlap with computation
        "limit": limit,
        "collectives": [one.as_json() for one in collectives if one.seconds],
    }


def after_backward(config: Config, network: Network) -> list[Collective]:
    """Estimate the collectives after the backward pass, which do not overlap with computation.

    These are the exchange of Muon's updates and, between nodes of CPUs, the all-reduces of scalars.
    """
    machine = network.machine
    found: list[Collective] = []
    if config.optim.name == "muon":
        found.append(muon_exchange(config, network))
    if machine.gpu is None and machine.nodes > 1:
        found.append(scalar_exchange(config, network))
    return found


def scalar_exchange(config: Config, network: Network) -> Collective:
    """Estimate the all-reduces of single numbers between nodes of CPUs."""
    machine = network.machine
    calls = 2  # the loss and the stop signal
    if machine.shards > 1:
        calls += 1  # the gradient norm
    if config.data.document_mask:
        calls += 1  # the number of targets
    hops = 2 * (machine.devices - 1)  # an all-reduce passes the ring twice
    crossing = machine.nodes / machine.devices  # share of hops between nodes
    return Collective(
        name="all-reduce of scalars",
        calls=calls,
        sent_bytes=0,
        transfer_seconds=0,
        latency_seconds=calls * hops * crossing * network.latency_seconds,
    )


def muon_exchange(config: Config, network: Network) -> Collective:
    """Estimate the collectives that exchange Muon's updates between ranks."""
    machine = network.machine
    matrices = hidden_matrices(config.model)
    number_bytes = 2 if machine.gpu else FLOAT_BYTES
    size = number_bytes * config.model.n_layer * sum(matrices)
    if machine.shards == 1:
        return network.ring("updates of Muon", size, calls=len(matrices), passes=1)
    return network.ring(
        name="updates of Muon",
        size=size / machine.shards,
        calls=len(matrices),
        passes=2,  # to the rank that orthogonalizes a matrix, and back
        group="shards",
        rings=machine.devices // machine.nodes,
    )


def replicated_step(
    config: Config, vocab_size: int, network: Network, micro_seconds: float
) -> tuple[list[Collective], float]:
    """Estimate DDP's collectives, and their seconds that the last backward pass does not hide.

    `micro_seconds` is the computation of one micro-step. The last bucket is never hidden: it holds
    the embedding's gradient, which the backward pass computes last.
    """
    name = "all-reduce of gradients"
    size = FLOAT_BYTES * parameter_counts(config.model, vocab_size)["total"]
    if config.train.reproducible:  # one float64 all-reduce after the backward pass
        found = network.ring(name, 2 * size, calls=1, passes=2)
        return [found], found.seconds
    bucket = BUCKET_MIB * 2**20
    buckets = math.ceil(size / bucket)  # at most: DDP closes a bucket when it is over this size
    found = network.ring(name, size, calls=buckets, passes=2)
    largest_bucket = max(table_bytes(config.model, vocab_size), bucket)
    last_bucket = min(size, largest_bucket)
    last = network.ring(name, last_bucket, calls=1, passes=2)
    not_hidden = found.seconds - BACKWARD_SHARE * micro_seconds
    return [found], max(last.seconds, not_hidden)


def sharded_step(
    config: Config, vocab_size: int, network: Network, micro_seconds: float, micro_steps: int
) -> tuple[list[Collective], float]:
    """Estimate FSDP2's collectives, and their seconds that forward and backward do not hide.

    `micro_seconds` is the computation of one micro-step. Each block is gathered twice per
    micro-step, while the previous block computes. The root (all weights outside blocks) is gathered
    once, before the computation. Gradients are reduced in the last micro-step, or with
    `train.sync_each_batch` in each micro-step. The root's gradients are reduced last.
    """
    counts = parameter_counts(config.model, vocab_size)
    in_blocks = counts["attention"] + counts["mlp"]
    in_root = counts["total"] - in_blocks
    root = network.ring(
        name="all-gather of the root",
        size=micro_steps * network.machine.product_bytes * in_root,
        calls=micro_steps,
        passes=1,
        group="shards",
    )
    blocks = network.ring(
        name="all-gather of blocks",
        size=2 * micro_steps * network.machine.product_bytes * in_blocks,
        calls=2 * micro_steps * config.model.n_layer,
        passes=1,
        group="shards",
    )
    reductions = micro_steps if config.train.sync_each_batch else 1
    reduced = sharded_reductions(config, counts["total"], network, reductions)
    # seconds of one forward or backward pass
    gathering = blocks.seconds / (2 * micro_steps)
    reducing = sum(collective.seconds for collective in reduced) / reductions
    reducing_root = in_root / counts["total"] * reducing
    reducing_blocks = reducing - reducing_root
    forward = FORWARD_SHARE * micro_seconds
    backward = BACKWARD_SHARE * micro_seconds
    exposed_forward = max(0.0, gathering - forward)
    exposed_backward = max(0.0, gathering - backward)
    exposed_reducing = reducing_root + max(0.0, gathering + reducing_blocks - backward)
    exposed = root.seconds
    exposed += micro_steps * exposed_forward
    exposed += (micro_steps - reductions) * exposed_backward
    exposed += reductions * exposed_reducing
    return [root, blocks, *reduced], exposed


def sharded_reductions(
    config: Config, parameters: int, network: Network, reductions: int
) -> list[Collective]:
    """Estimate the collectives that reduce FSDP2's gradients `reductions` times per step."""
    machine = network.machine
    calls = reductions * (config.model.n_layer + 1)
    size = reductions * FLOAT_BYTES * parameters
    reduce_scatter = network.ring(
        name="reduce-scatter of gradients",
        size=size,
        calls=calls,
        passes=1 if machine.gpu else 2,  # gloo runs an all-reduce instead
        group="shards",
    )
    if machine.replicas == 1:
        return [reduce_scatter]
    all_reduce = network.ring(
        name="all-reduce of shards",
        size=size / machine.shards,
        calls=calls,
        passes=2,
        group="replicas",
        rings=machine.devices // machine.nodes,
    )
    return [reduce_scatter, all_reduce]


def host_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """Estimate the host memory of all processes of a node, by part.

    The model takes host memory only until it is on the devices. Under FSDP, a process builds its
    share of the model, one whole parameter at a time. A save then copies the share of each process.
    Without FSDP, each process builds the whole model, and only rank 0 copies it in a save.
    """
    model = config.model
    processes = machine.devices // machine.nodes
    weights = FLOAT_BYTES * parameter_counts(model, vocab_size)["total"] // machine.shards
    saved = checkpoint_bytes(config, vocab_size) // machine.shards
    if machine.shards > 1:
        embedding = padded_vocab_size(vocab_size) * model.n_embd
        weights += FLOAT_BYTES * max(embedding, *hidden_matrices(model))
        saved *= processes
    parts = {
        "libraries": processes * LIBRARIES_CPU_BYTES,
        "model at the start": processes * weights,
    }
    if config.checkpoint.async_save:
        parts["snapshot of async_save"] = saved
    return parts
