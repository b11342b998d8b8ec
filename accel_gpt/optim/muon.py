"""Muon for the matrices of the blocks, AdamW for all the rest, as one optimizer.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the update is that of `torch.optim.Muon`,
which the tests compare it with. Matrices of one shape are stacked, and a stack is orthogonalized by
batched products.

Shapes: N matrices of R rows and C columns; a fused weight holds several matrices, one below the
other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_gpt.config.optim import STACK
from accel_gpt.model.gpt import CausalSelfAttention
from accel_gpt.model.mlp import MLP
from accel_gpt.optim.adamw import GuardedAdamW
from accel_gpt.optim.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ROWS = "rows"  # of each matrix in a weight of the group, None: it is one; Muon's groups have it
MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024; those of torch.optim.Muon
ITERATIONS = 5  # the same
TINY = 1e-7  # the same: least norm that a matrix is divided by
Parts = dict[tuple[int, ...], list[Tensor]]


def hidden_matrices(model: nn.Module) -> Parts:
    """The weights that Muon takes: those of attention and MLP, by the rows of their matrices.

    Queries, keys and values are three matrices though they are one weight, and so are gate and up
    of a SwiGLU: each is orthogonalized by itself. No rows: the weight is one matrix.
    """
    found: Parts = {}
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            rows = tuple(heads * module.head_size for heads in module.heads)
            found.setdefault(rows, []).append(module.qkv.weight)
            found.setdefault((), []).append(module.proj.weight)
        elif isinstance(module, MLP):
            width = module.up.out_features // 2
            rows = (width, width) if module.gated else ()
            found.setdefault(rows, []).append(module.up.weight)
            found.setdefault((), []).append(module.down.weight)
    kept = {rows: [w for w in weights if w.requires_grad] for rows, weights in found.items()}
    return {rows: weights for rows, weights in kept.items() if weights}


def orthogonalize(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices (N, R, C), nearly: singular values of 0.7 to 1.2.

    Five steps of Newton and Schulz's iteration with a quintic polynomial, computed in `dtype`.
    """
    a, b, c = COEFFICIENTS
    x = stack.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT  # the products are of the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scale(rows: int, columns: int, rule: str) -> float:
    """What a matrix's learning rate is multiplied by.

    match_rms_adamw: updates as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4);
    original: Jordan et al. 2024.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def directions(stack: Tensor, rows: Sequence[int] | None, rule: str, dtype: torch.dtype) -> Tensor:
    """Every matrix of the weights (N, R, C), `rows` in each, orthogonalized and scaled."""
    found = []
    kinds = [(size, len(list(same))) for size, same in groupby(rows or stack.shape[1:2])]
    for part, (size, count) in zip(
        stack.split_with_sizes([size * count for size, count in kinds], 1), kinds, strict=True
    ):
        matrices = part.reshape(-1, size, stack.shape[2])  # matrices of one height are one stack
        result = orthogonalize(matrices, dtype).to(stack.dtype)
        result = result * scale(size, stack.shape[2], rule)
        found.append(result.reshape(-1, size * count, stack.shape[2]))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def advance(momenta: Tensor, gradients: Tensor, decay: Tensor, go: Tensor) -> tuple[Tensor, Tensor]:
    """The momenta after a step, a moving average, and Nesterov's estimate; all (N, R, C)."""
    new = torch.lerp(momenta, gradients, 1 - decay)
    return torch.where(go, new, momenta), torch.lerp(gradients, new, decay)


def moved(
    weights: Tensor, updates: Tensor, lr: Tensor, shrink: Tensor, go: Tensor, cautious: bool
) -> Tensor:
    """The weights (N, R, C) after a step; `shrink` is the decay of this step, a share.

    Cautious: decay only where the update makes a weight smaller, too (Chen et al. 2025, arXiv
    2510.12402, algorithm 1).
    """
    decayed = weights * shrink
    if cautious:
        decayed = torch.where(updates * weights >= 0, decayed, 0.0)
    return torch.where(go, weights - decayed - lr * updates, weights)


