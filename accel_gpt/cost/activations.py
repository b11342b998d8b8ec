"""What a micro-batch holds in memory between forward and backward: plain arithmetic, without torch.

The formulas follow `gpt.py` operation by operation; tests/test_memory.py compares them with what
autograd keeps. docs/cost.md derives them. All results are bytes.

Legend: N tokens of a micro-batch, T block_size, C channels (n_embd), H query heads, K key and value
heads, D head size, V vocabulary.
"""

from dataclasses import dataclass

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import activates_twice, chunk_tokens, padded_vocab_size, parameter_counts

FLOAT = 4  # bytes of float32, in which weights, gradients and statistics are
DOUBLE = 8


@dataclass(frozen=True)
class Numerics:
    """What decides in which types a model computes and by which kernels."""

    half: bool = False  # bf16 or fp16
    cuda: bool = False  # kernels that keep less: see `norm` and `attention`
    sharded: bool = False  # by FSDP, which computes in the half type throughout, without autocast

    @property
    def narrow(self) -> int:
        """Bytes of what products take and give."""
        return 2 if self.half else FLOAT

    @property
    def stream(self) -> int:
        """Bytes of the residual stream, which autocast leaves in float32."""
        return 2 if self.half and self.sharded else FLOAT


def activation_bytes(
    config: ModelConfig,
    sequences: int,
    numerics: Numerics,
    documents: bool = False,
    recomputed: bool = False,
) -> int:
    """What autograd keeps of a micro-batch, all but of the head and the cast weights.

    `recomputed`: of each block only what goes into it.
    """
    N = sequences * config.block_size
    layers = config.n_layer * block_bytes(config, sequences, numerics, documents)
    if recomputed:
        layers = config.n_layer * N * numerics.stream * config.n_embd
    ends = norm(config, numerics) + dropout_mask(config, numerics, numerics.stream)
    if config.embedding_norm:  # what it gives is the stream, which the first block keeps
        ends += norm(config, numerics) - numerics.narrow * config.n_embd
    if documents:
        ends += document_positions(config)
    return layers + N * ends


def block_bytes(
    config: ModelConfig, sequences: int, numerics: Numerics, documents: bool = False
) -> int:
    """What autograd keeps of one block."""
    layer = (
        2 * norm(config, numerics)
        + attention(config, numerics)
        + mlp(config, sequences, numerics)
        + 2 * dropout_mask(config, numerics, numerics.narrow)
    )
    if documents:
        layer += document_mask(config, numerics)
    return sequences * config.block_size * layer


def norm(config: ModelConfig, numerics: Numerics) -> int:
    """Of one token: the norm's input and statistics, and its output, the next product's input.

    RMSNorm on a CPU is made of single operations: with a weight it keeps the input scaled, too.
    """
    C = config.n_embd
    rms = config.norm == "rmsnorm"
    kept = numerics.stream * C + FLOAT * (1 if rms else 2)
    if rms and config.norm_weight and not numerics.cuda:
        kept += numerics.stream * C
    return kept + numerics.narrow * C


def attention(config: ModelConfig, numerics: Numerics) -> int:
    """Of one token: queries, keys and values as they are and as they are multiplied, the result.

    A flash kernel keeps one float32 a head and token, where its backward pass is taken. With
    dropout a CPU has none: there the whole T x T weights are kept three times, in float32 (as
    softmax, mask and product). In bf16 a CPU keeps float32 copies, see `gpt.dot_product_attention`.
    """
    H, K, D, size = config.n_head, config.kv_heads, config.head_size, numerics.narrow
    moved, kept = config.qk_norm or config.position == "rope", 0
    flash = numerics.cuda or not config.dropout
    widened = numerics.half and not numerics.cuda
    if (flash and not widened) or (config.qk_norm and not numerics.half):
        kept += (H + 2 * K) * D * size
    if config.qk_norm:
        kept += FLOAT * (H + K)
        if numerics.half:
            kept += FLOAT * (H + K) * D  # widened
        if config.norm_weight and not numerics.cuda:
            kept += FLOAT * (H + K) * D
    if flash:
        attended = H * D + (H + 2 * K) * D if widened else moved * (H + K) * D
        return kept + attended * (FLOAT if widened else size) + H * D * size + FLOAT * H
    return kept + 3 * FLOAT * H * (D + config.block_size) + H * D * size


