"""The memory of one device at its fullest moment of a training step, by plain arithmetic.

docs/explanation/cost.md derives the formulas and compares them with measurements. Without torch.

Letters: T block_size, C channels (n_embd), H query heads, D head size. All results are bytes.
"""

from dataclasses import dataclass, replace

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import STACK
from accel_gpt.cost.devices import peak_flops
from accel_gpt.cost.flops import (
    activates_twice,
    chunk_tokens,
    hidden_matrices,
    padded_vocab_size,
    parameter_counts,
)

FLOAT, DOUBLE = 4, 8  # bytes; weights, gradients and the optimizer's moments are float32
STACKS = 6  # copies of a stack of matrices that Muon holds at once; tests/test_memory.py
# measured, see docs/explanation/cost.md
LIBRARIES_CPU = 385_000_000  # Python, torch and what they import 290 MB; what the first step loads
GAPS_CPU = 0.2  # of what each micro-batch allocates: holes that the C library cannot fill
LIBRARIES_CUDA = 1_500_000_000  # context, workspaces of cuBLAS and NCCL, gaps: assumption
GATHERED_BLOCKS = 2  # that FSDP holds whole at once: the current and the next
LARGEST_MICRO_BATCH = 4096


@dataclass(frozen=True)
class Machine:
    """The devices that a run is planned for, one process each."""

    devices: int
    gpu: str | None  # a name that `cost/devices.py` knows; None: CPUs
    memory: float | None  # bytes of a device; None: not known
    sharded: bool  # FSDP
    precision: str  # no, bf16, fp16 or fp8
    precision_source: str
    nodes: int = 1
    replicas: int = 1  # HSDP: groups of devices, each of which holds all

    @property
    def shards(self) -> int:
        """Devices that share the weights, gradients and moments of one model."""
        return self.devices // self.replicas if self.sharded else 1

    @property
    def width(self) -> int:
        """Bytes of a number that matrix products read and write."""
        return FLOAT if self.precision == "no" else 2

    @property
    def stream_width(self) -> int:
        """Bytes of a number of the residual stream: autocast leaves it in float32."""
        return self.width if self.sharded else FLOAT

    def dtype(self, matmul_precision: str) -> str:
        """The type that matrix products compute in, a key of `Device.rates`."""
        if self.precision != "no":
            return self.precision
        return "tf32" if self.gpu and matmul_precision != "highest" else "fp32"

    def peak(self, matmul_precision: str) -> float | None:
        """FLOP/s of one device, where they are known."""
        return peak_flops(self.gpu, self.dtype(matmul_precision)) if self.gpu else None

    def __str__(self) -> str:
        """For example `8 x h100, ddp, bf16`, or `2 nodes of 8 x h100, hsdp, bf16`."""
        sharding = "ddp" if not self.sharded else "fsdp" if self.replicas == 1 else "hsdp"
        engine = [] if self.devices == 1 else [sharding]
        precision = "float32" if self.precision == "no" else self.precision
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        devices = f"{nodes}{self.devices // self.nodes} x {self.gpu or 'CPU process'}"
        return ", ".join([devices, *engine, precision])


@dataclass(frozen=True)
class Footprint:
    """What one device holds at its fullest moment."""

    moment: str
    parts: dict[str, int]  # bytes

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(self.parts.values())


