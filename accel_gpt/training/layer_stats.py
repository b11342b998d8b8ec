"""Statistics of each layer at a step: of weights, gradients, updates and activations.

    layers/weight_norm/PART     norm of its weights after the update
    layers/grad_norm/PART       of its gradient, over all ranks, before clipping: the root of their
                                sum of squares is train/grad_norm
    layers/update_norm/PART     of the difference that the optimizer made to its weights
    layers/update_ratio/PART    update_norm over weight_norm
    layers/rms/LAYER            root mean square of the block's output
    layers/attn_rms/LAYER       of the output of its attention
    layers/mlp_rms/LAYER        of the output of its MLP
    layers/attn_entropy/LAYER   entropy in nats of the attention weights, mean over queries, heads
    layers/dead_units/LAYER     share of hidden units of the MLP whose input to the activation (with
                                swiglu, the gate) is above 0 for no token

PART: `embedding`, `position`, `00.attn`, `00.mlp` (each with its norm), ..., `norm`, `head` where
it is not tied. The last five are of the step's last micro-batch on each rank, with the weights
after the update, without dropout; entropy of its first `ENTROPY_ROWS` sequences.

Shapes: B batch, T tokens, C channels, H query heads, K key and value heads, D head size.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.model.documents import dense_mask
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.layers import CausalSelfAttention
from accel_gpt.model.sharding import is_sharded

ENTROPY_ROWS = 2


def parts(gpt: GPT) -> dict[str, list[nn.Parameter]]:
    """The weights of each part, none of them twice; under FSDP sharded or not, as they are now."""
    modules: dict[str, list[Any]] = {"embedding": [gpt.wte], "position": [gpt.wpe]}
    modules["embedding_norm"] = [gpt.norm_e]
    blocks: list[Any] = list(gpt.blocks)
    for layer, block in enumerate(blocks):
        modules[f"{layer:02d}.attn"] = [block.norm_1, block.attn]
        modules[f"{layer:02d}.mlp"] = [block.norm_2, block.mlp]
    modules |= {"norm": [gpt.norm_f], "head": [gpt.head]}
    seen: set[nn.Parameter] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, owners in modules.items():
        weights = [w for owner in owners if owner for w in owner.parameters() if w not in seen]
        seen.update(weights)
        if weights:
            found[name] = weights
    return found


def copies(gpt: GPT) -> dict[str, list[Tensor]]:
    """Copies of the weights of `parts`; under FSDP of the local shards."""
    return {name: [w.detach().clone() for w in weights] for name, weights in parts(gpt).items()}


def layer_stats(
    gpt: GPT,
    before: dict[str, list[Tensor]],
    grad_norm: Tensor,
    tokens: Tensor,
    documents: Tensor | None,
    accelerator: Accelerator,
) -> dict[str, float]:
    """All statistics of an update of the weights `before`; a collective.

    `grad_norm`: of the whole gradient before clipping, (). `tokens` and `documents`: (B, T), the
    model's input. No random number is drawn, and nothing is compiled anew but FlexAttention by
    itself, where a compiled model uses it.
    """
    stats = weight_stats(gpt, before, grad_norm)  # first: a forward pass has FSDP gather weights
    stats |= activation_stats(gpt, tokens, documents, accelerator)
    values: list[float] = torch.stack([value.float() for value in stats.values()]).tolist()
    return {f"layers/{name}": value for name, value in zip(stats, values, strict=True)}


def weight_stats(gpt: GPT, before: dict[str, list[Tensor]], grad_norm: Tensor) -> dict[str, Tensor]:
    """Norms of weights, gradients and updates of each part, each ()."""
    weights, grads, updates = {}, {}, {}
    for name, now in parts(gpt).items():
        pairs = zip(now, before[name], strict=True)
        weights[name] = norm([weight.detach() for weight in now])
        grads[name] = norm([weight.grad for weight in now if weight.grad is not None])
        updates[name] = norm([weight.detach() - old for weight, old in pairs])
    clipped = torch.stack(list(grads.values())).norm()
    unclip = torch.where(clipped > 0, full_tensor(grad_norm) / clipped, 1.0)
    return {
        **{f"weight_norm/{name}": value for name, value in weights.items()},
        **{f"grad_norm/{name}": value * unclip for name, value in grads.items()},
        **{f"update_norm/{name}": value for name, value in updates.items()},
        **{f"update_ratio/{name}": value / weights[name] for name, value in updates.items()},
    }


def norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together, over all ranks, ()."""
    return full_tensor(nn.utils.get_total_norm(tensors))


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of one that FSDP shards."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def activation_stats(
    gpt: GPT, tokens: Tensor, documents: Tensor | None, accelerator: Accelerator
) -> dict[str, Tensor]:
    """Statistics of a forward pass, all-reduced over the ranks, each ()."""
    found: dict[str, Tensor] = {}  # means over this rank; of dead_units 1 for each unit in use
    with evaluating(gpt, compiled=False), record_activations(gpt, found, documents):
        gpt(tokens, documents=documents, last_only=True)
    for name, value in found.items():
        mean = accelerator.reduce(value, "mean") if accelerator.num_processes > 1 else value
        if "rms" in name:
            mean = mean.sqrt()
        elif name.startswith("dead_units"):
            mean = (mean == 0).float().mean()
        found[name] = mean
    return found


