"""Define the layers of a decoder: norms, rotary positions, attention with its KV cache, MLP, block.

Shapes: B batch, T tokens, S keys, C channels (n_embd), H query heads, K key and value heads, D head
size.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from accel_gpt.config.model import LLAMA3_CONTEXT, LLAMA3_TURNS, ModelConfig
from accel_gpt.model.documents import attend
from accel_gpt.model.sizes import activates_twice

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class RMSNorm(nn.RMSNorm):
    """Normalize by the root mean square, in the dtype of the weights.

    For an input in bf16 and weights in float32, PyTorch has no kernel on a CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            x = x.to(self.weight.dtype)
        return super().forward(x)


def build_norm(config: ModelConfig) -> nn.Module:
    """Build a LayerNorm or RMSNorm over the channels."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)
    scaled = config.norm == "rmsnorm"
    return RMSNorm(config.n_embd, eps=config.norm_eps, elementwise_affine=scaled)


# --------------------------------------------------------------------------- rotary positions


def rotary_table(config: ModelConfig) -> Tensor:
    """Compute the cosines and signed sines (2, T, 1, D) that `rotate` takes, float32, on the CPU.

    RoFormer, Su et al. 2021, section 3.2.2, in the layout of transformers' Llama: channel i rotates
    with channel i + D/2. Weights therefore need no permutation between the two libraries.

    A GPU rounds differently, and a resumed model is built on the CPU.
    """
    positions = torch.arange(config.block_size, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rotary_frequencies(config))  # (T, D/2)
    cos = angles.cos()
    sin = angles.sin()
    # a pair (a, b) becomes (a cos - b sin, b cos + a sin)
    cosines = torch.cat((cos, cos), dim=-1)  # (T, D)
    signed_sines = torch.cat((-sin, sin), dim=-1)  # (T, D)
    return torch.stack((cosines, signed_sines)).unsqueeze(2)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Compute the frequency of each channel pair (D/2,), in radians per token, float32.

    Divides the low frequencies by `rope_factor` and keeps the high ones. Between them, it
    interpolates linearly in the frequency (Llama 3 herd of models 2024, section 3.4.2, in the form
    of transformers).
    """
    frequencies = unscaled_frequencies(config)
    if config.rope_factor == 1:
        return frequencies
    low, high = LLAMA3_TURNS
    turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # share of each frequency
    return (1 - kept) * (frequencies / config.rope_factor) + kept * frequencies


def unscaled_frequencies(config: ModelConfig) -> Tensor:
    """Compute the frequencies (D/2,) without `rope_factor`, in radians per token, float32."""
    D = config.head_size
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D
    return 1.0 / config.rope_theta**exponents


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the channel pairs of `x` (B, T, heads, D) by their positions, in float32.

    `rotary` holds the cosines and signed sines of `rotary_table`: (2, T, 1, D), or (2, B, T, 1, D)
    if the positions differ between sequences.
    """
    cos, signed_sin = rotary.unbind(0)
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partner, signed_sin).to(x.dtype)


# --------------------------------------------------------------------------- attention


class KVCache:
    """Hold the keys and values of up to `tokens` tokens, at most `block_size`.

    `position` counts the cached tokens. `GPT.forward` advances it; set it to 0 to empty the cache.
    The buffers of a layer are allocated at its first `append`, in the dtype of its keys.
    """

    def __init__(self, config: ModelConfig, tokens: int | None = None) -> None:
        self.position = 0
        self._capacity = min(tokens or config.block_size, config.block_size)
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k` and `v`, both (B, K, T, D), and return all cached keys and values of `layer`.

        `position` does not change, since all layers append at the same position.
        """
        buffers = self._buffers[layer]
        if buffers is None:
            B, K, _, D = k.shape
            shape = (B, K, self._capacity, D)
            buffers = (k.new_empty(shape), v.new_empty(shape))
            self._buffers[layer] = buffers
        keys, values = buffers
        end = self.position + k.shape[2]
        keys[:, :, self.position : end] = k
        values[:, :, self.position : end] = v
        return keys[:, :, :end], values[:, :, :end]


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Compute the attention of `q` (B, H, T, D) to `k` and `v` (B, K, S, D): (B, H, T, D).

    On a CPU, inputs in bf16 are computed in float32. PyTorch 2.13 would split their backward pass
    into many small products and take 2.5 to 9 times as long (benchmarks/notes/precision.md).
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            y = dot_product_attention(
                q=q.float(),
                k=k.float(),
                v=v.float(),
                mask=mask,
                dropout=dropout,
                causal=causal,
            )
        return y.to(q.dtype)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class QKNorm(nn.Module):
    """Apply RMSNorm to the channels of each query and key head.

    Henry et al. 2020, in the form of Qwen3.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.head_size
        self.heads = (config.n_head, config.kv_heads)
        scaled = config.norm != "plain_rmsnorm"
        self.q = nn.RMSNorm(D, eps=config.norm_eps, elementwise_affine=scaled)
        self.k = nn.RMSNorm(D, eps=config.norm_eps, elementwise_affine=scaled)

    def forward(self, qk: Tensor) -> Tensor:
        """Normalize queries and keys (B, T, H + K, D), in float32."""
        if self.q.weight is None:  # the norms of queries and keys are the same
            return self.q(qk.float()).to(qk.dtype)
        q, k = qk.float().split_with_sizes(self.heads, dim=2)
        return torch.cat((self.q(q), self.k(k)), dim=2).to(qk.dtype)


class Matrix(nn.Linear):
    """A linear layer of a block, with what initialization and optimizers need to know of it.

    `muon_rows` are the rows of each matrix in its weight, which Muon orthogonalizes separately; ()
    if the weight is one matrix. `onto_residual`: its output is added to the residual stream.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        muon_rows: tuple[int, ...] = (),
        onto_residual: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.muon_rows = muon_rows
        self.onto_residual = onto_residual


