"""Estimate the peak memory of one device in a training step, by arithmetic. No torch.

docs/explanation/cost.md derives the formulas and compares them with measurements.

Letters: T block_size, C channels (n_embd), H query heads, D head size. All sizes are in bytes.
"""

from dataclasses import dataclass

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import STACK
from accel_gpt.config.plan import fitting_sizes, with_size
from accel_gpt.launch.devices import device_memory, peak_flops
from accel_gpt.model.sizes import (
    FLOAT_BYTES,
    WHOLE_LOGITS,
    activates_twice,
    chunk_tokens,
    logit_work_bytes,
    padded_vocab_size,
    parameter_counts,
)

DOUBLE_BYTES = 8  # float64
# While Muon orthogonalizes a stack, it holds 3 copies of it and 2 of its Gram matrices. While it
# updates a weight, it holds the stack and 7 copies of the weight. tests/cost/test_memory.py
STACKS = 3
GRAMS = 2
WEIGHTS = 7
# Measured (benchmarks/notes/cost.md): 290 MB for Python, torch and their imports; the first step
# loads the rest.
LIBRARIES_CPU_BYTES = 385_000_000
# Share of a micro-batch's memory that the C library wastes in gaps between tensors; measured
# (benchmarks/notes/cost.md)
GAP_SHARE_CPU = 0.2
# Assumption, for the CUDA context, the workspaces of cuBLAS and NCCL, and gaps
LIBRARIES_CUDA_BYTES = 1_500_000_000
GATHERED_BLOCKS = 2  # blocks that FSDP holds unsharded at once: the current and the next


@dataclass(frozen=True)
class Machine:
    """The devices of a planned run. Each device has one process."""

    devices: int  # on all nodes together
    gpu: str | None  # a name that `launch/devices.py` finds; None: CPUs
    sharded: bool  # FSDP
    precision: str  # no, bf16, fp16 or fp8
    memory_gb: float | None = None  # of a device; None: as the table of GPUs says

    @property
    def shards(self) -> int:
        """Return the number of devices that share one copy of the model and optimizer."""
        return self.devices if self.sharded else 1

    @property
    def product_bytes(self) -> int:
        """Return the bytes per number in matrix products."""
        return FLOAT_BYTES if self.precision == "no" else 2

    @property
    def device_bytes(self) -> float | None:
        """Return the memory of a device; None if it is unknown."""
        if self.memory_gb is not None:
            return self.memory_gb * 1e9
        return None if self.gpu is None else device_memory(self.gpu)

    def peak(self, matmul_precision: str) -> float | None:
        """Return the peak FLOP/s of one device; None if unknown."""
        if self.gpu is None:
            return None
        float32 = "fp32" if matmul_precision == "highest" else "tf32"
        return peak_flops(self.gpu, float32 if self.precision == "no" else self.precision)

    def __str__(self) -> str:
        """Describe the machine: `8 x h100, ddp, bf16`."""
        words = [f"{self.devices} x {self.gpu or 'CPU process'}"]
        if self.devices > 1:
            words.append("fsdp" if self.sharded else "ddp")
        words.append("float32" if self.precision == "no" else self.precision)
        return ", ".join(words)

    def holds(self, size: float) -> bool | None:
        """Return whether `size` bytes fit into the memory of a device; None if it is unknown."""
        return None if self.device_bytes is None else size <= self.device_bytes


