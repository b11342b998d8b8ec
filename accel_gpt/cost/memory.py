"""Memory of one device at the fullest moment of a step, by part; docs/cost.md has the derivation.

The parts of a moment add up to what is held then; the fullest moment is what must fit.
"""

from dataclasses import dataclass

from accel_gpt.config.experiment import Config
from accel_gpt.config.optim import STACK
from accel_gpt.cost import activations as model_memory
from accel_gpt.cost.activations import DOUBLE, FLOAT
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.machine import Machine

ADAM, MUON = 2, 1  # values a parameter, in float32
STACKS = 6  # that Muon holds at once, as tests/test_memory.py counts
# measured, as docs/cost.md tells; without them what grows is the rest
IMPORTED_CPU = 290_000_000  # Python, torch and what they import
KERNELS_CPU = 95_000_000  # what the first step loads
GAPS_CPU = 0.2  # of what each micro-batch allocates anew: holes that the C library cannot fill
LIBRARIES_CUDA = 1_500_000_000  # context, workspaces of cuBLAS and NCCL, gaps: assumption
GATHERED = 2  # blocks that FSDP holds whole at once: the one at work and the next


@dataclass(frozen=True)
class Footprint:
    """What one device holds at the fullest moment, and what the host holds besides."""

    moment: str
    parts: dict[str, int]  # bytes
    host: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(self.parts.values())


def footprint(config: Config, vocab_size: int, machine: Machine, accumulation: int) -> Footprint:
    """Memory of a step of `accumulation` micro-steps."""
    standing = state(config, vocab_size, machine)
    size = gradients(config, vocab_size, machine, accumulation)
    # those of the first micro-steps stay until the last
    early = size if accumulation > 1 and not config.train.reproducible else {}
    snapshot = snapshot_bytes(config, vocab_size)
    if machine.gpu is None and snapshot:
        standing["snapshot of async_save"] = snapshot
    model, sequences = config.model, config.train.sequences
    numerics, documents = machine.numerics, config.data.document_mask
    recomputed = config.train.activation_checkpointing == "blocks"
    kept = {
        "activations": model_memory.activation_bytes(
            model, sequences, numerics, documents, recomputed
        ),
        "weights in half precision": model_memory.cast_bytes(model, vocab_size, numerics),
    }
    logits = model_memory.logits_bytes(model, vocab_size, sequences, numerics)
    work = model_memory.backward_bytes(model, sequences, numerics)
    table = FLOAT * padded_vocab_size(vocab_size) * model.n_embd
    work += table  # the head's gradient is there
    if recomputed:
        work += model_memory.block_bytes(model, sequences, numerics, documents)
    held = standing | early
    moments = {
        "the loss's backward pass": held | gaps(kept | {"logits and loss": logits}, machine),
        "the backward pass of a block": held | gaps(kept | {"work of a block": work}, machine),
        "the update": standing | size | exact_work(config, vocab_size) | muon_work(config),
        "the embedding's backward pass": standing
        | size
        | {"gradients of the embedding": table * tables_besides(config, machine, bool(early))},
    }
    name, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    host = {"snapshot of async_save": snapshot} if machine.gpu and snapshot else {}
    return Footprint(name, {part: size for part, size in parts.items() if size}, host)


def tables_besides(config: Config, machine: Machine, early: bool) -> int:
    """Gradients of embedding and head that lie beside all others when the backward pass ends.

    The embedding's, until it is added to an earlier micro-step's. Of a tied table also the head's,
    and in float32 the sum of both: autograd adds in place what a cast has copied, no view.
    """
    if machine.sharded:  # counted as gathered
        return 0
    tied = (1 if machine.numerics.half else 2) if config.model.tie_embeddings else 0
    return tied + early


def gaps(parts: dict[str, int], machine: Machine) -> dict[str, int]:
    """`parts` and what lies unused between them, on a CPU."""
    unused = 0 if machine.gpu else round(GAPS_CPU * sum(parts.values()))
    return parts | {"gaps between tensors": unused}


def state(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """What is held all the time."""
    counts = parameter_counts(config.model, vocab_size)
    total, reproducible = counts["total"], config.train.reproducible
    share = machine.devices if machine.sharded else 1
    grouped = machine.devices > 1 and not machine.sharded
    parts = {
        "libraries": LIBRARIES_CUDA if machine.gpu else IMPORTED_CPU + KERNELS_CPU,
        "weights": FLOAT * total // share,
        "optimizer": optimizer_bytes(config, vocab_size) // share,
        "gradient buckets of ddp": FLOAT * total if grouped else 0,
        "exact gradients": DOUBLE * total if reproducible else 0,
    }
    if machine.sharded and share > 1:
        block = sum(counts[part] for part in ("attention", "mlp")) // config.model.n_layer
        root = total - block * config.model.n_layer
        whole = root + GATHERED * block + max(root, block)  # and the gradient of the largest
        parts["gathered by fsdp"] = machine.numerics.narrow * whole
    return parts


def gradients(
    config: Config, vocab_size: int, machine: Machine, accumulation: int
) -> dict[str, int]:
    """Gradients besides DDP's buckets: before a reduction they lie beside them, then in them."""
    total = parameter_counts(config.model, vocab_size)["total"]
    if machine.sharded and machine.devices > 1:
        whole = machine.numerics.narrow * total if accumulation > 1 else 0
        return {"gradients": FLOAT * total // machine.devices, "gradients not yet reduced": whole}
    in_buckets = machine.devices > 1 and accumulation == 1 and not config.train.reproducible
    return {"gradients": 0 if in_buckets else FLOAT * total}


def exact_work(config: Config, vocab_size: int) -> dict[str, int]:
    """Copies in float64 of the largest gradient while it is added."""
    if not config.train.reproducible:
        return {}
    C, model = config.model.n_embd, config.model
    largest = max(padded_vocab_size(vocab_size) * C, 2 * model.hidden_size * C)
    return {"exact gradients at work": 2 * DOUBLE * largest}


def snapshot_bytes(config: Config, vocab_size: int) -> int:
    """Weights and optimizer, copied by `checkpoint.async_save`."""
    return checkpoint_bytes(config, vocab_size) if config.checkpoint.async_save else 0


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Weights and optimizer: what a checkpoint holds, too."""
    weights = FLOAT * parameter_counts(config.model, vocab_size)["total"]
    return weights + optimizer_bytes(config, vocab_size)


def optimizer_bytes(config: Config, vocab_size: int) -> int:
    """Two moments of AdamW, or one of Muon where the parameter is its."""
    total = parameter_counts(config.model, vocab_size)["total"]
    blocks = config.model.n_layer if config.optim.name == "muon" else 0
    of_muon = blocks * sum(hidden_matrices(config.model))
    return FLOAT * (ADAM * (total - of_muon) + MUON * of_muon)


def muon_work(config: Config) -> dict[str, int]:
    """Copies of the weights that Muon updates at once."""
    if config.optim.name != "muon":
        return {}
    blocks = config.model.n_layer
    stacks = [min(blocks, max(1, STACK // n)) * n for n in hidden_matrices(config.model)]
    return {"muon at work": STACKS * FLOAT * max(stacks)}