class MuonAdamW(GuardedAdamW):
    """AdamW (fused) whose groups that have `rows` are updated by Muon.

    Products are in bfloat16 on CUDA, as Jordan's, and in `dtype`, else float32, elsewhere. Weights
    that FSDP2 sharded are gathered a stack at a time; each process orthogonalizes whole matrices
    and keeps its part. `compiled`: the three steps run through torch.compile.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self.dtype = dtype

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=True) if compiled else function

        self._advance, self._directions = made(advance), made(directions)
        self._moved = made(moved)

    @contextmanager
    def _rest(self) -> Iterator[None]:
        """Where only the groups of AdamW are there."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if ROWS not in group]
        try:
            yield
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW looks for its own state in all groups that it sees."""
        self.__dict__.update(state)
        with self._rest():
            super().__setstate__({})  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        stop = self.left_out()
        with self._rest():
            loss = super().step(closure)
        for group in self.param_groups:
            if ROWS in group:
                self._update(group, stop)
        return loss

    def _update(self, group: dict[str, Any], stop: Tensor | None) -> None:
        """Muon's update of a group, a stack at a time."""
        used = [p for p in group["params"] if p.grad is not None]
        used.sort(key=lambda p: tuple(p.shape))
        for p in used:
            if not self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        for shape, same in groupby(used, lambda p: p.shape):
            weights = list(same)
            size = max(1, STACK // shape.numel())
            for start in range(0, len(weights), size):
                self._update_stack(group, weights[start : start + size], stop)

    def _update_stack(
        self, group: dict[str, Any], parameters: list[nn.Parameter], stop: Tensor | None
    ) -> None:
        """Muon's update of weights of one shape."""
        device = own(parameters[0]).device
        go = torch.ones((), dtype=torch.bool, device=device) if stop is None else stop == 0
        lr, shrink, decay = (
            torch.full((), value, device=device)  # no copy from the host, and nothing compiled anew
            for value in (group["lr"], group["lr"] * group["weight_decay"], group["momentum"])
        )
        whole = gathered(self._estimates(parameters, decay, go), parameters)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        whole = self._directions(whole, group[ROWS], group["scale"], self.dtype or dtype)
        updates = parted(whole, parameters[0])
        weights = [own(p) for p in parameters]
        result = self._moved(torch.stack(weights), updates, lr, shrink, go, group["cautious"])
        torch._foreach_copy_(weights, list(result.unbind()))

    def _estimates(self, parameters: list[nn.Parameter], decay: Tensor, go: Tensor) -> Tensor:
        """Nesterov's estimates of the gradients, stacked; the momenta are brought up to date."""
        momenta = [own(self.state[p][MOMENTUM]) for p in parameters]
        gradients = torch.stack([own(p.grad) for p in parameters if p.grad is not None])
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:  # of a loss scaler that did not unscale
            gradients = gradients / grad_scale
        new, estimates = self._advance(torch.stack(momenta), gradients, decay, go)
        torch._foreach_copy_(momenta, list(new.unbind()))
        found: Tensor = estimates
        return found


def own(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that FSDP2 sharded, or all of one that it did not."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def stacked_placements(like: "DTensor") -> list[Any]:
    """How a stack of tensors like this one is sharded."""
    from torch.distributed.tensor import Shard

    return [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]


def gathered(stack: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Stacked parts of the parameters as whole matrices (N, R, C); a collective where sharded."""
    like = parameters[0]
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(parameters), *like.shape))
    stride = (like.shape.numel(), *like.stride())
    placements = stacked_placements(like)
    sharded = DTensor.from_local(stack, like.device_mesh, placements, shape=shape, stride=stride)
    return sharded.full_tensor()


def parted(stack: Tensor, like: Tensor) -> Tensor:
    """This process's part of whole matrices, where `like` is sharded."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import distribute_tensor

    placements = stacked_placements(like)
    return distribute_tensor(stack, like.device_mesh, placements, src_data_rank=None).to_local()