def footprint(config: Config, vocab_size: int, machine: Machine) -> Footprint:
    """The memory of a step, whose sequences `train.micro_batch_size` must divide."""
    model, tokens = config.model, config.train.sequences * config.model.block_size
    micro_steps = config.train.tokens_per_step // (tokens * machine.devices)
    total = parameter_counts(model, vocab_size)["total"]
    standing = state_bytes(config, vocab_size, machine)
    gradients = gradient_bytes(config, total, machine, micro_steps)
    accumulated = gradients if micro_steps > 1 and not config.train.reproducible else {}
    if machine.gpu is None and config.checkpoint.async_save:
        snapshot = checkpoint_bytes(config, vocab_size) // machine.shards
        standing |= {"snapshot of async_save": snapshot}
    block = tokens * block_bytes(model, tokens, config.data.document_mask, machine)
    recompute = config.train.activation_checkpointing == "blocks"
    block_input = tokens * machine.stream_width * model.n_embd
    cast = 2 * total if machine.width < machine.stream_width else 0
    kept = {
        "activations": model.n_layer * (block_input if recompute else block) + 2 * block_input,
        "weights in half precision": cast,
    }
    table = FLOAT * padded_vocab_size(vocab_size) * model.n_embd  # of the embedding or the head
    backward = table + block_input + tokens * backward_bytes(model, tokens, machine)
    tables = 0 if machine.sharded else (2 if model.tie_embeddings else 0) + bool(accumulated)
    of_micro_batch = {
        "the loss's backward pass": (
            "logits and loss",
            logits_bytes(model, vocab_size, tokens, machine),
        ),
        "the backward pass of a block": ("work of a block", backward + block * recompute),
    }
    gaps = 0.0 if machine.gpu else GAPS_CPU
    moments = {
        "the update": standing | gradients | update_bytes(config, vocab_size),
        "the embedding's backward pass": standing
        | gradients
        | {"gradients of the embedding": tables * table},
    }
    for moment, (part, size) in of_micro_batch.items():
        unused = {"gaps between tensors": round(gaps * (size + sum(kept.values())))}
        moments[moment] = standing | accumulated | kept | {part: size} | unused
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {part: size for part, size in moments[moment].items() if size}
    return Footprint(moment, parts)


def state_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """What is held all the time."""
    counts, layers = parameter_counts(config.model, vocab_size), config.model.n_layer
    total, share = counts["total"], machine.shards
    ddp = machine.devices > 1 and not machine.sharded
    parts = {
        "libraries": LIBRARIES_CUDA if machine.gpu else LIBRARIES_CPU,
        "weights": FLOAT * total // share,
        "optimizer": optimizer_bytes(config, vocab_size) // share,
        "gradient buckets of ddp": FLOAT * total if ddp else 0,
        "exact gradients": DOUBLE * total if config.train.reproducible else 0,
    }
    if share > 1:
        block = (counts["attention"] + counts["mlp"]) // layers
        root = total - block * layers
        whole = root + GATHERED_BLOCKS * block + max(root, block)  # and the largest gradient
        parts["gathered by fsdp"] = machine.width * whole
    return parts


