"""The layers of a decoder: norms, rotary positions, attention with its KV cache, MLP, block.

Shapes: B batch, T tokens, C channels (n_embd), H query heads, K key and value heads, D head size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import activates_twice
from accel_gpt.model.documents import attend


def build_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the channels."""
    C, eps, weight = config.n_embd, config.norm_eps, config.norm_weight
    if config.norm == "rmsnorm":
        return nn.RMSNorm(C, eps=eps, elementwise_affine=weight)
    return nn.LayerNorm(C, eps=eps, elementwise_affine=weight, bias=config.bias)


# --------------------------------------------------------------------------- rotary positions


def rotary_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Cosines and signed sines (2, T, 1, D), float32, for `rotate`.

    RoFormer, Su et al. 2021, section 3.2.2, in the layout of transformers' Llama: channel i rotates
    with channel i + D/2, so weights need no permutation between the two.
    """
    positions = torch.arange(config.block_size, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rotary_frequencies(config, device))  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scaling == "yarn":
        factor = config.rope_attention_factor or 0.1 * math.log(max(config.rope_factor, 1)) + 1
        cos, sin = cos * factor, sin * factor
    # the second half of the rotated vector adds the first half, the first subtracts the second
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per token of each channel pair (D/2,), float32.

    `linear` is position interpolation, Chen et al. 2023, section 3.2. `llama3` divides the low
    frequencies by the factor and keeps the high ones, with a linear passage between (Llama 3 herd
    of models 2024, section 3.4.2, in the form of transformers). So does `yarn`, whose passage is
    linear in the channel, not the frequency (Peng et al. 2023, section 3.2, likewise).
    """
    D = config.head_size
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling == "none":
        return frequencies
    divided = frequencies / config.rope_factor
    if config.rope_scaling == "linear":
        return divided
    length = config.rope_original_block_size
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        bounds = (
            length / (2 * math.pi * n) for n in (config.rope_beta_fast, config.rope_beta_slow)
        )
        fast, slow = (D / 2 * math.log(bound, config.rope_theta) for bound in bounds)
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), D - 1)
        pairs = torch.arange(D // 2, device=device)
        kept = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return (1 - kept) * divided + kept * frequencies


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the channel pairs of `x` (B, T, heads, D) by their positions, in float32.

    `rotary`: cosines and signed sines (2, T, 1, D) or (2, B, T, 1, D), see `rotary_table`.
    """
    cos, sin = rotary.unbind(0)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


# --------------------------------------------------------------------------- attention


class KVCache:
    """Keys and values of the tokens seen so far, at most `tokens` of them, or `block_size`.

    `position` counts the cached tokens; `GPT.forward` advances it, and 0 empties the cache. A
    layer's buffers are allocated when it first appends, in the type that it computes in.
    """

    def __init__(self, config: ModelConfig, tokens: int | None = None) -> None:
        self.position = 0
        self._capacity = min(tokens or config.block_size, config.block_size)
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k` and `v`, both (B, K, T, D); returns all cached keys and values of `layer`."""
        buffers = self._layers[layer]
        if buffers is None:
            shape = (*k.shape[:2], self._capacity, k.shape[3])
            buffers = self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        start, new = self.position, k.shape[2]
        for buffer, added in zip(buffers, (k, v), strict=True):
            buffer.narrow(2, start, new).copy_(added)
        return buffers[0].narrow(2, 0, start + new), buffers[1].narrow(2, 0, start + new)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Attention of `q` (B, H, T, D) to `k` and `v` (B, K, S, D), as (B, H, T, D).

    On a CPU in float32: PyTorch 2.13 computes the backward pass in bf16 by many small products,
    which takes 2.5 to 9 times as long as in float32 (docs/speed.md).
    """
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
    return y.to(q.dtype)


class QKNorm(nn.Module):
    """RMSNorm over the channels of each query and key head (Henry et al. 2020, in Qwen3's form)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, eps, weight = config.head_size, config.norm_eps, config.norm_weight
        self.heads = (config.n_head, config.kv_heads)
        self.q = nn.RMSNorm(D, eps=eps, elementwise_affine=weight)
        self.k = nn.RMSNorm(D, eps=eps, elementwise_affine=weight)

    def forward(self, qk: Tensor) -> Tensor:
        """Normalize queries and keys (B, T, H + K, D), in float32."""
        if self.q.weight is None:  # one norm for all heads
            return self.q(qk.float()).to(qk.dtype)
        q, k = qk.float().split_with_sizes(self.heads, 2)
        return torch.cat((self.q(q), self.k(k)), 2).to(qk.dtype)


class CausalSelfAttention(nn.Module):
    """Attention to this token and those before it; K < H heads share keys and values (GQA)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, K, D = config.n_head, config.kv_heads, config.head_size
        self.layer = layer
        self.head_size = D
        self.heads = (H, K, K)
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, (H + 2 * K) * D, bias=config.bias)
        self.qk_norm = QKNorm(config) if config.qk_norm else None
        self.proj = nn.Linear(H * D, config.n_embd, bias=config.bias)

    def project(self, x: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, K, T, D) of `x` (B, T, C)."""
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
        mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        q, k, v = self.project(x, rotary)
        causal = mask is None
        if cache is not None:
            if past := cache.position:  # new tokens see all past ones, and each other causally
                T, causal = x.shape[1], False
                if T > 1:
                    mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
            k, v = cache.append(self.layer, k, v)
        if isinstance(mask, BlockMask):
            y = attend(q, k, v, mask)
        else:
            y = dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, causal)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout) if self.training and self.dropout else out


# --------------------------------------------------------------------------- MLP and block


class MLP(nn.Module):
    """The feed-forward layer: GELU (tanh form or exact), squared ReLU, or a gated SiLU.

    SwiGLU: Shazeer 2020, equation 5; the first half of the rows of `up` is its gate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.squared = config.mlp == "relu2"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        self.dropout = config.dropout
        width = config.hidden_size * (2 if self.gated else 1)
        self.up = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down = nn.Linear(config.hidden_size, config.n_embd, bias=config.bias)

    def activate_and_project(self, h: Tensor) -> Tensor:
        """Activate the output of `up` and project it onto the residual stream."""
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        elif self.squared:  # So et al. 2021, section 3.2
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate=self.approximate)
        out: Tensor = self.down(h)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if torch.is_grad_enabled() and activates_twice(h.numel()) and not is_compiling():
            # the activation, which is cheap, is computed again in the backward pass, not kept
            recompute = self.activate_and_project
            out = checkpoint(recompute, h, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self.activate_and_project(h)
        return F.dropout(out, self.dropout) if self.training and self.dropout else out


class Block(nn.Module):
    """Attention and MLP, each with its norm before and its residual around.

    The unit of compilation, activation checkpointing and sharding.
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
        mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        x = x + self.attn(self.norm_1(x), rotary, cache, mask)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out
