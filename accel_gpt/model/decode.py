"""One more token of each row, from the weights alone: what `GPT.forward` computes with a cache.

A token of a small model takes what its operations take to start, not what they compute; here are
about half of the forward pass's, and no modules. Shapes as in `gpt.py`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_gpt.model.gpt import GPT, Block, KVCache, QKNorm


class Decoder:
    """The step from one token to the logits of the next, with the weights as they are when made.

    For evaluation: there is no dropout.
    """

    def __init__(self, model: GPT, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        by_hand = model.wte.weight.device.type == "cpu"  # RMSNorms
        blocks = (block for block in model.blocks if isinstance(block, Block))
        self._blocks = [_BlockStep(block, by_hand) for block in blocks]
        self._norm_e = None if model.norm_e is None else _norm(model.norm_e, by_hand)
        self._norm_f = _norm(model.norm_f, by_hand)

    @staticmethod
    def suits(model: GPT) -> bool:
        """Whether the weights are all there is to the model: nothing is sharded, hooked, wrapped or
        cast on the way.
        """
        changed = any(
            "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
            for module in model.modules()
        )
        plain = type(model) is GPT and all(type(block) is Block for block in model.blocks)
        return plain and not changed and not torch.is_autocast_enabled(model.wte.weight.device.type)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after `tokens` (B,), which are added to the cache."""
        model, place = self.model, self.cache.position
        x = F.embedding(tokens, model.wte.weight)  # (B, C)
        if model.wpe is not None:
            x = x + model.wpe.weight[place]
        if self._norm_e is not None:
            x = self._norm_e(x)
        rotary = None if model.rotary is None else model.rotary[:, place]  # (2, 1, D)
        for block in self._blocks:
            x = block(x, rotary, self.cache)
        self.cache.position += 1
        return model.head.logits(self._norm_f(x))


class _BlockStep:
    def __init__(self, block: Block, by_hand: bool) -> None:
        attn, mlp = block.attn, block.mlp
        (self.H, self.K, _), self.D = attn.heads, attn.head_size
        self.layer = attn.layer
        self.norm_1, self.norm_2 = _norm(block.norm_1, by_hand), _norm(block.norm_2, by_hand)
        self.qkv, self.proj = _Product(attn.qkv), _Product(attn.proj)
        self.qk_norm = None if attn.qk_norm is None else _qk_norm(attn.qk_norm, by_hand)
        self.up, self.down, self.activate = _Product(mlp.up), _Product(mlp.down), mlp.activate

    def __call__(self, x: Tensor, rotary: Tensor | None, cache: KVCache) -> Tensor:
        """What the block makes of `x` (B, C)."""
        H, K, D = self.H, self.K, self.D
        qkv = self.qkv(self.norm_1(x)).view(-1, H + 2 * K, 1, D)  # T = 1 after the heads
        qk, v = qkv.split_with_sizes((H + K, K), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rotary is not None:
            cos, sin = rotary.unbind(0)
            first, second = qk.chunk(2, dim=-1)  # `rotate`, with two operations in one
            qk = torch.addcmul(qk * cos, torch.cat((second, first), dim=-1), sin).to(qkv.dtype)
        q, k = qk.split_with_sizes((H, K), dim=1)
        keys, values = cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=H != K)
        x = self.proj.added(x, y.reshape(-1, H * D))
        return self.down.added(x, self.activate(self.up(self.norm_2(x))))


class _Product:
    """A linear layer on (B, C)."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight.t(), layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """`x` and the product with `y`."""
        x = torch.addmm(x, y, self.weight)
        return x if self.bias is None else x.add_(self.bias)


class _RMSNorm:
    """`nn.RMSNorm` in four operations, where a CPU takes ten."""

    def __init__(self, module: nn.RMSNorm, weight: Tensor | None) -> None:
        self.weight, self.size = weight, module.normalized_shape[-1]
        self.eps = torch.tensor(module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * torch.addcmul(self.eps, length, length, value=1 / self.size).rsqrt_()
        return x if self.weight is None else x.mul_(self.weight)


def _norm(module: nn.Module, by_hand: bool) -> Callable[[Tensor], Tensor]:
    if by_hand and isinstance(module, nn.RMSNorm):
        return _RMSNorm(module, module.weight)
    return module.forward


def _qk_norm(module: QKNorm, by_hand: bool) -> Callable[[Tensor], Tensor]:
    """Of (B, H + K, 1, D)."""
    if not by_hand:
        return lambda qk: module(qk.transpose(1, 2)).transpose(1, 2)
    weight = None
    if module.q.weight is not None:
        H, K = module.heads
        rows = module.q.weight.expand(H, -1), module.k.weight.expand(K, -1)
        weight = torch.cat(rows).unsqueeze(1)  # (H + K, 1, D)
    return _RMSNorm(module.q, weight)
