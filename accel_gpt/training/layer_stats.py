"""Figures of each layer at a step: of weights, gradients and updates, and what tokens do in it.

    layers/weight_norm/PART     norm of its weights after the update
    layers/grad_norm/PART       of its gradient, over all processes, before clipping: the root of
                                their sum of squares is train/grad_norm
    layers/update_norm/PART     of what the optimizer added to its weights
    layers/update_ratio/PART    update_norm over weight_norm
    layers/rms/LAYER            root mean square of the block's output
    layers/attn_rms/LAYER       of what its attention adds to the residual stream
    layers/mlp_rms/LAYER        of what its MLP adds
    layers/attn_entropy/LAYER   entropy in nats of what a query attends to, mean over queries, heads
    layers/dead_units/LAYER     share of hidden units of the MLP that no token switches on: their
                                input to the activation (of swiglu, the gate's) is above 0 nowhere

PART: `embedding`, `position`, `00.attn`, `00.mlp` (each with its norm), ..., `norm`, `head` where
it is not tied. The last five are of the step's last micro-batch on each process, with the weights
after the update, without dropout; entropy of its first `ENTROPY_ROWS` sequences.

Shapes: B batch, T tokens, C channels, H query heads, K key and value heads, D head size.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.model.documents import dense_mask
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.layers import CausalSelfAttention
from accel_gpt.optim.adamw import is_sharded

ENTROPY_ROWS = 2
CHUNK = 2**24
"""Attention scores in memory at a time: 64 MiB in float32."""


def parts(gpt: GPT) -> dict[str, list[nn.Parameter]]:
    """The weights of each part, none of them twice; under FSDP as they are at the moment."""
    modules: dict[str, Sequence[nn.Module | None]] = {
        "embedding": [gpt.wte],
        "position": [gpt.wpe],
        "embedding_norm": [gpt.norm_e],
    }
    for layer, block in numbered(gpt):
        modules[f"{layer}.attn"] = [block.norm_1, block.attn]
        modules[f"{layer}.mlp"] = [block.norm_2, block.mlp]
    modules |= {"norm": [gpt.norm_f], "head": [gpt.head]}
    seen: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, owners in modules.items():
        weights = [weight for owner in owners if owner for weight in owner.parameters()]
        new = [weight for weight in weights if id(weight) not in seen]
        seen.update(map(id, new))
        if new:
            found[name] = new
    return found


def numbered(gpt: GPT) -> Iterator[tuple[str, Any]]:
    """The blocks as `00`, `01`, ..."""
    for layer, block in enumerate(gpt.blocks):
        yield f"{layer:02d}", block


def copies(gpt: GPT) -> dict[str, list[Tensor]]:
    """The weights of `parts` as they are now; under FSDP the share of this process."""
    return {name: [w.detach().clone() for w in weights] for name, weights in parts(gpt).items()}


def layer_stats(
    gpt: GPT,
    before: dict[str, list[Tensor]],
    grad_norm: Tensor,
    tokens: Tensor,
    documents: Tensor | None,
    accelerator: Accelerator,
) -> dict[str, float]:
    """All figures of an update that led away from the weights `before`; a collective.

    `grad_norm`: of the whole gradient before clipping, (). `tokens` and `documents`: (B, T) as the
    model takes them. No random number is drawn, and nothing is compiled anew but FlexAttention by
    itself, where a compiled model uses it.
    """
    figures = weight_figures(gpt, before, grad_norm)  # first: what follows has FSDP gather weights
    figures |= token_figures(gpt, tokens, documents, accelerator)
    values: list[float] = torch.stack([value.float() for value in figures.values()]).tolist()
    return {f"layers/{name}": value for name, value in zip(figures, values, strict=True)}


def weight_figures(
    gpt: GPT, before: dict[str, list[Tensor]], grad_norm: Tensor
) -> dict[str, Tensor]:
    """Norms of weights, gradients and updates of each part, each ()."""
    weights, grads, updates = {}, {}, {}
    for name, now in parts(gpt).items():
        pairs = zip(now, before[name], strict=True)
        weights[name] = norm([weight.detach() for weight in now])
        grads[name] = norm([weight.grad for weight in now if weight.grad is not None])
        updates[name] = norm([weight.detach() - old for weight, old in pairs])
    clipped = torch.stack(list(grads.values())).norm()
    unclip = torch.where(clipped > 0, whole(grad_norm) / clipped, 1.0)
    return {
        **{f"weight_norm/{name}": value for name, value in weights.items()},
        **{f"grad_norm/{name}": value * unclip for name, value in grads.items()},
        **{f"update_norm/{name}": value for name, value in updates.items()},
        **{f"update_ratio/{name}": value / weights[name] for name, value in updates.items()},
    }


def norm(tensors: list[Tensor]) -> Tensor:
    """Norm of all together, (); of FSDP's parts over all processes."""
    return whole(nn.utils.get_total_norm(tensors))


