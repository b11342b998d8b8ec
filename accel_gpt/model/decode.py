"""One more token of each row, from the weights alone: what `GPT.forward` computes with a cache.

A token of a small model takes what its operations take to start, not what they compute; here are
about two thirds of the forward pass's, and no modules. Shapes as in `gpt.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_gpt.model.gpt import GPT, Block, KVCache, rotate

SMALL = 2**20
"""Values of a weight that a processor's cache holds: there a product by one row takes a third less
time where the weight lies the other way round; from memory the gain is not worth a copy."""


class Decoder:
    """The step from one token to the logits of the next, with the weights as they are when made.

    For evaluation: there is no dropout.
    """

    def __init__(self, model: GPT, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self._head = _Product(model.head)
        self._blocks = [_BlockStep(block) for block in model.blocks if isinstance(block, Block)]

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

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after `tokens` (B,), which are added to the cache."""
        model, place = self.model, self.cache.position
        x = F.embedding(tokens, model.wte.weight)  # (B, C)
        if model.wpe is not None:
            x = x + model.wpe.weight[place]
        if model.norm_e is not None:
            x = model.norm_e.forward(x)
        rotary = None if model.rotary is None else model.rotary[:, place]  # (2, 1, D)
        for block in self._blocks:
            x = block(x, rotary, self.cache)
        self.cache.position += 1
        return model.head.real(self._head(model.norm_f.forward(x)))


class _BlockStep:
    def __init__(self, block: Block) -> None:
        attn, mlp = block.attn, block.mlp
        (self.H, self.K, _), self.D = attn.heads, attn.head_size
        self.layer = attn.layer
        self.norm_1, self.norm_2 = block.norm_1.forward, block.norm_2.forward
        self.qkv, self.proj = _Product(attn.qkv), _Product(attn.proj)
        self.qk_norm = None if attn.qk_norm is None else attn.qk_norm.forward
        self.up, self.down, self.activate = _Product(mlp.up), _Product(mlp.down), mlp.activate

    def __call__(self, x: Tensor, rotary: Tensor | None, cache: KVCache) -> Tensor:
        """What the block makes of `x` (B, C)."""
        H, K, D = self.H, self.K, self.D
        qkv = self.qkv(self.norm_1(x)).view(-1, H + 2 * K, 1, D)  # T = 1 after the heads
        qk, v = qkv.split_with_sizes((H + K, K), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk, 1)
        if rotary is not None:
            qk = rotate(qk, rotary)
        q, k = qk.split_with_sizes((H, K), dim=1)
        keys, values = cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=H != K)
        x = self.proj.added(x, y.reshape(-1, H * D))
        return self.down.added(x, self.activate(self.up(self.norm_2(x))))


class _Product:
    """A linear layer on (B, C)."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight.t(), layer.bias
        if layer.weight.device.type == "cpu" and layer.weight.numel() <= SMALL:
            self.weight = self.weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """`x` and the product with `y`."""
        x = torch.addmm(x, y, self.weight)
        return x if self.bias is None else x.add_(self.bias)
