"""Past one device: the collectives of a step, what they cost, and the host memory of a node.

docs/explanation/cost.md derives the formulas and compares them with measurements. Without torch.
All sizes are bytes, all times seconds.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import accumulation
from accel_gpt.cost.devices import DEVICES, device_key
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.memory import (
    FLOAT,
    LIBRARIES_CPU,
    Machine,
    checkpoint_bytes,
    table_bytes,
)

# of a data sheet's rate; NVIDIA/nccl-tests issue 212: 370 of 450 GB/s, the rest is protocol
LINK_SHARE = 0.8
# NCCL's src/graph/tuning.cc, `hwLatencies`, ring, protocol Simple
LINK_LATENCY = 3.4e-6  # between devices of a node
NODE_LATENCY = 14e-6  # between nodes
# DistributedDataParallel's defaults
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
# of the time that a micro-step computes
FORWARD = 1 / 3
BACKWARD = 2 / 3


Group = Literal["all", "shards", "replicas"]  # of devices


class Collective(NamedTuple):
    """The collectives of one kind in a step."""

    name: str
    calls: float
    sent: float  # by each device
    transfer: float
    latency: float

    @property
    def seconds(self) -> float:
        """Time of all of them, if nothing else is going on."""
        return self.transfer + self.latency


@dataclass(frozen=True)
class Network:
    """What joins the nodes of a machine, and the devices of a node."""

    machine: Machine
    bandwidth: float | None  # bytes a second into a node, and out of it; None: not known
    latency: float = NODE_LATENCY  # from one node to another

    @property
    def link(self) -> float:
        """Bytes a second from a device to the next one of its node."""
        key = device_key(self.machine.gpu or "")
        if key is None:
            return math.inf
        return LINK_SHARE * DEVICES[key].link

    def group(self, name: Group) -> tuple[int, int]:
        """Return the ranks and the nodes of a group of devices."""
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
        """Return `calls` collectives over `size` bytes in all, in a ring through a group.

        All-gathers and reduce-scatters pass the ring once, all-reduces twice. `rings`: as many
        rings share the network between nodes.
        """
        ranks, nodes = self.group(group)
        hops = passes * (ranks - 1)
        sent = hops / ranks * size
        speed = self.link
        if nodes > 1:
            speed = min(speed, (self.bandwidth or math.inf) / rings)
        return Collective(
            name=name,
            calls=calls,
            sent=sent,
            transfer=sent / speed,
            latency=calls * hops * self.hop_latency(ranks, nodes),
        )

    def hop_latency(self, ranks: int, nodes: int) -> float:
        """Return the mean latency of a hop in a ring."""
        if self.machine.gpu is None:  # gloo: each hop is a round trip, as slow as the slowest one
            return 2 * self.latency if nodes > 1 else 0.0
        crossing = nodes / ranks if nodes > 1 else 0.0  # share of hops from node to node
        return crossing * self.latency + (1 - crossing) * LINK_LATENCY


def step_time(config: Config, vocab_size: int, network: Network, compute: float) -> dict[str, Any]:
    """Return where the time of a step goes that computes for `compute` seconds.

    Without the bandwidth of a network between nodes its collectives are not known.
    """
    machine = network.machine
    if machine.nodes > 1 and not network.bandwidth:
        return {"total": compute, "compute": compute, "exposed": None}
    micro_steps = accumulation(config, machine.devices)
    micro = compute / micro_steps
    if machine.shards > 1:
        during, exposed = sharded_step(config, vocab_size, network, micro, micro_steps)
    else:
        during, exposed = replicated_step(config, vocab_size, network, micro)
    after = after_backward(config, network)
    found = [*during, *after]
    exposed += sum(one.seconds for one in after)
    slow = machine.nodes > 1 and (network.bandwidth or math.inf) < network.link
    link = "the bandwidth between nodes" if slow else "the bandwidth within a node"
    terms = {
        "compute": compute,
        link: sum(one.transfer for one in found),
        "the latency of collectives": sum(one.latency for one in found),
    }
    return {
        "total": compute + exposed,
        "compute": compute,
        "exposed": exposed,  # seconds of collectives that no computation hides
        "limit": max(terms, key=terms.__getitem__),
        "collectives": [one._asdict() | {"seconds": one.seconds} for one in found if one.seconds],
    }


def after_backward(config: Config, network: Network) -> list[Collective]:
    """Return the collectives that nothing overlaps with: of Muon, and of scalars on CPUs."""
    machine = network.machine
    found: list[Collective] = []
    if config.optim.name == "muon":
        found.append(muon_exchange(config, network))
    if machine.gpu is None and machine.nodes > 1:
        calls = 2  # the host waits for the loss and the stop
        if machine.shards > 1:
            calls += 1  # for the norm
        if config.data.document_mask:
            calls += 1
        there_and_back = 2 * (machine.devices - 1) * machine.nodes / machine.devices
        latency = calls * there_and_back * network.latency
        found.append(
            Collective("all-reduce of scalars", calls, sent=0, transfer=0, latency=latency)
        )
    return found


def muon_exchange(config: Config, network: Network) -> Collective:
    """Return the collectives by which ranks exchange Muon's updates."""
    machine = network.machine
    matrices = hidden_matrices(config.model)
    width = 2 if machine.gpu else FLOAT
    size = width * config.model.n_layer * sum(matrices)
    if machine.shards == 1:
        return network.ring("updates of Muon", size, calls=len(matrices), passes=1)
    return network.ring(
        name="updates of Muon",
        size=size / machine.shards,
        calls=len(matrices),
        passes=2,  # there and back
        group="shards",
        rings=machine.devices // machine.nodes,
    )


