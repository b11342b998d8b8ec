"""Past one device: the collectives of a step, what they cost, and the host memory of a node.

docs/explanation/cost.md derives the formulas and compares them with measurements. Without torch.
All sizes are bytes, all times seconds.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import accumulation
from accel_gpt.cost.devices import DEVICES, device_key
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.memory import FLOAT, LIBRARIES_CPU, Machine, checkpoint_bytes

# of a data sheet's rate; NVIDIA/nccl-tests issue 212: 370 of 450 GB/s, the rest is protocol
LINK_SHARE = 0.8
# NCCL's src/graph/tuning.cc, `hwLatencies`, ring, protocol Simple
LINK_LATENCY, NODE_LATENCY = 3.4e-6, 14e-6
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # DistributedDataParallel's defaults
FORWARD, BACKWARD = 1 / 3, 2 / 3  # of the time that a micro-step computes


class Collective(NamedTuple):
    """The collectives of one kind in a step."""

    name: str
    calls: float
    sent: float  # by each device
    transfer: float
    latency: float

    @property
    def seconds(self) -> float:
        """The time of all of them, were nothing else going on."""
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
        return LINK_SHARE * DEVICES[key].link if key else math.inf

    def ring(
        self, name: str, size: float, calls: int, passes: int, group: str = "all", rings: int = 1
    ) -> Collective:
        """`calls` collectives over `size` bytes in all, in a ring through a group of devices.

        All-gathers and reduce-scatters pass the ring once, all-reduces twice. Where each device of
        a node has a ring of its own, so many `rings` share the network.
        """
        machine = self.machine
        ranks, nodes = {
            "all": (machine.devices, machine.nodes),
            "shards": (machine.shards, max(1, machine.nodes // machine.replicas)),
            "replicas": (machine.replicas, min(machine.nodes, machine.replicas)),
        }[group]
        hops, crossing = passes * (ranks - 1), nodes / ranks if nodes > 1 else 0.0
        hop = crossing * self.latency + (1 - crossing) * LINK_LATENCY
        if machine.gpu is None:  # gloo: each hop a round trip, and as slow as the slowest one
            hop = 2 * self.latency if nodes > 1 else 0.0
        between = (self.bandwidth or math.inf) / rings if nodes > 1 else math.inf
        sent = hops / ranks * size
        return Collective(name, calls, sent, sent / min(self.link, between), calls * hops * hop)


def step_time(config: Config, vocab_size: int, network: Network, compute: float) -> dict[str, Any]:
    """Where the time of a step goes that computes for `compute` seconds, and what takes longest.

    Of collectives between nodes nothing is known without the bandwidth of their network.
    """
    machine = network.machine
    if machine.nodes > 1 and not network.bandwidth:
        return {"total": compute, "compute": compute, "exposed": None}
    micro_steps = accumulation(config, machine.devices)
    engine = sharded_step if machine.shards > 1 else replicated_step
    hidden, exposed = engine(config, vocab_size, network, compute / micro_steps, micro_steps)
    after = after_backward(config, network)
    found = [*hidden, *after]
    slow = machine.nodes > 1 and (network.bandwidth or math.inf) < network.link
    link = f"the bandwidth {'between nodes' if slow else 'within a node'}"
    terms = {"compute": compute, link: sum(one.transfer for one in found)}
    terms["the latency of collectives"] = sum(one.latency for one in found)
    exposed += sum(one.seconds for one in after)
    return {
        "total": compute + exposed,
        "compute": compute,
        "exposed": exposed,  # seconds of collectives that no computation hides
        "limit": max(terms, key=lambda term: terms[term]),
        "collectives": [one._asdict() | {"seconds": one.seconds} for one in found if one.seconds],
    }


def after_backward(config: Config, network: Network) -> list[Collective]:
    """Collectives that nothing overlaps with: those of Muon, and of scalars on CPUs."""
    machine, matrices, found = network.machine, hidden_matrices(config.model), []
    if config.optim.name == "muon":
        size = (2 if machine.gpu else FLOAT) * config.model.n_layer * sum(matrices)
        ways, group = (2, "shards") if machine.shards > 1 else (1, "all")  # FSDP: there and back
        rings = machine.devices // machine.nodes if machine.shards > 1 else 1
        words = ("updates of Muon", size / machine.shards, len(matrices), ways, group, rings)
        found += [network.ring(*words)]
    if machine.gpu is None and machine.nodes > 1:  # the host waits: the loss, the stop, the norm
        calls = 2 + (machine.shards > 1) + config.data.document_mask
        there = 2 * (machine.devices - 1) * machine.nodes / machine.devices  # and back
        latency = calls * there * network.latency
        found += [Collective("all-reduce of scalars", calls, 0, 0, latency)]
    return found


def replicated_step(
    config: Config, vocab_size: int, network: Network, micro: float, micro_steps: int
) -> tuple[list[Collective], float]:
    """DDP's collectives, and the seconds of them that the last backward pass does not hide.

    The last bucket has the embedding's gradient, which is ready at the end.
    """
    name, exact = "all-reduce of gradients", config.train.reproducible
    size = (1 + exact) * FLOAT * parameter_counts(config.model, vocab_size)["total"]
    if exact:  # in one piece, after the backward pass
        found = network.ring(name, size, 1, 2)
        return [found], found.seconds
    later = max(0, size - FIRST_BUCKET)
    found = network.ring(name, size, 1 + math.ceil(later / BUCKET), 2)
    table = FLOAT * padded_vocab_size(vocab_size) * config.model.n_embd
    last = network.ring(name, min(later or size, max(table, BUCKET)), 1, 2)
    return [found], max(last.seconds, found.seconds - BACKWARD * micro)


def sharded_step(
    config: Config, vocab_size: int, network: Network, micro: float, micro_steps: int
) -> tuple[list[Collective], float]:
    """FSDP2's collectives, and the seconds of them that forward and backward passes do not hide.

    Blocks are gathered twice a micro-step, each while the one before computes; the root, which is
    the rest, once, before anything computes. Gradients are reduced in the last micro-step, or in
    each with `train.sync_each_batch`, those of the root at its end.
    """
    machine, layers = network.machine, config.model.n_layer
    counts = parameter_counts(config.model, vocab_size)
    total, inner = counts["total"], counts["attention"] + counts["mlp"]

    def gather(name: str, size: int, calls: int, times: int) -> Collective:
        return network.ring(name, times * machine.width * size, times * calls, 1, "shards")

    root = gather("all-gather of the root", total - inner, 1, micro_steps)
    blocks = gather("all-gather of blocks", inner, layers, 2 * micro_steps)
    passes = 1 if machine.gpu else 2  # in gloo it is an all-reduce
    times = micro_steps if config.train.sync_each_batch else 1
    calls, size = times * (layers + 1), times * FLOAT * total
    reduced = [network.ring("reduce-scatter of gradients", size, calls, passes, "shards")]
    if machine.replicas > 1:
        share, rings = size / machine.shards, machine.devices // machine.nodes
        reduced += [network.ring("all-reduce of shards", share, calls, 2, "replicas", rings)]
    reducing = sum(collective.seconds for collective in reduced) / times
    gathering = blocks.seconds / (2 * micro_steps)
    end = (total - inner) / total * reducing
    exposed = root.seconds + micro_steps * max(0.0, gathering - FORWARD * micro)
    exposed += (micro_steps - times) * max(0.0, gathering - BACKWARD * micro)
    exposed += times * (end + max(0.0, gathering + reducing - end - BACKWARD * micro))
    return [root, blocks, *reduced], exposed


def host_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """What all processes of a node hold in its memory; the model only until it is on the devices.

    Under FSDP a process builds its share, one whole parameter at a time, and copies its share in a
    save; else each builds the whole model, and rank 0 alone copies it.
    """
    model, processes = config.model, machine.devices // machine.nodes
    weights = FLOAT * parameter_counts(model, vocab_size)["total"] // machine.shards
    saved = checkpoint_bytes(config, vocab_size) // machine.shards
    if machine.shards > 1:
        embedding = padded_vocab_size(vocab_size) * model.n_embd
        weights += FLOAT * max(embedding, *hidden_matrices(model))
        saved *= processes
    parts = {"libraries": processes * LIBRARIES_CPU, "model at the start": processes * weights}
    return parts | ({"snapshot of async_save": saved} if config.checkpoint.async_save else {})
