"""Compute sizes of a model: padded vocabulary, chunk of the loss, FLOPs of a token. No torch.

Legend: D head size, H query heads, L layers, T block size.
"""

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


def training_flops(config: ModelConfig, matrices: int) -> int:
    """Compute the FLOPs to train on one token of a sequence of `block_size`, forward and backward.

    6 N + 12 L H D T (PaLM, Chowdhery et al. 2022, appendix B). `matrices` is N, the weights in
    matrix products: the linear layers, and the head over the real vocabulary, tied or not. N does
    not count padding or the look-ups of embedding and position.

    12 L H D T counts scores and weighted values over the full T x T square, as nanoGPT does. A
    causal kernel can skip half of them. Norms, biases, activations and recomputation do not count.
    """
    attention = config.n_layer * config.n_head * config.head_size * config.block_size
    return 6 * matrices + 12 * attention


def mfu(
    tokens_per_second: float, flops_per_token: float, peak_flops: float, n_devices: int = 1
) -> float:
    """Compute the model FLOPs utilization, 0 to 1 (PaLM, appendix B).

    This is the share of the devices' peak FLOP/s that training reaches. `tokens_per_second` is the
    speed of all devices together; `peak_flops` is the FLOP/s of one device.
    """
    return tokens_per_second * flops_per_token / (peak_flops * n_devices)