@dataclass(frozen=True)
class Footprint:
    """The memory of one device at the moment when it holds the most."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts.values())


def footprint(config: Config, vocab_size: int, machine: Machine) -> Footprint:
    """Estimate the peak memory of a training step.

    The sequences of a step must be a multiple of `train.micro_batch_size`.
    """
    model = config.model
    tokens = config.train.micro_batch_sequences * model.block_size
    micro_steps = config.train.tokens_per_step // (tokens * machine.devices)
    standing = state_bytes(config, vocab_size, machine)
    gradients = gradient_bytes(config, vocab_size, machine, micro_steps)
    accumulated: dict[str, int] = {}
    if micro_steps > 1 and not config.train.reproducible:
        accumulated = gradients
    activations = activation_bytes(config, vocab_size, tokens, machine)
    loss = logits_bytes(config, vocab_size, tokens, machine)
    block = block_backward_bytes(config, vocab_size, tokens, machine)
    tables = 0  # temporary gradients of the embedding: from the look-up, and from a tied head
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
    """Estimate the memory that a process holds during the whole step."""
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
        largest_gradient = max(root, block)
        gathered = root + GATHERED_BLOCKS * block + largest_gradient
        parts["gathered by fsdp"] = machine.product_bytes * gathered
    if machine.gpu is None and config.checkpoint.async_save:
        snapshot = checkpoint_bytes(config, vocab_size) // machine.shards
        parts["snapshot of async_save"] = snapshot
    return parts


def gradient_bytes(
    config: Config, vocab_size: int, machine: Machine, micro_steps: int
) -> dict[str, int]:
    """Estimate the memory of gradients besides DDP's buckets.

    With one micro-step, the gradients live in the buckets. With several micro-steps or
    `train.reproducible`, they are accumulated outside the buckets.
    """
    size = FLOAT_BYTES * parameter_counts(config.model, vocab_size)["total"]
    if machine.shards > 1:
        return {"gradients": size // machine.shards}
    in_buckets = machine.devices > 1 and micro_steps == 1 and not config.train.reproducible
    return {"gradients": 0 if in_buckets else size}


def activation_bytes(
    config: Config, vocab_size: int, tokens: int, machine: Machine
) -> dict[str, int]:
    """Estimate the memory that the forward pass of a micro-batch saves for the backward pass."""
    model = config.model
    stream = stream_bytes(machine)
    inputs = tokens * stream * model.n_embd
    if config.train.activation_checkpointing == "blocks":
        saved_by_block = inputs
    else:
        per_token = block_bytes(config, tokens, machine)
        saved_by_block = tokens * per_token
    cast = 0
    if machine.product_bytes < FLOAT_BYTES and not machine.sharded:
        cast = 2 * parameter_counts(model, vocab_size)["total"]
    return {
        "activations": model.n_layer * saved_by_block + 2 * inputs,
        "weights in half precision": cast,
    }


def block_backward_bytes(config: Config, vocab_size: int, tokens: int, machine: Machine) -> int:
    """Estimate the temporary memory of the backward pass of a block.

    Activations and gradients are not included.
    """
    model = config.model
    per_token = backward_bytes(model, tokens, machine)
    if config.train.activation_checkpointing == "blocks":
        per_token += block_bytes(config, tokens, machine)
    inputs = tokens * stream_bytes(machine) * model.n_embd
    fixed = table_bytes(model, vocab_size) + inputs
    return fixed + tokens * per_token


def stream_bytes(machine: Machine) -> int:
    """Return the bytes per number in the residual stream."""
    half = machine.sharded or machine.precision in ("bf16", "fp8")
    return machine.product_bytes if half else FLOAT_BYTES


def table_bytes(model: ModelConfig, vocab_size: int) -> int:
    """Compute the size of the gradient of the embedding or the head."""
    return FLOAT_BYTES * padded_vocab_size(vocab_size) * model.n_embd


def gap_bytes(size: int, activations: dict[str, int], machine: Machine) -> int:
    """Estimate the gaps between the tensors of a micro-batch, see `GAP_SHARE_CPU`."""
    if machine.gpu:
        return 0
    return round(GAP_SHARE_CPU * (size + sum(activations.values())))


def update_bytes(config: Config, vocab_size: int) -> dict[str, int]:
    """Estimate the temporary memory of the update.

    These are Muon's stacks of matrices, and the float64 copies of exact gradients.
    """
    model = config.model
    parts: dict[str, int] = {}
    if config.optim.name == "muon":
        C = model.n_embd
        largest = 0.0
        attention = model.n_head * model.head_size
        widths = (attention, attention, model.hidden_size, model.hidden_size)  # beside C channels
        for size, width in zip(model.block_matrices, widths, strict=True):
            stacked = min(model.n_layer, max(1, STACK // size))
            gram = min(width, C) / max(width, C)  # as a share of a matrix
            copies = max((STACKS + GRAMS * gram) * stacked, stacked + WEIGHTS)
            largest = max(largest, copies * size)
        parts["muon at work"] = round(FLOAT_BYTES * largest)
    if config.train.reproducible:
        rows = max(padded_vocab_size(vocab_size), 2 * model.hidden_size)
        parts["exact gradients at work"] = 2 * DOUBLE_BYTES * rows * model.n_embd
    return parts


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Compute the size of a checkpoint: weights and optimizer."""
    weights = FLOAT_BYTES * parameter_counts(config.model, vocab_size)["total"]
    return weights + optimizer_bytes(config, vocab_size)


def optimizer_bytes(config: Config, vocab_size: int) -> int:
    """Compute the size of the optimizer's moments.

    AdamW has two moments per parameter, Muon one.
    """
    moments = 2 * parameter_counts(config.model, vocab_size)["total"]
    if config.optim.name == "muon":
        moments -= config.model.n_layer * sum(config.model.block_matrices)
    return FLOAT_BYTES * moments