def mlp(config: ModelConfig, sequences: int, numerics: Numerics) -> int:
    """Of one token: what goes into the activation function and, of a small micro-batch, what comes
    out, each half of a gate, and their product.
    """
    values = config.hidden_size * (2 if config.mlp == "swiglu" else 1)
    kept = 1 if activates_twice(sequences * config.block_size * values) else 2
    return kept * values * numerics.narrow


def dropout_mask(config: ModelConfig, numerics: Numerics, size: int) -> int:
    """Of one token: which of C channels stay, a byte each on CUDA, as numbers on a CPU."""
    return config.n_embd * (1 if numerics.cuda else size) if config.dropout else 0


def document_mask(config: ModelConfig, numerics: Numerics) -> int:
    """Of one token: which of T others it sees, as numbers, for the flash kernel of a CPU.

    With dropout that kernel is not used; on CUDA a mask of blocks takes next to nothing.
    """
    return 0 if numerics.cuda or config.dropout else config.block_size * FLOAT


def document_positions(config: ModelConfig) -> int:
    """Of one token: where it is in its document, or the cosines and sines of that."""
    return 2 * FLOAT * config.head_size if config.position == "rope" else 8


def backward_bytes(config: ModelConfig, sequences: int, numerics: Numerics) -> int:
    """The most that the backward pass of one block takes besides what was kept for it."""
    H, K, D, size = config.n_head, config.kv_heads, config.head_size, numerics.narrow
    gradients = {"swiglu": 4, "relu2": 3}.get(config.mlp, 2)
    again = mlp(config, 0, numerics) - mlp(config, sequences, numerics)  # computed again
    of_mlp = gradients * config.hidden_size * size + again
    of_attention = 2 * (H + 2 * K) * D * size
    if config.dropout and not numerics.cuda:
        of_attention += 2 * FLOAT * H * config.block_size
    tokens = sequences * config.block_size
    return tokens * (max(of_mlp, of_attention) + numerics.stream * config.n_embd)


def chunked(config: ModelConfig, vocab_size: int, sequences: int, numerics: Numerics) -> bool:
    """Whether head and loss go by chunks of tokens."""
    chunk = chunk_tokens(padded_vocab_size(vocab_size), not numerics.cuda)
    return sequences * config.block_size > chunk


def logits_bytes(config: ModelConfig, vocab_size: int, sequences: int, numerics: Numerics) -> int:
    """The most that logits and loss take at once.

    In one piece that is where the loss's backward pass begins: three times the float32 logits, as
    log-probabilities, their gradient, that of the logits; with a cap the tanh besides. In chunks
    it is while the last one is at work, or where what is kept is scaled.
    """
    if not chunked(config, vocab_size, sequences, numerics):
        copies = 4 if config.logit_softcap else 3
        return copies * FLOAT * sequences * config.block_size * vocab_size
    rows = padded_vocab_size(vocab_size)
    chunk = chunk_tokens(rows, not numerics.cuda)
    copies = 3 if config.logit_softcap else 2
    half = numerics.narrow if numerics.half else 0  # the product as it comes
    at_work = chunk * rows * (copies * FLOAT + half)
    kept = kept_logits_bytes(config, vocab_size, sequences, numerics)
    return kept + max(at_work, kept)


def kept_logits_bytes(
    config: ModelConfig, vocab_size: int, sequences: int, numerics: Numerics
) -> int:
    """The part of `logits_bytes` that autograd keeps.

    Log-probabilities and, with a cap, tanh; of chunks the gradients of head and hidden states.
    """
    tokens, C = sequences * config.block_size, config.n_embd
    if chunked(config, vocab_size, sequences, numerics):  # and not what the last norm gives
        hidden = tokens * (numerics.stream - numerics.narrow) * C
        return FLOAT * padded_vocab_size(vocab_size) * C + hidden
    copies = 2 if config.logit_softcap else 1
    return copies * FLOAT * tokens * vocab_size


def cast_bytes(config: ModelConfig, vocab_size: int, numerics: Numerics) -> int:
    """Copies of the matrices in the half type, which autocast makes for each micro-batch."""
    if not numerics.half or numerics.sharded:
        return 0
    parts = parameter_counts(config, vocab_size)
    biases = (
        config.n_layer
        * config.bias
        * (
            (config.n_head + 2 * config.kv_heads) * config.head_size
            + 2 * config.n_embd
            + config.hidden_size * (2 if config.mlp == "swiglu" else 1)
        )
    )
    head = padded_vocab_size(vocab_size) * config.n_embd
    return 2 * (parts["attention"] + parts["mlp"] - biases + head)
