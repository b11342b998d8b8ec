"""What a model costs: parameters, FLOPs, and the share of a device's peak that a run reaches.

Plain arithmetic on the config, without torch, so that planning answers at once.
"""


from accel_gpt.config import ModelConfig

VOCAB_MULTIPLE = 64
"""Rows of embedding and head come in multiples of this. 128 bytes of bf16 align the matrix units:
NVIDIA, Deep Learning Performance, Matrix Multiplication, section 4.1 (tensor core requirements)."""


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding and the head: the next multiple of `VOCAB_MULTIPLE`."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters by part, as the model holds them, and two totals.

    `total` is their sum, padded rows included: what memory and optimizer see. `total_unpadded`
    counts the real vocabulary: what papers quote and exports hold. A tied head counts 0.
    """
    C, n_layer = config.n_embd, config.n_layer
    rows = padded_vocab_size(vocab_size)
    tables = 1 if config.tie_embeddings else 2
    biases = _bias_channels(config) * n_layer if config.bias else 0
    norm_biased = config.bias and config.norm == "layernorm"
    parts = {
        "embedding": rows * C,
        "position": config.block_size * C if config.position == "learned" else 0,
        "attention": n_layer * _attention_weights(config),
        "mlp": n_layer * _mlp_weights(config),
        "norm": (2 * n_layer + 1) * C * (2 if norm_biased else 1),
        "head": rows * C * (tables - 1),
    }
    del biases
    total = sum(parts.values())
    return parts | {"total": total, "total_unpadded": total - tables * (rows - vocab_size) * C}