def replicated_step(
    config: Config, vocab_size: int, network: Network, micro: float
) -> tuple[list[Collective], float]:
    """Return DDP's collectives, and their seconds that the last backward pass does not hide.

    `micro`: seconds that a micro-step computes. The last bucket has the embedding's gradient,
    which is ready at the end.
    """
    name = "all-reduce of gradients"
    size = FLOAT * parameter_counts(config.model, vocab_size)["total"]
    if config.train.reproducible:  # in float64 and in one piece, after the backward pass
        found = network.ring(name, 2 * size, calls=1, passes=2)
        return [found], found.seconds
    later = max(0, size - FIRST_BUCKET)
    found = network.ring(name, size, calls=1 + math.ceil(later / BUCKET), passes=2)
    last_bucket = min(later or size, max(table_bytes(config.model, vocab_size), BUCKET))
    last = network.ring(name, last_bucket, calls=1, passes=2)
    return [found], max(last.seconds, found.seconds - BACKWARD * micro)


def sharded_step(
    config: Config, vocab_size: int, network: Network, micro: float, micro_steps: int
) -> tuple[list[Collective], float]:
    """Return FSDP2's collectives, and their seconds that forward and backward do not hide.

    `micro`: seconds that a micro-step computes. Blocks are gathered twice a micro-step, each while
    the one before computes; the root, all other weights, once, before anything computes. Gradients
    are reduced in the last micro-step, or in each with `train.sync_each_batch`; the root's at its
    end.
    """
    machine = network.machine
    layers = config.model.n_layer
    counts = parameter_counts(config.model, vocab_size)
    total = counts["total"]
    inner = counts["attention"] + counts["mlp"]
    root = network.ring(
        name="all-gather of the root",
        size=micro_steps * machine.width * (total - inner),
        calls=micro_steps,
        passes=1,
        group="shards",
    )
    blocks = network.ring(
        name="all-gather of blocks",
        size=2 * micro_steps * machine.width * inner,
        calls=2 * micro_steps * layers,
        passes=1,
        group="shards",
    )
    times = micro_steps if config.train.sync_each_batch else 1
    reduced = [
        network.ring(
            name="reduce-scatter of gradients",
            size=times * FLOAT * total,
            calls=times * (layers + 1),
            passes=1 if machine.gpu else 2,  # in gloo it is an all-reduce
            group="shards",
        )
    ]
    if machine.replicas > 1:
        all_reduce = network.ring(
            name="all-reduce of shards",
            size=times * FLOAT * total / machine.shards,
            calls=times * (layers + 1),
            passes=2,
            group="replicas",
            rings=machine.devices // machine.nodes,
        )
        reduced.append(all_reduce)
    reducing = sum(collective.seconds for collective in reduced) / times
    gathering = blocks.seconds / (2 * micro_steps)
    end = (total - inner) / total * reducing
    exposed = root.seconds
    exposed += micro_steps * max(0.0, gathering - FORWARD * micro)
    exposed += (micro_steps - times) * max(0.0, gathering - BACKWARD * micro)
    exposed += times * (end + max(0.0, gathering + reducing - end - BACKWARD * micro))
    return [root, blocks, *reduced], exposed


def host_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """Return what all processes of a node hold in its memory.

    The model is there only until it is on the devices. Under FSDP a process builds its share, one
    whole parameter at a time, and copies its share in a save; else each builds the whole model,
    and only rank 0 copies it.
    """
    model = config.model
    processes = machine.devices // machine.nodes
    weights = FLOAT * parameter_counts(model, vocab_size)["total"] // machine.shards
    saved = checkpoint_bytes(config, vocab_size) // machine.shards
    if machine.shards > 1:
        embedding = padded_vocab_size(vocab_size) * model.n_embd
        weights += FLOAT * max(embedding, *hidden_matrices(model))
        saved *= processes
    parts = {
        "libraries": processes * LIBRARIES_CPU,
        "model at the start": processes * weights,
    }
    if config.checkpoint.async_save:
        parts["snapshot of async_save"] = saved
    return parts
