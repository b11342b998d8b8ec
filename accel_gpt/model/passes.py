"""Operations with a backward pass of their own: fewer passes over memory than autograd's.

Without compiled code squared ReLU, rotary positions and, on a CPU, RMSNorm are made of small
operations that each read and write everything. Compiled, the plain forms are one pass anyway. And
attention in bf16 on a CPU, whose backward pass in PyTorch leaves the matrix units idle.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.compiler import is_compiling

from accel_gpt.model.cost import ATTENTION_ROWS as ROWS
from accel_gpt.model.cost import attends_by_products

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Elsewhere products in bf16 are slower than PyTorch's backward pass of attention."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm, Zhang & Sennrich 2019, over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        single = x.device.type == "cpu" and x.dtype == torch.float32
        if not single or self.eps is None or is_compiling():
            return super().forward(x)
        if torch.is_grad_enabled():
            x = _apply(_Normalize, x, self.eps)
        else:
            x = x * _inverse_rms(x, self.eps)
        return x if self.weight is None else x * self.weight


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU, So et al. 2021, section 3.2."""
    if is_compiling() or not torch.is_grad_enabled():
        return F.relu(x).square()
    return _apply(_SquaredReLU, x)


def rotate(x: Tensor, rotary: Tensor, way: int = 1) -> Tensor:
    """Turn the channel pairs of `x` (B, T, heads, D) by their positions; computed in float32.

    `rotary`: cosines and signed sines (2, T, 1, D) or (2, B, T, 1, D), see `rotary_table`.
    `way`: 1, or -1 to turn back.
    """
    if torch.is_grad_enabled() and not is_compiling():
        return _apply(_Rotate, x, rotary, way)
    cos, sin = rotary.unbind(0)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=way).to(x.dtype)


def products_pay(q: Tensor, k: Tensor) -> bool:
    """Whether `causal_attention` is faster than PyTorch's for `q` (B, H, T, D) and `k`."""
    new = q.shape[2] == k.shape[2] and attends_by_products(q.shape[2])
    trains = q.dtype == torch.bfloat16 and q.requires_grad
    return new and trains and q.device.type == "cpu" and HAS_AVX512


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `q` (B, H, T, D) to `k` and `v` (B, K, T, D), as (B, H, T, D).

    PyTorch's forward pass; the backward pass is made of whole products.
    """
    return _apply(_Attend, q, k, v)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    margin = torch.scalar_tensor(eps)
    return torch.addcmul(margin, length, length, value=1 / x.shape[-1]).rsqrt_()


def _apply(function: type[Function], *given: Any) -> Tensor:
    out: Tensor = function.apply(*given)  # type: ignore[no-untyped-call]
    return out


class _Normalize(Function):
    """Over the root of the mean of the squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = _inverse_rms(x, eps)
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        along = (grad * x).sum(-1, keepdim=True)  # what would only change the length
        return (grad * scale).addcmul_(x, along.mul_(scale**3).div_(-x.shape[-1])), None


class _SquaredReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = F.relu(x)
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return (grad * x).mul_(2)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor, way: int) -> Tensor:
        ctx.save_for_backward(rotary)
        ctx.way = way
        return rotate(x, rotary, way)  # gradients are off in here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rotary,) = ctx.saved_tensors
        return rotate(grad, rotary, -ctx.way), None, None


class _Attend(Function):
    """Scores are computed again, some queries at a time, without the keys after the last.

    In float32, as PyTorch has them: rounded to bf16, large ones would be off by several percent.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        (B, H, T, D), K = q.shape, k.shape[1]
        scale = 1 / math.sqrt(D)
        q, grad = q.flatten(0, 1), grad.flatten(0, 1)  # (B H, T, D)
        k, v = (x.repeat_interleave(H // K, 1).flatten(0, 1) for x in (k, v))
        wide_q, by_k, by_v = q.float() * scale, k.float().mT, v.mT.contiguous()
        dq = torch.empty_like(q)
        later = torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).triu(1)
        for start in reversed(range(0, T, ROWS)):  # the last queries see all keys
            end = min(start + ROWS, T)
            asked, above = q[:, start:end], grad[:, start:end]
            p = wide_q[:, start:end] @ by_k[..., :end]
            p[..., start:].masked_fill_(later[: end - start, : end - start], float("-inf"))
            p = p.softmax(-1)
            p = p.to(q.dtype)  # a line of its own: the scores are freed before
            slopes = torch._softmax_backward_data(above @ by_v[..., :end], p, -1, p.dtype)
            dq[:, start:end] = slopes @ k[:, :end]
            if end == T:
                dk, dv = slopes.mT @ asked, p.mT @ above
            else:
                dk[:, :end] += slopes.mT @ asked
                dv[:, :end] += p.mT @ above
        if H != K:
            dk, dv = (x.view(B, K, H // K, T, D).sum(2) for x in (dk, dv))
        dq, dk = dq.mul_(scale), dk.mul_(scale)
        return dq.view(B, H, T, D), dk.view(B, K, T, D), dv.view(B, K, T, D)
