"""What a model costs: parameters, FLOPs, and the share of a device's peak that a run reaches.

Plain arithmetic on the config, without torch, so that planning answers at once.
"""

from accel_gpt.config.model import ModelConfig

VOCAB_MULTIPLE = 64
"""Rows of embedding and head come in multiples of this: 128 bytes of bf16, the alignment at which
matrix units run at full rate (NVIDIA, Matrix Multiplication Background, "Tensor Core
Requirements")."""

FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step: the backward pass takes two


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding and the head: the next multiple of `VOCAB_MULTIPLE`."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def chunk_tokens(rows: int, cpu: bool) -> int:
    """Tokens whose logits are held at a time in training: a power of two.

    Their float32 logits over the `rows` of the head take at most 256 MiB on a CPU and 1 GiB
    elsewhere (assumption: products of a GPU want more tokens at a time): 1,024 and 4,096 tokens
    over GPT-2's vocabulary.
    """
    room = (2**26 if cpu else 2**28) // rows
    return 1 << (max(room, 1).bit_length() - 1)


def activates_twice(values: int) -> bool:
    """Whether the activation function of so many values is computed again in the backward pass.

    Its results are a fifth of what GPT-2 would keep; below 2^23 values starting the work over
    costs more than it is worth (assumption).
    """
    return values > 2**23


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters by part, as the model holds them, and two totals.

    `total` is the sum of the parts, padded rows included: what memory and the optimizer see.
    `total_unpadded` counts the real vocabulary only: what papers quote and exports hold. A tied
    head counts 0.
    """
    C, n_layer = config.n_embd, config.n_layer
    rows, (qkv, out, up, down) = padded_vocab_size(vocab_size), hidden_matrices(config)
    tables = 1 if config.tie_embeddings else 2
    norm_vectors = 2 if config.bias and config.norm == "layernorm" else 1
    norms = (2 * n_layer + 1 + config.embedding_norm) * C * norm_vectors
    qk_norms = 2 * n_layer * config.head_size * config.qk_norm
    parts = {
        "embedding": rows * C,
        "position": config.block_size * C if config.position == "learned" else 0,
        "attention": n_layer * (qkv + out + (qkv // C + C) * config.bias),
        "mlp": n_layer * (up + down + (up // C + C) * config.bias),
        "norm": (norms + qk_norms) * config.norm_weight,
        "head": rows * C * (tables - 1),
    }
    total = sum(parts.values())
    return parts | {"total": total, "total_unpadded": total - tables * (rows - vocab_size) * C}


def hidden_matrices(config: ModelConfig) -> list[int]:
    """Parameters of the four weights of a block, without biases: qkv, out, up and down."""
    C, D = config.n_embd, config.head_size
    up = config.hidden_size * (2 if config.mlp == "swiglu" else 1)
    rows = ((config.n_head + 2 * config.kv_heads) * D, config.n_head * D, up, config.hidden_size)
    return [C * count for count in rows]


def flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """FLOPs to train on one token in a sequence of `block_size`, forward and backward.

    6 N + 12 L H D T (PaLM, Chowdhery et al. 2022, appendix B). N: the weights that tokens are
    multiplied with, which are the linear layers and the head, tied or not, over the real
    vocabulary, since padding is no useful work; not the look-ups of embedding and position.
    12 L H D T: scores and weighted values over the full T x T square, as nanoGPT counts it, though
    a causal kernel can skip half. Norms, biases, activations and recomputation are not counted.
    """
    multiplied = config.n_layer * sum(hidden_matrices(config)) + vocab_size * config.n_embd
    attended = config.n_head * config.head_size * config.block_size
    return 6 * multiplied + 12 * config.n_layer * attended


def mfu(tokens_per_second: float, flops_per_token: float, peak: float, n_devices: int = 1) -> float:
    """Share of the devices' peak FLOP/s that training reaches (PaLM, appendix B), 0 to 1.

    `tokens_per_second` over all devices, `peak` of one.
    """
    return tokens_per_second * flops_per_token / (peak * n_devices)
