"""Count the parameters and FLOPs of a model from its config, without building it. No torch."""

from accel_gpt.config.model import ModelConfig
from accel_gpt.model.sizes import padded_vocab_size, training_flops


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Count the parameters of each part, and two totals.

    `total` is the sum of the parts and includes the padded rows, which take memory too.
    `total_unpadded` counts only the real vocabulary, as papers and exports do. A tied head counts
    as 0.
    """
    C = config.n_embd
    n_layer = config.n_layer
    rows = padded_vocab_size(vocab_size)
    qkv, out, up, down = hidden_matrices(config)
    attention_biases = 0
    mlp_biases = 0
    if config.bias:  # one for each output of a matrix
        attention_biases = qkv // C + C
        mlp_biases = up // C + C
    vectors_per_norm = 2 if config.bias and config.norm == "layernorm" else 1
    n_norms = 2 * n_layer + 1 + (1 if config.embedding_norm else 0)
    qk_norms = 2 * n_layer * config.head_size if config.qk_norm else 0
    norms = n_norms * vectors_per_norm * C + qk_norms
    parts = {
        "embedding": rows * C,
        "position": config.block_size * C if config.position == "learned" else 0,
        "attention": n_layer * (qkv + out + attention_biases),
        "mlp": n_layer * (up + down + mlp_biases),
        "norm": norms if config.norm_weight else 0,
        "head": 0 if config.tie_embeddings else rows * C,
    }
    total = sum(parts.values())
    padded_tables = 1 if config.tie_embeddings else 2
    padding = padded_tables * (rows - vocab_size) * C
    return parts | {"total": total, "total_unpadded": total - padding}


def hidden_matrices(config: ModelConfig) -> list[int]:
    """Count the parameters of the four weights of a block, without biases: qkv, out, up, down."""
    C = config.n_embd
    D = config.head_size
    H = config.n_head
    qkv = (H + 2 * config.kv_heads) * D * C
    out = H * D * C
    gates = 2 if config.mlp == "swiglu" else 1
    up = gates * config.hidden_size * C
    down = config.hidden_size * C
    return [qkv, out, up, down]


def flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """Compute the FLOPs to train on one token, as `GPT.flops_per_token` does."""
    matrices = config.n_layer * sum(hidden_matrices(config)) + vocab_size * config.n_embd
    return training_flops(config, matrices)
