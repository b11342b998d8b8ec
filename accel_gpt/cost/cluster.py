"""Past one device: the collectives of a step, what they cost, and the host memory of a node.

docs/cost.md derives the formulas and compares them with measurements. Without torch. All sizes are
bytes, all times seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel_gpt.config.experiment import Config
from accel_gpt.cost.devices import DEVICES, device_key
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.memory import FLOAT, LIBRARIES_CPU, Machine, checkpoint_bytes

# of a data sheet's rate; NVIDIA/nccl-tests issue 212: 370 of 450 GB/s, the rest is protocol
LINK_SHARE = 0.8
# NCCL's src/graph/tuning.cc, `hwLatencies`, ring, protocol Simple
LINK_LATENCY, NODE_LATENCY = 3.4e-6, 14e-6
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # DistributedDataParallel's defaults
FORWARD, BACKWARD = 1 / 3, 2 / 3  # of the time that a micro-step computes


@dataclass(frozen=True)
class Collective:
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

    def times(self, count: int) -> "Collective":
        """The same `count` times."""
        numbers = (self.calls, self.sent, self.transfer, self.latency)
        return Collective(self.name, *(count * number for number in numbers))


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

    @property
    def known(self) -> bool:
        """Whether the time of collectives can be predicted."""
        machine = self.machine
        return machine.devices == 1 or bool(self.bandwidth if machine.nodes > 1 else machine.gpu)

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


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step."""

    compute: float
    collectives: Sequence[Collective]
    exposed: float  # of the collectives: not hidden behind computation
    slowest: str  # links

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exposed

    @property
    def limit(self) -> str:
        """What takes longest."""
        terms = {
            "compute": self.compute,
            f"the bandwidth {self.slowest}": sum(c.transfer for c in self.collectives),
            "the latency of collectives": sum(c.latency for c in self.collectives),
        }
        return max(terms, key=lambda term: terms[term])


def step_time(config: Config, vocab_size: int, network: Network, compute: float) -> StepTime:
    """A step that computes for `compute` seconds, with the collectives of its engine."""
    machine, train, model = network.machine, config.train, config.model
    micro_steps = train.tokens_per_step // (train.sequences * model.block_size * machine.devices)
    engine = sharded_step if machine.shards > 1 else replicated_step
    hidden, exposed = engine(config, vocab_size, network, compute / micro_steps, micro_steps)
    after = []  # the backward pass
    if config.optim.name == "muon":
        matrices = hidden_matrices(model)
        size, kinds = (2 if machine.gpu else FLOAT) * model.n_layer * sum(matrices), len(matrices)
        if machine.shards > 1:  # shards, to the rank that orthogonalizes and back
            words = ("all-to-all of Muon", size / machine.shards, kinds, 2, "shards")
            after += [network.ring(*words, rings=machine.devices // machine.nodes)]
        else:
            after += [network.ring("all-gather of Muon", size, kinds, 1)]
    if machine.gpu is None:  # the host is the device, and waits: the loss, the stop, the norm
        calls = 2 + (machine.shards > 1) + config.data.document_mask
        there = 2 * (machine.devices - 1) * machine.nodes / machine.devices  # and back
        latency = calls * there * network.latency if machine.nodes > 1 else 0.0
        after += [Collective("all-reduce of scalars", calls, 0, 0, latency)]
    exposed += sum(collective.seconds for collective in after)
    between = machine.nodes > 1 and (network.bandwidth or math.inf) < network.link
    slowest = "between nodes" if between else "within a node"
    return StepTime(compute, [*hidden, *after], exposed, slowest)


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
    the rest, once, before anything computes. Gradients are reduced in the last micro-step, those of
    the root at its end.
    """
    machine, layers = network.machine, config.model.n_layer
    counts = parameter_counts(config.model, vocab_size)
    total, inner = counts["total"], counts["attention"] + counts["mlp"]
    root, blocks = (
        network.ring(name, machine.width * size, units, 1, "shards")
        for name, size, units in (
            ("all-gather of the root", total - inner, 1),
            ("all-gather of blocks", inner, layers),
        )
    )
    passes = 1 if machine.gpu else 2  # in gloo it is an all-reduce
    words = ("reduce-scatter of gradients", FLOAT * total, layers + 1, passes, "shards")
    reduced = network.ring(*words)
    found = [root.times(micro_steps), blocks.times(2 * micro_steps), reduced]
    if machine.replicas > 1:
        share = FLOAT * total / machine.shards
        rings = machine.devices // machine.nodes
        found += [network.ring("all-reduce of shards", share, layers + 1, 2, "replicas", rings)]
    reducing, end = sum(c.seconds for c in found[2:]), (total - inner) / total
    exposed = micro_steps * (root.seconds + max(0.0, blocks.seconds - FORWARD * micro))
    exposed += (micro_steps - 1) * max(0.0, blocks.seconds - BACKWARD * micro)
    rest = blocks.seconds + (1 - end) * reducing
    return found, exposed + end * reducing + max(0.0, rest - BACKWARD * micro)


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