def block_bytes(config: Config, tokens: int, machine: Machine) -> int:
    """Estimate the bytes per token that autograd saves for one block in a micro-batch.

    `tokens` is the size of the micro-batch. Autograd saves:

    - the input and output of the two norms; an input in bf16 is copied to float32, except in a
      compiled model, in a LayerNorm on a CPU, or in a norm without weights on a CPU,
    - queries, keys and values, twice if they are rotated or normalized,
    - the result of attention, and one float32 per head,
    - the input of the activation function, and its output unless the backward pass recomputes it,
      which it never does in a compiled model; there only the product of a gated MLP counts.

    On a CPU, attention runs in float32 and has no fused kernel for dropout. In bf16 autograd
    therefore saves float32 copies, and with dropout three T x T weights per head.
    """
    model = config.model
    C = model.n_embd
    H = model.n_head
    D = model.head_size
    number_bytes = machine.product_bytes
    cpu = machine.gpu is None
    weighted_rmsnorm = model.norm == "rmsnorm"
    norm_input = stream_bytes(machine)
    if not machine.sharded and (weighted_rmsnorm if cpu else not config.train.compiled):
        norm_input = FLOAT_BYTES
    norms = 2 * (norm_input + number_bytes) * C
    if cpu and weighted_rmsnorm:  # the scaling is a separate operation
        norms += 2 * norm_input * C
    if cpu and number_bytes < FLOAT_BYTES:
        copies = 2 if model.qk_norm else 1
        kept_bytes = FLOAT_BYTES
    else:
        copies = 2 if model.qk_norm or model.position == "rope" else 1
        kept_bytes = number_bytes
    qkv = (H + 2 * model.kv_heads) * D
    attention = copies * kept_bytes * qkv + number_bytes * H * D + FLOAT_BYTES * H
    copied = not cpu and not config.train.compiled and number_bytes < FLOAT_BYTES
    if model.qk_norm and copied:  # normalized in float32
        attention += FLOAT_BYTES * (H + model.kv_heads) * D
    if cpu and model.dropout:
        attention += 3 * FLOAT_BYTES * H * model.block_size
    elif cpu and config.data.document_mask:
        attention += FLOAT_BYTES * model.block_size
    values = mlp_values(model)
    mlp = number_bytes * values
    if config.train.compiled:
        mlp += number_bytes * model.hidden_size
    elif not activates_twice(tokens * values):
        mlp += number_bytes * values
    dropout = 0
    if model.dropout:
        mask_bytes = number_bytes if cpu else 1
        dropout = 2 * mask_bytes * C
    return norms + attention + mlp + dropout


def mlp_values(model: ModelConfig) -> int:
    """Compute the number of inputs of the activation function per token, gates included."""
    return model.hidden_size * (2 if model.mlp == "swiglu" else 1)


def backward_bytes(model: ModelConfig, tokens: int, machine: Machine) -> int:
    """Estimate the temporary bytes per token in the backward pass of a block.

    `tokens` is the size of the micro-batch.
    """
    values = mlp_values(model)
    copies = {"swiglu": 4, "relu2": 3}.get(model.mlp, 2)  # copies of the hidden values
    mlp = copies * model.hidden_size
    if activates_twice(tokens * values):
        mlp += values
    qkv = (model.n_head + 2 * model.kv_heads) * model.head_size
    attention_bytes = 2 * machine.product_bytes * qkv
    if model.dropout and not machine.gpu:
        attention_bytes += 2 * FLOAT_BYTES * model.n_head * model.block_size
    return max(machine.product_bytes * mlp, attention_bytes)


def logits_bytes(config: Config, vocab_size: int, tokens: int, machine: Machine) -> int:
    """Estimate the peak memory of logits and loss.

    Up to `WHOLE_LOGITS`, this is three float32 tensors: the log-probabilities, their gradient and
    the gradient of the logits. `logit_softcap` adds the tanh, and on a GPU in bf16 or fp16 one more
    tensor.

    Beyond, it is the gradients of head and hidden states, plus the larger of two: the current
    chunk, or a second copy of these gradients, scaled by the gradient of the loss.
    """
    model = config.model
    rows = padded_vocab_size(vocab_size)
    capped = model.logit_softcap is not None
    if tokens * rows <= WHOLE_LOGITS:
        copies = 3
        if capped:
            copies += 1
        if capped and machine.product_bytes < FLOAT_BYTES and machine.gpu is not None:
            copies += 1
        return copies * FLOAT_BYTES * tokens * vocab_size
    head_bytes = FLOAT_BYTES * rows * model.n_embd
    gradients = head_bytes + tokens * machine.product_bytes * model.n_embd
    work_bytes = logit_work_bytes(
        machine.product_bytes, capped=capped, compiled=config.train.compiled
    )
    chunk = chunk_tokens(rows, work_bytes, machine.device_bytes)
    return gradients + max(min(chunk, tokens) * rows * work_bytes, gradients)


# --------------------------------------------------------------------------- what fits


def largest_size(config: Config, vocab_size: int, machine: Machine) -> int | None:
    """Return the largest train.micro_batch_size that fits; None if not even the smallest does."""
    for size in fitting_sizes(config, machine.devices):
        needed = footprint(with_size(config, size), vocab_size, machine).total
        if machine.holds(needed):
            return size
    return None