def whole(tensor: Tensor) -> Tensor:
    """What FSDP's processes hold a part of each, put together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@dataclass
class Seen:
    """What a forward pass showed, by the names of the figures."""

    squares: dict[str, Tensor] = field(default_factory=dict)  # means, each ()
    entropies: dict[str, Tensor] = field(default_factory=dict)  # each ()
    alive: dict[str, Tensor] = field(
        default_factory=dict
    )  # 1 where a token switched it on, (hidden,)


def token_figures(
    gpt: GPT, tokens: Tensor, documents: Tensor | None, accelerator: Accelerator
) -> dict[str, Tensor]:
    """What the tokens of all processes do in each layer, each figure ()."""

    def over_processes(values: dict[str, Tensor]) -> dict[str, Tensor]:
        own = torch.stack(list(values.values()))  # of as many tokens on each: a mean of means
        mean = accelerator.reduce(own, "mean") if accelerator.num_processes > 1 else own
        return dict(zip(values, mean, strict=True))

    seen = Seen()
    with evaluating(gpt, compiled=False), watched(gpt, seen, visible(tokens, documents)):
        gpt(tokens, documents=documents, last_only=True)
    alive = over_processes(seen.alive)
    return {
        **{name: value.sqrt() for name, value in over_processes(seen.squares).items()},
        **over_processes(seen.entropies),
        **{name: (value == 0).float().mean() for name, value in alive.items()},
    }


@contextmanager
def watched(gpt: GPT, seen: Seen, mask: Tensor) -> Iterator[None]:
    """Let a forward pass note what it shows in `seen`; `mask` as `visible` makes it."""

    def square(name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        seen.squares[name] = out.float().square().mean()

    def attend(name: str, module: CausalSelfAttention, args: Any, out: Tensor) -> None:
        x, rotary, *_ = args
        seen.entropies[name] = entropy(module, x, rotary, mask)

    def switch(name: str, gated: bool, module: nn.Module, args: Any, out: Tensor) -> None:
        gate = out.chunk(2, dim=-1)[0] if gated else out  # (B, T, hidden)
        seen.alive[name] = (gate > 0).flatten(0, -2).any(0).float()

    with contextlib.ExitStack() as hooks:
        for layer, block in numbered(gpt):
            for module, hook in (
                (block, partial(square, f"rms/{layer}")),
                (block.attn, partial(square, f"attn_rms/{layer}")),
                (block.attn, partial(attend, f"attn_entropy/{layer}")),
                (block.mlp, partial(square, f"mlp_rms/{layer}")),
                (block.mlp.up, partial(switch, f"dead_units/{layer}", block.mlp.gated)),
            ):
                hooks.enter_context(module.register_forward_hook(hook))
        yield


def visible(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """What the queries of the first rows may see: (T, T) or (rows, 1, T, T), bool."""
    if documents is not None:
        return dense_mask(documents[:ENTROPY_ROWS])
    T = tokens.shape[1]
    return torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()


def entropy(
    attention: CausalSelfAttention, x: Tensor, rotary: Tensor | None, mask: Tensor
) -> Tensor:
    """Mean entropy in nats of the attention of the first rows of `x` (B, T, C), ().

    Their scores are computed anew, in float32, a few queries at a time.
    """
    if rotary is not None and rotary.ndim == 5:  # with documents each row has its own positions
        rotary = rotary[:, :ENTROPY_ROWS]
    q, k, _ = attention.project(x[:ENTROPY_ROWS], rotary)
    B, H, T, D = q.shape
    size = max(1, CHUNK // (B * H * T))
    total = torch.zeros((), device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        keys = k.float().repeat_interleave(H // k.shape[1], dim=1).transpose(2, 3)  # (B, H, D, T)
        some = zip(torch.split(q.float(), size, 2), torch.split(mask, size, -2), strict=True)
        for queries, allowed in some:
            scores = (queries @ keys * D**-0.5).masked_fill(~allowed, float("-inf"))
            logs = scores.log_softmax(-1)
            total -= (logs.exp() * logs.masked_fill(~allowed, 0.0)).sum()
    return total / (B * H * T)
