"""The decoder: GPT-2, Llama, Qwen3, NanoChat and what lies between, by `ModelConfig`.

Shapes: B batch, T tokens, C channels (n_embd), H query heads, K key and value heads, D head size,
V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import padded_vocab_size
from accel_gpt.errors import require
from accel_gpt.model.documents import attend, attention_mask, positions
from accel_gpt.model.head import Head
from accel_gpt.model.mlp import MLP, ResidualProjection


class KVCache:
    """Keys and values of the tokens seen so far, with room for `tokens`, at most `block_size`.

    `position` counts the tokens held; `GPT.forward` advances it, and 0 empties the cache. The room
    is made when a layer first appends, in the type that the layer computes in.
    """

    def __init__(self, config: ModelConfig, tokens: int | None = None) -> None:
        self.position = 0
        self._room = min(tokens or config.block_size, config.block_size)
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep `k` and `v`, both (B, K, T, D), and return all that `layer` holds."""
        room = self._layers[layer]
        if room is None:
            shape = (*k.shape[:2], self._room, k.shape[3])
            room = self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        start, new = self.position, k.shape[2]
        for held, added in zip(room, (k, v), strict=True):
            held.narrow(2, start, new).copy_(added)
        return room[0].narrow(2, 0, start + new), room[1].narrow(2, 0, start + new)


def rotary_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Cosines and signed sines (2, T, 1, D), float32, for `rotate`.

    RoFormer, Su et al. 2021, section 3.2.2, in the layout of transformers' Llama: channel i turns
    with channel i + D/2, so weights need no permutation between the two.
    """
    positions = torch.arange(config.block_size, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rotary_frequencies(config, device))  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    # the second half of the turned vector adds the first half, the first subtracts the second
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per token of each channel pair (D/2,), float32.

    `linear` is position interpolation, Chen et al. 2023, section 3.2. `llama3` divides what turns
    seldom in the original context by the factor and keeps what turns often, with a linear passage
    between (Llama 3 herd of models 2024, section 3.4.2, in the form of transformers).
    """
    D = config.head_size
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling == "none":
        return frequencies
    divided = frequencies / config.rope_factor
    if config.rope_scaling == "linear":
        return divided
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_block_size * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * divided + kept * frequencies


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the channel pairs of `x` (B, T, heads, D) by their positions, in float32.

    `rotary`: cosines and signed sines (2, T, 1, D) or (2, B, T, 1, D), see `rotary_table`.
    """
    cos, sin = rotary.unbind(0)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Attention of `q` (B, H, T, D) to `k` and `v` (B, K, S, D), as (B, H, T, D).

    On a CPU in float32: PyTorch 2.13 computes the backward pass in bf16 by many small products,
    which takes 2.5 to 9 times as long as in float32 (benchmarks/RESULTS.md).
    """
    given: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal}
    given["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, **given)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **given)
    return y.to(q.dtype)


def build_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the channels."""
    C, eps, weight = config.n_embd, config.norm_eps, config.norm_weight
    if config.norm == "rmsnorm":
        return nn.RMSNorm(C, eps=eps, elementwise_affine=weight)
    return nn.LayerNorm(C, eps=eps, elementwise_affine=weight, bias=config.bias)


class QKNorm(nn.Module):
    """RMSNorm over the channels of each query and key head (Henry et al. 2020, in Qwen3's form)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, eps, weight = config.head_size, config.norm_eps, config.norm_weight
        self.heads = (config.n_head, config.kv_heads)
        self.q = nn.RMSNorm(D, eps=eps, elementwise_affine=weight)
        self.k = nn.RMSNorm(D, eps=eps, elementwise_affine=weight)

    def forward(self, qk: Tensor, dim: int = 2) -> Tensor:
        """On (B, T, H + K, D), or with the heads in another dimension `dim`."""
        if self.q.weight is None:  # one norm for all heads
            return self.q(qk.float()).to(qk.dtype)
        q, k = qk.float().split_with_sizes(self.heads, dim)  # as its weights are
        return torch.cat((self.q(q), self.k(k)), dim).to(qk.dtype)


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
        self.proj = ResidualProjection(H * D, config.n_embd, bias=config.bias)

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
                mask, causal = _mask_after(past, x.shape[1], x.device), False
            k, v = cache.append(self.layer, k, v)
        if isinstance(mask, BlockMask):
            y = attend(q, k, v, mask)
        else:
            y = dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, causal)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout) if self.training and self.dropout else out