@contextmanager
def record_activations(
    gpt: GPT, found: dict[str, Tensor], documents: Tensor | None
) -> Iterator[None]:
    """Record the statistics of a forward pass in `found`."""

    def square(name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        found[name] = out.float().square().mean()

    def attend(name: str, module: CausalSelfAttention, args: Any, out: Tensor) -> None:
        x, rotary, *_ = args
        found[name] = entropy(module, x, rotary, documents)

    def gate(name: str, gated: bool, module: nn.Module, args: Any, out: Tensor) -> None:
        units = out.chunk(2, dim=-1)[0] if gated else out  # (B, T, hidden)
        found[name] = (units > 0).flatten(0, -2).any(0).float()

    blocks: list[Any] = list(gpt.blocks)
    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks):
            layer = f"{number:02d}"
            for module, hook in (
                (block, partial(square, f"rms/{layer}")),
                (block.attn, partial(square, f"attn_rms/{layer}")),
                (block.attn, partial(attend, f"attn_entropy/{layer}")),
                (block.mlp, partial(square, f"mlp_rms/{layer}")),
                (block.mlp.up, partial(gate, f"dead_units/{layer}", block.mlp.gated)),
            ):
                hooks.enter_context(module.register_forward_hook(hook))
        yield


def entropy(
    attention: CausalSelfAttention, x: Tensor, rotary: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Mean entropy in nats of the attention weights of the first sequences of `x` (B, T, C), ().

    The scores are computed again, in float32, of one head at a time.
    """
    if rotary is not None and rotary.ndim == 5:  # with documents each row has its own positions
        rotary = rotary[:, :ENTROPY_ROWS]
    q, k, _ = attention.project(x[:ENTROPY_ROWS], rotary)
    B, H, T, D = q.shape
    masks = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device).tril().expand(B, 1, T, T)
    if documents is not None:
        masks = dense_mask(documents[:ENTROPY_ROWS])
    total = torch.zeros((), device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        keys = k.float().repeat_interleave(H // k.shape[1], dim=1).transpose(2, 3)  # (B, H, D, T)
        for row, head in ((row, head) for row in range(B) for head in range(H)):
            scores = q[row, head].float() @ keys[row, head] * D**-0.5  # (T, T)
            logs = scores.masked_fill(~masks[row, 0], float("-inf")).log_softmax(-1)
            total -= (logs.exp() * logs.masked_fill(~masks[row, 0], 0.0)).sum()
    return total / (B * H * T)
