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

FLOAT_BYTES = 4  # weights, gradients and the optimizer's moments are float32
DOUBLE_BYTES = 8  # of a float64
STACKS = 6  # copies of a stack of matrices that Muon holds at once; tests/cost/test_memory.py
# measured, see docs/explanation/cost.md
LIBRARIES_CPU_BYTES = (
    385_000_000  # Python, torch and what they import 290 MB; what the first step loads
)
GAP_SHARE_CPU = 0.2  # of what each micro-batch allocates: holes that the C library cannot fill
LIBRARIES_CUDA_BYTES = 1_500_000_000  # context, workspaces of cuBLAS and NCCL, gaps: assumption
GATHERED_BLOCKS = 2  # that FSDP holds whole at once: the current and the next
LARGEST_MICRO_BATCH = 4096


@dataclass(frozen=True)
class Machine:
    """The devices that a run is planned for, one process each."""

    devices: int
    gpu: str | None  # a name that `cost/devices.py` knows; None: CPUs
    memory_bytes: float | None  # of a device; None: not known
    sharded: bool  # FSDP
    precision: str  # no, bf16, fp16 or fp8
    precision_source: str
    nodes: int = 1
    replicas: int = 1  # HSDP: groups of devices, each of which holds all

    @property
    def shards(self) -> int:
        """Return the devices that share the weights, gradients and moments of one model."""
        return self.devices // self.replicas if self.sharded else 1

    @property
    def product_bytes(self) -> int:
        """Return the bytes of a number that matrix products read and write."""
        return FLOAT_BYTES if self.precision == "no" else 2

    @property
    def stream_bytes(self) -> int:
        """Return the bytes of a number of the residual stream. Autocast leaves it in float32."""
        return self.product_bytes if self.sharded else FLOAT_BYTES

    def dtype(self, matmul_precision: str) -> str:
        """Return the type that matrix products compute in, a key of `Device.rates`."""
        if self.precision != "no":
            return self.precision
        return "tf32" if self.gpu and matmul_precision != "highest" else "fp32"

    def peak(self, matmul_precision: str) -> float | None:
        """Return the FLOP/s of one device; None if they are not known."""
        if self.gpu is None:
            return None
        return peak_flops(self.gpu, self.dtype(matmul_precision))

    def __str__(self) -> str:
        """Describe the machine: `8 x h100, ddp, bf16`, or `2 nodes of 8 x h100, hsdp, bf16`."""
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        words = [f"{nodes}{self.devices // self.nodes} x {self.gpu or 'CPU process'}"]
        if self.devices > 1 and not self.sharded:
            words.append("ddp")
        elif self.devices > 1:
            words.append("fsdp" if self.replicas == 1 else "hsdp")
        words.append("float32" if self.precision == "no" else self.precision)
        return ", ".join(words)


@dataclass(frozen=True)
class Footprint:
    """What one device holds at its fullest moment."""

    moment: str
    parts: dict[str, int]  # bytes

    @property
    def total(self) -> int:
        """Return the bytes of one device."""
        return sum(self.parts.values())


def footprint(config: Config, vocab_size: int, machine: Machine) -> Footprint:
    """Return the memory of a step; `train.micro_batch_size` must divide its sequences."""
    model = config.model
    tokens = config.train.micro_batch_sequences * model.block_size
    micro_steps = config.train.tokens_per_step // (tokens * machine.devices)
    standing = state_bytes(config, vocab_size, machine)
    gradients = gradient_bytes(config, vocab_size, machine, micro_steps)
    accumulated: dict[str, int] = {}
    if micro_steps > 1 and not config.train.reproducible:
        accumulated = gradients
    activations = activation_bytes(config, vocab_size, tokens, machine)
    loss = logits_bytes(model, vocab_size, tokens, machine)
    block = block_backward_bytes(config, vocab_size, tokens, machine)
    tables = 0  # gradients of the embedding: of the look-up, and of the head if it is tied
    if not machine.sharded and model.tie_embeddings:
        tables += 2
    if not machine.sharded and accumulated:
        tables += 1
    before_gradients = standing | accumulated | activations
    moments = {
        "the update": standing | gradients | update_bytes(config, vocab_size),
        "the embedding's backward pass": {
            **standing,
            **gradients,
            "gradients of the embedding": tables * table_bytes(model, vocab_size),
        },
        "the loss's backward pass": {
            **before_gradients,
            "logits and loss": loss,
            "gaps between tensors": gap_bytes(loss, activations, machine),
        },
        "the backward pass of a block": {
            **before_gradients,
            "work of a block": block,
            "gaps between tensors": gap_bytes(block, activations, machine),
        },
    }
    fullest = Footprint("", {})
    for moment, parts in moments.items():
        held = Footprint(moment, {part: size for part, size in parts.items() if size})
        if held.total > fullest.total:
            fullest = held
    return fullest


