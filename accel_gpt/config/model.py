"""Define the options and presets of the model. No torch."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accel_gpt.config.options import Section, option, typed
from accel_gpt.errors import require

Scalar = int | float | bool | str

# rope_factor as in Llama 3.1 to 3.3 (transformers): the context before the scaling, in tokens, and
# turns in it. With fewer turns, a frequency is divided; with more, it is kept
LLAMA3_CONTEXT = 8192
LLAMA3_TURNS = (1.0, 4.0)


@dataclass(frozen=True)
class ModelConfig(Section, prefix="model.", resume="refuse"):
    """Shape of the model; the defaults are GPT-2 small."""

    preset: Literal["gpt2", "llama", "qwen3", "fast"] = option(
        "gpt2",
        "Model family. It sets the defaults of the keys below; you can override each of them.",
        essential=True,
    )
    depth: int | None = option(
        None,
        "Number of blocks in the fast recipe. Width, heads, batch size, length, learning rates "
        "and schedule follow from it unless you set them (docs/explanation/fast.md). null: "
        "nothing follows from the depth.",
        above=0,
        at_most=2**14,
        essential=True,
        resume="free",
        replaces=(
            "model.n_layer",
            "model.n_head",
            "model.n_kv_head",
            "model.n_embd",
            "model.head_dim",
            "model.mlp_hidden",
        ),
        inherited="never",
    )
    init_from: str = option(
        "scratch",
        "Initial weights: scratch, a run or checkpoint of accel_gpt, a folder written by "
        "transformers, or a Hub id (gpt2, Qwen/Qwen3-0.6B, user/name@revision). The weights set "
        "shape and tokenizer; you can override dropout, block_size and the rope_ keys.",
        essential=True,
        resume="start",
        per_machine=True,
        inherited="never",
        path=True,
    )
    new_weights: tuple[str, ...] = option(
        (),
        "Names of weights, with the wildcards * and ?, that are drawn and not taken from "
        "init_from, for a changed GPT of --code: blocks.*.mlp.gate.* (docs/how-to/own-code.md).",
        resume="start",
        inherited="never",
    )
    n_layer: int = option(
        12,
        "Number of blocks.",
        above=0,
        at_most=2**14,
        essential=True,
    )
    n_head: int = option(
        12,
        "Number of query heads.",
        above=0,
        at_most=2**24,
        essential=True,
    )
    n_kv_head: int | None = option(
        None,
        "Number of key and value heads (grouped-query attention). null: n_head.",
        above=0,
        at_most=2**24,
    )
    n_embd: int = option(
        768,
        "Width of the residual stream.",
        above=0,
        at_most=2**24,
        essential=True,
    )
    head_dim: int | None = option(
        None,
        "Size of one head. null: n_embd / n_head.",
        above=0,
        at_most=2**24,
    )
    block_size: int = option(
        1024,
        "Context length in tokens.",
        above=0,
        at_most=2**31,
        essential=True,
    )
    vocab_size: int | None = option(
        None,
        "Vocabulary size. null: the size of the tokenizer. The weights pad it to a multiple of 64.",
        above=0,
        at_most=2**31,
    )
    dropout: float = option(
        0.0,
        "Dropout probability, 0 to 1.",
        at_least=0,
        below=1,
        inherited="never",
    )
    bias: bool = option(
        True,
        "Use biases in linear layers and LayerNorm.",
    )
    position: Literal["learned", "rope"] = option(
        "learned",
        "learned: position embeddings. rope: rotary positions (RoPE).",
    )
    norm: Literal["layernorm", "rmsnorm", "plain_rmsnorm"] = option(
        "layernorm",
        "Normalization before each sub-layer. layernorm has learned scales, and learned shifts if "
        "bias is true. rmsnorm has learned scales. plain_rmsnorm has none, and also normalizes the "
        "embeddings.",
    )
    qk_norm: bool = option(
        False,
        "Apply RMSNorm to the queries and keys of each head.",
    )
    mlp: Literal["gelu", "gelu_erf", "relu2", "swiglu"] = option(
        "gelu",
        "Activation of the MLP: GELU in GPT-2's tanh form, exact GELU (nanoGPT's), squared ReLU, "
        "or SwiGLU.",
    )
    mlp_hidden: int | None = option(
        None,
        "Hidden size of the MLP. null: 4 n_embd. For swiglu, null is 8/3 n_embd, rounded up to a "
        "multiple of 128.",
        above=0,
        at_most=2**24,
    )
    tie_embeddings: bool = option(
        True,
        "Share the weights of the input embedding and the output head.",
    )
    logit_softcap: float | None = option(
        None,
        "Limit the absolute value of the logits to this number, with a tanh. null: no limit.",
        above=0,
    )
    rope_theta: float = option(
        10000.0,
        "Base of the rotary frequencies.",
        above=0,
        inherited="default",
        used_with=("position", ("rope",)),
    )
    rope_factor: float = option(
        1.0,
        "Factor by which the low rotary frequencies are divided, as in Llama 3, for a longer "
        "context than the 8,192 tokens of the pretraining. 1: no scaling.",
        at_least=1,
        inherited="default",
        used_with=("position", ("rope",)),
    )
    init_std: float = option(
        0.02,
        "Standard deviation of the initial weights. 0.02 is GPT-2's.",
        above=0,
        inherited="default",
    )
    zero_init: bool = option(
        False,
        "Initialize the projections onto the residual stream to zero. Each block then starts as "
        "the identity.",
        resume="start",
        inherited="never",
    )
    norm_eps: float = option(
        1e-5,
        "Constant added to the variance in the norms, for numerical stability.",
        above=0,
        inherited="default",
    )

    extra: Mapping[str, Scalar] = option(
        {},
        "Your own numbers and texts for the functions of --code, by name: {window: 64}. The "
        "command line can also set a single one (docs/how-to/own-code.md).",
        resume="ask",
        inherited="default",
    )

    def _check(self) -> None:
        require(
            not self.new_weights or self.init_from != "scratch",
            f"model.new_weights is {typed(self.new_weights)}, but model.init_from is scratch; "
            "expected the weights to start from",
        )
        if self.head_dim is None:
            check_divisible("n_embd", self.n_embd, "n_head", self.n_head)
        check_divisible("n_head", self.n_head, "n_kv_head", self.kv_heads)
        require(
            self.position != "rope" or self.head_size % 2 == 0,
            f"a head has {self.head_size} channels, but model.position rope needs an even number; "
            "set model.head_dim or model.n_embd",
        )

    def unset(self, name: str) -> Any:
        """Return the value of an option that is not set: the preset's, else the default."""
        return PRESETS[self.preset].get(name, super().unset(name))

    @property
    def head_size(self) -> int:
        """Number of channels in one head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_head or self.n_head

    @property
    def hidden_size(self) -> int:
        """Number of hidden channels in the MLP."""
        if self.mlp_hidden:
            return self.mlp_hidden
        if self.mlp != "swiglu":
            return 4 * self.n_embd
        return -(-8 * self.n_embd // 3 // 128) * 128

    @property
    def block_matrices(self) -> tuple[int, int, int, int]:
        """Number of parameters in the four weights of a block: qkv, out, up, down."""
        heads = self.n_head * self.head_size
        qkv = (heads + 2 * self.kv_heads * self.head_size) * self.n_embd
        out = heads * self.n_embd
        down = self.hidden_size * self.n_embd
        up = 2 * down if self.mlp == "swiglu" else down
        return qkv, out, up, down

    def matrix_parameters(self, vocab_size: int) -> int:
        """Count the weights in matrix products: all blocks, and the head, tied or not.

        Neither padded rows of the head nor the look-ups of embedding and position count. Scaling
        laws fit best in this count (nanochat dev/LOG.md, January 2026).
        """
        return self.n_layer * sum(self.block_matrices) + vocab_size * self.n_embd


def check_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Unless `divisor` divides `value`, raise `UserError` with the nearest values that fit."""
    below = value // divisor * divisor
    above = below + divisor
    nearest = f"{below} or {above}" if below else f"{above}"
    require(
        value % divisor == 0,
        f"model.{name} ({value}) must be divisible by model.{divisor_name} ({divisor}); try "
        f"{nearest}",
    )


# Llama, Touvron et al. 2023, section 2.2: RMSNorm, SwiGLU, RoPE, no biases, untied head
LLAMA: Mapping[str, Any] = types.MappingProxyType(
    {
        "bias": False,
        "position": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "tie_embeddings": False,
    }
)
PRESETS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "gpt2": {},
        "llama": LLAMA,
        # Qwen3 technical report 2025, section 2, and the configuration of its 0.6B model
        "qwen3": {**LLAMA, "qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6},
        # NanoChat in transformers: norms without weights, which also normalize queries, keys and
        # embeddings; squared ReLU; logits capped at 15. zero_init is from nanochat's gpt.py, 2025
        "fast": {
            "bias": False,
            "position": "rope",
            "norm": "plain_rmsnorm",
            "norm_eps": 1e-6,
            "qk_norm": True,
            "mlp": "relu2",
            "tie_embeddings": False,
            "logit_softcap": 15.0,
            "zero_init": True,
        },
    }
)