class CausalSelfAttention(nn.Module):
    """Attend from each token to itself and the earlier tokens.

    With K < H, several query heads share a key and value head (grouped-query attention).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H = config.n_head
        K = config.kv_heads
        D = config.head_size
        self.layer = layer
        self.head_size = D
        self.heads = (H, K, K)  # of queries, keys and values
        self.dropout = config.dropout
        rows = (H * D, K * D, K * D)
        self.qkv = Matrix(config.n_embd, sum(rows), config.bias, muon_rows=rows)
        self.qk_norm = QKNorm(config) if config.qk_norm else None
        self.proj = Matrix(H * D, config.n_embd, config.bias, onto_residual=True)

    def project(self, x: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, T, D), keys and values (B, K, T, D) from `x` (B, T, C)."""
        H, K, _ = self.heads
        qkv = self.qkv(x).unflatten(-1, (H + 2 * K, self.head_size))  # (B, T, H + 2 K, D)
        qk, v = qkv.split_with_sizes((H + K, K), dim=2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rotary is not None:
            qk = rotate(qk, rotary)
        q, k = qk.split_with_sizes((H, K), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: "Tensor | BlockMask | None" = None,
    ) -> Tensor:
        q, k, v = self.project(x, rotary)
        causal = mask is None
        if cache is not None:
            cached = cache.position
            k, v = cache.append(self.layer, k, v)
            if cached > 0:
                causal = False  # PyTorch's causal mask starts at the first key, not after the cache
                T = x.shape[1]
                if T > 1 and mask is None:  # a single new token sees all keys
                    visible = torch.ones(T, cached + T, dtype=torch.bool, device=x.device)
                    mask = visible.tril(cached)
        dropout = self.dropout if self.training else 0.0
        if mask is None or isinstance(mask, Tensor):
            y = dot_product_attention(q=q, k=k, v=v, mask=mask, dropout=dropout, causal=causal)
        else:
            y = attend(q, k, v, mask)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return F.dropout(out, dropout) if dropout > 0 else out


# --------------------------------------------------------------------------- MLP and block


class MLP(nn.Module):
    """Apply the feed-forward layer: GELU (tanh form or exact), squared ReLU, or SwiGLU.

    Squared ReLU: So et al. 2021, section 3.2. SwiGLU: Shazeer 2020, equation 5; the first half of
    the rows of `up` computes its gate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.squared = config.mlp == "relu2"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        self.dropout = config.dropout
        hidden = config.hidden_size
        if self.gated:
            self.up = Matrix(config.n_embd, 2 * hidden, config.bias, muon_rows=(hidden, hidden))
        else:
            self.up = Matrix(config.n_embd, hidden, config.bias)
        self.down = Matrix(hidden, config.n_embd, config.bias, onto_residual=True)

    def activate_and_project(self, h: Tensor) -> Tensor:
        """Activate the output of `up` and project it onto the residual stream."""
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        elif self.squared:
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate=self.approximate)
        out: Tensor = self.down(h)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if torch.is_grad_enabled() and activates_twice(h.numel()) and not is_compiling():
            # the backward pass recomputes the activation, which is cheap and saves memory
            out = checkpoint(
                self.activate_and_project,
                h,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out = self.activate_and_project(h)
        return F.dropout(out, self.dropout) if self.training and self.dropout > 0 else out


class Block(nn.Module):
    """Apply attention, then the MLP.

    Each of them normalizes its input and adds its output to the residual stream. A block is the
    unit of compilation, activation checkpointing and sharding.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = build_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.norm_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
        mask: "Tensor | BlockMask | None" = None,
    ) -> Tensor:
        x = x + self.attn(self.norm_1(x), rotary=rotary, cache=cache, mask=mask)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out