def state_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """Return what is held all the time."""
    counts = parameter_counts(config.model, vocab_size)
    total = counts["total"]
    layers = config.model.n_layer
    ddp = machine.devices > 1 and not machine.sharded
    parts = {
        "libraries": LIBRARIES_CUDA_BYTES if machine.gpu else LIBRARIES_CPU_BYTES,
        "weights": FLOAT_BYTES * total // machine.shards,
        "optimizer": optimizer_bytes(config, vocab_size) // machine.shards,
        "gradient buckets of ddp": FLOAT_BYTES * total if ddp else 0,
        "exact gradients": DOUBLE_BYTES * total if config.train.reproducible else 0,
    }
    if machine.shards > 1:
        block = (counts["attention"] + counts["mlp"]) // layers
        root = total - block * layers
        whole = root + GATHERED_BLOCKS * block + max(root, block)  # and the largest gradient
        parts["gathered by fsdp"] = machine.product_bytes * whole
    if machine.gpu is None and config.checkpoint.async_save:
        snapshot = checkpoint_bytes(config, vocab_size) // machine.shards
        parts["snapshot of async_save"] = snapshot
    return parts


def gradient_bytes(
    config: Config, vocab_size: int, machine: Machine, micro_steps: int
) -> dict[str, int]:
    """Return the gradients besides DDP's buckets.

    Before a reduction they lie beside the buckets, then in them.
    """
    size = FLOAT_BYTES * parameter_counts(config.model, vocab_size)["total"]
    if machine.shards > 1:
        whole = size if micro_steps > 1 and not config.train.sync_each_batch else 0
        return {"gradients": size // machine.shards, "gradients not yet reduced": whole}
    in_buckets = machine.devices > 1 and micro_steps == 1 and not config.train.reproducible
    return {"gradients": 0 if in_buckets else size}


def activation_bytes(
    config: Config, vocab_size: int, tokens: int, machine: Machine
) -> dict[str, int]:
    """Return what the forward pass of a micro-batch of `tokens` tokens keeps for the backward."""
    model = config.model
    inputs = input_bytes(model, tokens, machine)
    if config.train.activation_checkpointing == "blocks":
        kept_of_block = inputs
    else:
        per_token = block_bytes(model, tokens, config.data.document_mask, machine)
        kept_of_block = tokens * per_token
    cast = 0
    if machine.product_bytes < machine.stream_bytes:
        cast = 2 * parameter_counts(model, vocab_size)["total"]
    return {
        "activations": model.n_layer * kept_of_block + 2 * inputs,
        "weights in half precision": cast,
    }


def block_backward_bytes(config: Config, vocab_size: int, tokens: int, machine: Machine) -> int:
    """Return what the backward pass of a block takes besides activations and gradients."""
    model = config.model
    per_token = backward_bytes(model, tokens, machine)
    if config.train.activation_checkpointing == "blocks":
        per_token += block_bytes(model, tokens, config.data.document_mask, machine)
    fixed = table_bytes(model, vocab_size) + input_bytes(model, tokens, machine)
    return fixed + tokens * per_token


def input_bytes(model: ModelConfig, tokens: int, machine: Machine) -> int:
    """Return the input of a block for `tokens` tokens."""
    return tokens * machine.stream_bytes * model.n_embd


def table_bytes(model: ModelConfig, vocab_size: int) -> int:
    """Return the gradient of the embedding, or of the head."""
    return FLOAT_BYTES * padded_vocab_size(vocab_size) * model.n_embd


def gap_bytes(size: int, activations: dict[str, int], machine: Machine) -> int:
    """Return the holes between the tensors of a micro-batch, see `GAP_SHARE_CPU`."""
    if machine.gpu:
        return 0
    return round(GAP_SHARE_CPU * (size + sum(activations.values())))


def update_bytes(config: Config, vocab_size: int) -> dict[str, int]:
    """Return what the update takes besides gradients.

    That is Muon's stacks of matrices, and the float64 copies of exact gradients.
    """
    model = config.model
    parts: dict[str, int] = {}
    if config.optim.name == "muon":
        largest = 0
        for size in hidden_matrices(model):
            stacked = min(model.n_layer, max(1, STACK // size))
            largest = max(largest, stacked * size)
        parts["muon at work"] = STACKS * FLOAT_BYTES * largest
    if config.train.reproducible:
        rows = max(padded_vocab_size(vocab_size), 2 * model.hidden_size)
        parts["exact gradients at work"] = 2 * DOUBLE_BYTES * rows * model.n_embd
    return parts


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Return the size of a checkpoint: weights and optimizer.

    Under FSDP each rank writes its share. With `checkpoint.async_save` a copy is held in memory.
    """
    weights = FLOAT_BYTES * parameter_counts(config.model, vocab_size)["total"]
    return weights + optimizer_bytes(config, vocab_size)


def optimizer_bytes(config: Config, vocab_size: int) -> int:
    """Return the moments: two for a parameter that AdamW updates, one for Muon's."""
    moments = 2 * parameter_counts(config.model, vocab_size)["total"]
    if config.optim.name == "muon":
        moments -= config.model.n_layer * sum(hidden_matrices(config.model))
    return FLOAT_BYTES * moments


def block_bytes(model: ModelConfig, tokens: int, documents: bool, machine: Machine) -> int:
    """Return what autograd keeps of one block for each of `tokens` tokens.

    Two norms: input and output. Attention: queries, keys and values, twice if they are rotated or
    normalised, the result, and a float32 a head. MLP: the input of the activation function, and
    its output unless the backward pass computes it again. A CPU has kernels for float32 only and
    none for dropout: in bf16 it keeps float32 copies, and with dropout three T x T weights.
    """
    C = model.n_embd
    H = model.n_head
    D = model.head_size
    number_bytes = machine.product_bytes
    cpu = machine.gpu is None
    norms = 2 * (machine.stream_bytes + number_bytes) * C
    if cpu and model.norm_weight and model.norm == "rmsnorm":  # scaled in a step of its own
        norms += 2 * machine.stream_bytes * C
    if cpu and number_bytes < FLOAT_BYTES:
        copies = 2 if model.qk_norm else 1
        kept_bytes = FLOAT_BYTES
    else:
        copies = 2 if model.qk_norm or model.position == "rope" else 1
        kept_bytes = number_bytes
    qkv = (H + 2 * model.kv_heads) * D
    attention = copies * kept_bytes * qkv + number_bytes * H * D + FLOAT_BYTES * H
    if not cpu and model.qk_norm and number_bytes < FLOAT_BYTES:  # normalised in float32
        attention += FLOAT_BYTES * (H + model.kv_heads) * D
    if cpu and model.dropout:
        attention += 3 * FLOAT_BYTES * H * model.block_size
    elif cpu and documents:
        attention += FLOAT_BYTES * model.block_size
    values = mlp_values(model)
    mlp = number_bytes * values
    if not activates_twice(tokens * values):
        mlp += number_bytes * values
    dropout = 0
    if model.dropout:
        mask_bytes = number_bytes if cpu else 1
        dropout = 2 * mask_bytes * C
    return norms + attention + mlp + dropout


def mlp_values(model: ModelConfig) -> int:
    """Return the inputs of the activation function for each token, gates included."""
    return model.hidden_size * (2 if model.mlp == "swiglu" else 1)


def backward_bytes(model: ModelConfig, tokens: int, machine: Machine) -> int:
    """Return what the backward pass of a block takes besides, for each of `tokens` tokens."""
    values = mlp_values(model)
    copies = {"swiglu": 4, "relu2": 3}.get(model.mlp, 2)  # of the hidden values
    mlp = copies * model.hidden_size
    if activates_twice(tokens * values):
        mlp += values
    qkv = (model.n_head + 2 * model.kv_heads) * model.head_size
    attention_bytes = 2 * machine.product_bytes * qkv
    if model.dropout and not machine.gpu:
        attention_bytes += 2 * FLOAT_BYTES * model.n_head * model.block_size
    return max(machine.product_bytes * mlp, attention_bytes)


def logits_bytes(model: ModelConfig, vocab_size: int, tokens: int, machine: Machine) -> int:
    """Return the most that logits and loss take at once.

    In one piece: log-probabilities, their gradient and the gradient of the logits, in float32; with
    `logit_softcap` the tanh besides, on a GPU in bf16 and fp16 once more. In chunks: the gradients
    of head and hidden states, and the chunk at work, or these gradients once more when they are
    scaled by the gradient of the loss.
    """
    rows = padded_vocab_size(vocab_size)
    capped = model.logit_softcap is not None
    chunk = chunk_tokens(rows, cpu=machine.gpu is None)
    if tokens <= chunk:
        copies = 3
        if capped:
            copies += 1
        if capped and machine.product_bytes < FLOAT_BYTES and machine.gpu is not None:
            copies += 1
        return copies * FLOAT_BYTES * tokens * vocab_size
    head_bytes = FLOAT_BYTES * rows * model.n_embd
    widened_bytes = machine.stream_bytes - machine.product_bytes  # of a hidden state
    gradients = head_bytes + tokens * widened_bytes * model.n_embd
    logit_bytes = (3 if capped else 2) * FLOAT_BYTES
    if machine.product_bytes < FLOAT_BYTES:  # the product before it is widened
        logit_bytes += machine.product_bytes
    return gradients + max(chunk * rows * logit_bytes, gradients)


# --------------------------------------------------------------------------- what fits


def fitting_sizes(config: Config, devices: int) -> list[int]:
    """Return the values of train.micro_batch_size that divide the step, largest first."""
    sequences, rest = divmod(config.train.tokens_per_step, config.model.block_size * devices)
    if rest:
        return []
    largest = min(sequences, LARGEST_MICRO_BATCH)
    return [size for size in range(largest, 0, -1) if sequences % size == 0]


def with_size(config: Config, size: int) -> Config:
    """Return `config` with another train.micro_batch_size."""
    return replace(config, train=replace(config.train, micro_batch_size=size))


def largest_size(config: Config, vocab_size: int, machine: Machine) -> int | None:
    """Return the largest train.micro_batch_size that fits; None if not even 1 does."""
    for size in fitting_sizes(config, machine.devices):
        needed = footprint(with_size(config, size), vocab_size, machine).total
        if machine.memory_bytes and needed <= machine.memory_bytes:
            return size
    return None
