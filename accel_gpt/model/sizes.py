"""Compute sizes of a model: parameters, FLOPs, padded vocabulary, chunk of the loss. No torch.

Legend: D head size, H query heads, L layers, T block size.
"""

from dataclasses import replace

from accel_gpt.config.model import ModelConfig

VOCAB_MULTIPLE = 64
"""The number of rows of embedding and head is a multiple of this. 64 values of bf16 are 128 bytes,
the alignment at which matrix units run at full rate (NVIDIA, Matrix Multiplication Background,
"Tensor Core Requirements")."""

WHOLE_LOGITS = 2**26
"""The loss computes up to this many logits at once, and more in chunks. In float32, they take 256
MiB."""

CHUNK_SHARE = 1 / 36
"""Share of a GPU's memory for the logits of a chunk. On an H100, 16,384 tokens of GPT-2 keep all
multiprocessors busy in the products with the head. (Arithmetic; not measured.)"""

FLOAT_BYTES = 4  # of a float32


def padded_vocab_size(vocab_size: int) -> int:
    """Compute the rows of embedding and head: `vocab_size` rounded up to `VOCAB_MULTIPLE`."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def logit_work_bytes(product_bytes: int, capped: bool, compiled: bool) -> int:
    """Compute the bytes for each logit of a chunk, while the loss and its gradient are computed.

    `product_bytes` is the size of a number in matrix products; `capped`: the model has a
    `logit_softcap`. Compiled, the gradient overwrites the logits. Otherwise, the logits are
    converted to float32, and log-probabilities and the tanh of the cap are other tensors.
    """
    if compiled:
        return product_bytes
    float_tensors = 3 if capped else 2
    converted = product_bytes if product_bytes < FLOAT_BYTES else 0
    return converted + float_tensors * FLOAT_BYTES


def chunk_tokens(rows: int, work_bytes: int, device_bytes: float | None) -> int:
    """Compute how many tokens the loss processes at a time: a power of two.

    `rows` are the rows of the head. On a CPU, `device_bytes` is None, and a chunk has
    `WHOLE_LOGITS`. On another device, a chunk takes `CHUNK_SHARE` of its memory, `device_bytes`, at
    `work_bytes` for each logit. With GPT-2's vocabulary and bf16, this is 1,024 tokens on a CPU. It
    is 4,096 tokens on a GPU with 80 GB, and 16,384 tokens if compiled.
    """
    max_logits = WHOLE_LOGITS if device_bytes is None else CHUNK_SHARE * device_bytes / work_bytes
    max_tokens = max(int(max_logits / rows), 1)
    exponent = max_tokens.bit_length() - 1
    return 1 << exponent  # the largest power of two up to `max_tokens`


def activates_twice(values: int) -> bool:
    """Return whether the backward pass recomputes the MLP's activation of `values` values.

    This saves a fifth of the memory for GPT-2's activations. (Assumption: with 2^23 values or less,
    the overhead costs more than the memory is worth.)
    """
    return values > 2**23


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Count the parameters of each part, and two totals.

    `total` is the sum of the parts and includes the padded rows, which take memory too.
    `total_unpadded` counts only the real vocabulary, as papers and exports do. A tied head counts
    as 0.
    """
    C = config.n_embd
    n_layer = config.n_layer
    rows = padded_vocab_size(vocab_size)
    qkv, out, up, down = config.block_matrices
    attention_biases = 0
    mlp_biases = 0
    if config.bias:  # one for each output of a matrix
        attention_biases = qkv // C + C
        mlp_biases = up // C + C
    vectors_per_norm = 2 if config.bias and config.norm == "layernorm" else 1
    qk_norms = 2 * n_layer * config.head_size if config.qk_norm else 0
    norms = (2 * n_layer + 1) * vectors_per_norm * C + qk_norms
    parts = {
        "embedding": rows * C,
        "position": config.block_size * C if config.position == "learned" else 0,
        "attention": n_layer * (qkv + out + attention_biases),
        "mlp": n_layer * (up + down + mlp_biases),
        "norm": 0 if config.norm == "plain_rmsnorm" else norms,
        "head": 0 if config.tie_embeddings else rows * C,
    }
    total = sum(parts.values())
    padded_tables = 1 if config.tie_embeddings else 2
    padding = padded_tables * (rows - vocab_size) * C
    return parts | {"total": total, "total_unpadded": total - padding}


def training_flops(config: ModelConfig, matrix_parameters: int) -> int:
    """Compute the FLOPs to train on one token of a sequence of `block_size`, forward and backward.

    6 N + 12 L H D T (PaLM, Chowdhery et al. 2022, appendix B). `matrix_parameters` is N, see
    `ModelConfig.matrix_parameters`.

    12 L H D T counts scores and weighted values over the full T x T square, as nanoGPT does. A
    causal kernel can skip half of them. Norms, biases, activations and recomputation do not count.
    """
    attention = config.n_layer * config.n_head * config.head_size * config.block_size
    return 6 * matrix_parameters + 12 * attention


def flops_at_length(flops: float, config: ModelConfig, block_size: int) -> float:
    """Return the FLOPs per token of a model at another length than `config.block_size`.

    `flops`: per token at `config.block_size`. Only attention depends on the length.
    """
    other = replace(config, block_size=block_size)
    return flops - training_flops(config, 0) + training_flops(other, 0)


def flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """Compute the FLOPs to train on one token, as `GPT.flops_per_token` does."""
    return training_flops(config, config.matrix_parameters(vocab_size))


def mfu(
    tokens_per_second: float, flops_per_token: float, peak_flops: float, n_devices: int = 1
) -> float:
    """Compute the model FLOPs utilization, 0 to 1 (PaLM, appendix B).

    This is the share of the devices' peak FLOP/s that training reaches. `tokens_per_second` is the
    speed of all devices together; `peak_flops` is the FLOP/s of one device.
    """
    return tokens_per_second * flops_per_token / (peak_flops * n_devices)