def _mask_after(past: int, T: int, device: torch.device) -> Tensor | None:
    """What T tokens may see after `past` others, (T, past + T); None: everything."""
    if T == 1:
        return None
    return torch.ones(T, past + T, dtype=torch.bool, device=device).tril(diagonal=past)


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


class GPT(nn.Module):
    """A decoder-only transformer over `vocab_size` real tokens.

    Embedding and head have `padded_vocab_size` rows, for the matrix units; the rows beyond the
    real tokens start at zero, get no gradient and are cut from the logits.
    """

    _no_split_modules = ["Block"]  # noqa: RUF012 - the name and type that Accelerate reads
    rotary: Tensor | None

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        require(vocab_size > 0, f"vocab_size is {vocab_size}; a model needs at least one token")
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size(vocab_size)
        learned = config.position == "learned"
        self.wte = nn.Embedding(self.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        self.norm_e = build_norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm_f = build_norm(config)
        self.head = Head(config, vocab_size)
        self.recompute = False  # activations of blocks in the backward pass, rather than keep them
        self.register_buffer("rotary", None, persistent=False)
        self.init_weights()

    @classmethod
    def unfilled(cls, config: ModelConfig, vocab_size: int) -> "GPT":
        """A model on the CPU whose weights are about to be loaded: nothing is drawn."""
        with torch.device("meta"):
            model = cls(config, vocab_size)
        model.to_empty(device="cpu")  # unties what was tied
        model.complete()
        return model

    def tie_weights(self) -> None:
        """Tie what the config ties; Accelerate calls this once FSDP2 has parted the weights."""
        if self.config.tie_embeddings:
            self.head.weight = self.wte.weight

    def complete(self) -> None:
        """Tie the weights, and fill the rotary table."""
        self.tie_weights()
        if self.config.position == "rope":
            self.rotary = rotary_table(self.config, self.wte.weight.device)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew from the global generator, and complete the model.

        GPT-2, Radford et al. 2019, section 2.3: normal(0, init_std), projections onto the residual
        stream divided by the root of their number, 2 n_layer; zero with `zero_init`.
        """
        self.complete()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = self.config.init_std
                if isinstance(module, ResidualProjection):
                    std = 0.0 if self.config.zero_init else std / math.sqrt(2 * len(self.blocks))
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for weight in (self.wte.weight, self.head.weight):
            weight[self.vocab_size :] = 0.0

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        documents: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) of `tokens` (B, T) int64, or with `targets` (B, T) the loss alone,
        their mean, or `by_row` the sum of each row (B,).

        With a cache, `tokens` are those after its `position`, and are added to it. `last_only`
        skips the head for all but the last token: logits (B, 1, V). With `documents` (B, T), the
        non-decreasing numbers of `documents.separate`, attention and positions begin anew in each.
        Raises `ValueError` where the tokens exceed `block_size`, and for `documents` with a cache;
        ids are not checked, as that would wait for the device.
        """
        start = 0 if cache is None else cache.position
        end = start + tokens.shape[1]
        if end > self.config.block_size:
            raise ValueError(
                f"the model got {end} tokens ({start} of them cached); model.block_size is "
                f"{self.config.block_size}, give it at most as many"
            )
        dropout = self.config.dropout if self.training else 0.0
        place, mask = None, None
        if documents is not None:
            if cache is not None:
                raise ValueError("the model got documents and a cache; give it one of them")
            place = positions(documents)
            mask = attention_mask(documents, self.config.head_size, dropout)
        x = self.wte(tokens)  # (B, T, C)
        if self.wpe is not None:
            x = x + (self.wpe.weight[start:end] if place is None else self.wpe(place))
        rotary = self.rotary
        if rotary is not None:
            rotary = rotary[:, start:end] if place is None else rotary[:, place]
        if dropout:
            x = F.dropout(x, dropout)
        if self.norm_e is not None:
            x = self.norm_e(x)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotary, None, mask, use_reentrant=False)
            else:
                x = block(x, rotary, cache, mask)
        if cache is not None:
            cache.position = end
        out: Tensor = self.head(self.norm_f(x[:, -1:] if last_only else x), targets, by_row)
        return out