def gradient_bytes(
    config: Config, total: int, machine: Machine, micro_steps: int
) -> dict[str, int]:
    """Gradients besides DDP's buckets: before a reduction they lie beside them, then in them."""
    if machine.shards > 1:
        whole = FLOAT * total if micro_steps > 1 and not config.train.sync_each_batch else 0
        return {"gradients": FLOAT * total // machine.shards, "gradients not yet reduced": whole}
    in_buckets = machine.devices > 1 and micro_steps == 1 and not config.train.reproducible
    return {"gradients": 0 if in_buckets else FLOAT * total}


def update_bytes(config: Config, vocab_size: int) -> dict[str, int]:
    """What the update takes besides gradients: Muon's stacks, float64 copies of exact gradients."""
    model, parts = config.model, {}
    if config.optim.name == "muon":
        stacks = [min(model.n_layer, max(1, STACK // n)) * n for n in hidden_matrices(model)]
        parts["muon at work"] = STACKS * FLOAT * max(stacks)
    if config.train.reproducible:
        rows = max(padded_vocab_size(vocab_size), 2 * model.hidden_size)
        parts["exact gradients at work"] = 2 * DOUBLE * rows * model.n_embd
    return parts


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Weights and optimizer: a checkpoint, of which each rank writes its share under FSDP, and its
    copy in memory under `checkpoint.async_save`.
    """
    weights = FLOAT * parameter_counts(config.model, vocab_size)["total"]
    return weights + optimizer_bytes(config, vocab_size)


def optimizer_bytes(config: Config, vocab_size: int) -> int:
    """Two moments of AdamW a parameter, one where Muon updates it."""
    total = parameter_counts(config.model, vocab_size)["total"]
    layers = config.model.n_layer if config.optim.name == "muon" else 0
    return FLOAT * (2 * total - layers * sum(hidden_matrices(config.model)))


def block_bytes(model: ModelConfig, tokens: int, documents: bool, machine: Machine) -> int:
    """What autograd keeps of one block for each of `tokens` tokens.

    Two norms: input and output. Attention: queries, keys and values, twice where they are rotated
    or normalised, the result, and a float32 a head. MLP: the input of the activation function, and
    its output unless the backward pass computes it again. On a CPU, which has kernels for float32
    alone and none for dropout: float32 copies in bf16, and with dropout three T x T weights.
    """
    C, H, D, width = model.n_embd, model.n_head, model.head_size, machine.width
    qkv, cpu = (H + 2 * model.kv_heads) * D, machine.gpu is None
    transformed = model.qk_norm or model.position == "rope"
    norms = 2 * (machine.stream_width + width) * C
    if cpu and model.norm_weight and model.norm == "rmsnorm":  # scaled in a step of its own
        norms += 2 * machine.stream_width * C
    copies = FLOAT * (1 + model.qk_norm) if cpu and width < FLOAT else width * (1 + transformed)
    attention = copies * qkv + width * H * D + FLOAT * H
    if not cpu and model.qk_norm and width < FLOAT:  # normalised in float32
        attention += FLOAT * (H + model.kv_heads) * D
    if cpu and model.dropout:
        attention += 3 * FLOAT * H * model.block_size
    elif cpu and documents:
        attention += FLOAT * model.block_size
    values = model.hidden_size * (2 if model.mlp == "swiglu" else 1)
    mlp = width * values * (1 if activates_twice(tokens * values) else 2)
    dropout = 2 * (width if cpu else 1) * C if model.dropout else 0
    return norms + attention + mlp + dropout


def backward_bytes(model: ModelConfig, tokens: int, machine: Machine) -> int:
    """What the backward pass of a block takes besides, for each of `tokens` tokens."""
    qkv = (model.n_head + 2 * model.kv_heads) * model.head_size
    values = model.hidden_size * (2 if model.mlp == "swiglu" else 1)
    recomputed = values if activates_twice(tokens * values) else 0
    mlp = {"swiglu": 4, "relu2": 3}.get(model.mlp, 2) * model.hidden_size + recomputed
    weights = (
        2 * FLOAT * model.n_head * model.block_size if model.dropout and not machine.gpu else 0
    )
    return max(mlp * machine.width, 2 * qkv * machine.width + weights)


def logits_bytes(model: ModelConfig, vocab_size: int, tokens: int, machine: Machine) -> int:
    """The most that logits and loss take at once.

    In one piece: log-probabilities, their gradient and that of the logits, in float32; with
    `logit_softcap` the tanh besides, on a GPU in bf16 and fp16 once more. In chunks: the gradients
    of head and hidden states, and the chunk at work, or those gradients once more when they are
    scaled by that of the loss.
    """
    rows, capped = padded_vocab_size(vocab_size), model.logit_softcap is not None
    chunk = chunk_tokens(rows, machine.gpu is None)
    if tokens <= chunk:
        widened = capped and machine.width < FLOAT and machine.gpu is not None
        return (3 + capped + widened) * FLOAT * tokens * vocab_size
    kept = FLOAT * rows * model.n_embd
    kept += tokens * (machine.stream_width - machine.width) * model.n_embd
    half = machine.width if machine.width < FLOAT else 0  # the product before it is widened
    return kept + max(chunk * rows * ((2 + capped) * FLOAT + half), kept)


# --------------------------------------------------------------------------- what fits


def fitting_sizes(config: Config, devices: int) -> list[int]:
    """Values of train.micro_batch_size that divide the step, largest first."""
    sequences, rest = divmod(config.train.tokens_per_step, config.model.block_size * devices)
    if rest:
        return []
    largest = min(sequences, LARGEST_MICRO_BATCH)
    return [size for size in range(largest, 0, -1) if sequences % size == 0]


def with_size(config: Config, size: int) -> Config:
    """`config` with another train.micro_batch_size."""
    return replace(config, train=replace(config.train, micro_batch_size=size))


def largest_size(config: Config, vocab_size: int, machine: Machine) -> int | None:
    """The largest train.micro_batch_size that fits; None where not even 1 does."""
    for size in fitting_sizes(config, machine.devices):
        needed = footprint(with_size(config, size), vocab_size, machine).total
        if machine.memory and needed <= machine.memory:
            return size
    return None
