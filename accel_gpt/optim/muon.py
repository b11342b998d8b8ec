"""Muon for the matrices of the blocks and AdamW for the other parameters, as one optimizer.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the tests compare the update with that of
`torch.optim.Muon`. Matrices of one shape are stacked, and a stack is orthogonalized by batched
products.

Shapes: N weights of R rows and C columns; a fused weight holds several matrices, one below the
other.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_gpt.config.optim import STACK
from accel_gpt.model.layers import MLP, CausalSelfAttention
from accel_gpt.model.sharding import is_sharded, local_shard
from accel_gpt.optim.adamw import GuardedAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ROWS = "rows"  # key of Muon's groups: rows of each matrix in a fused weight; None: one matrix
MOMENTUM = "momentum_buffer"
# Jordan et al. 2024, as in torch.optim.Muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7  # least norm that a matrix is divided by


def muon_weights(model: nn.Module) -> dict[tuple[int, ...], list[Tensor]]:
    """The weights that Muon updates: those of attention and MLP, by the rows of their matrices.

    Queries, keys and values are three matrices in one weight, and so are gate and up of a SwiGLU:
    each is orthogonalized by itself. (): the weight is one matrix.
    """
    found: dict[tuple[int, ...], list[Tensor]] = {}
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
    """Approximate the nearest semi-orthogonal matrices (N, R, C): singular values of 0.7 to 1.2.

    Five steps of the Newton-Schulz iteration with a quintic polynomial, computed in `dtype`.
    """
    a, b, c = COEFFICIENTS
    x = stack.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT  # the Gram matrix is that of the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def lr_scale(rows: int, columns: int, rule: str) -> float:
    """Factor on the learning rate of a matrix.

    match_rms_adamw: updates as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4);
    original: Jordan et al. 2024.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def update_direction(
    estimates: Tensor, rows: Sequence[int] | None, rule: str, dtype: torch.dtype
) -> Tensor:
    """Orthogonalize and scale each matrix of the gradient estimates (N, R, C); `rows` of each."""
    _, R, C = estimates.shape
    directions = []
    runs = [(height, len(list(same))) for height, same in groupby(rows or (R,))]
    chunks = estimates.split_with_sizes([height * count for height, count in runs], 1)
    for chunk, (height, count) in zip(chunks, runs, strict=True):
        matrices = chunk.reshape(-1, height, C)  # matrices of one height are one stack
        direction = orthogonalize(matrices, dtype).to(estimates.dtype)
        direction = direction * lr_scale(height, C, rule)
        directions.append(direction.reshape(-1, height * count, C))
    return directions[0] if len(directions) == 1 else torch.cat(directions, 1)


def update_momentum(
    buffers: Tensor, gradients: Tensor, momentum: Tensor, enabled: Tensor
) -> tuple[Tensor, Tensor]:
    """The new momentum buffers, a moving average, and Nesterov's gradient estimates; all (N, R, C).

    The buffers stay as they are unless `enabled`.
    """
    new = torch.lerp(buffers, gradients, 1 - momentum)
    return torch.where(enabled, new, buffers), torch.lerp(gradients, new, momentum)


def update_weights(
    weights: Tensor, direction: Tensor, lr: Tensor, decay: Tensor, enabled: Tensor, cautious: bool
) -> Tensor:
    """The new weights (N, R, C), unchanged unless `enabled`; `decay` is lr times weight decay.

    Cautious: decay only where the update makes a weight smaller, too (Chen et al. 2025, arXiv
    2510.12402, algorithm 1).
    """
    decayed = weights * decay
    if cautious:
        decayed = torch.where(direction * weights >= 0, decayed, 0.0)
    return torch.where(enabled, weights - decayed - lr * direction, weights)


class MuonAdamW(GuardedAdamW):
    """Fused AdamW whose groups that have `rows` are updated by Muon.

    Matrix products are in bfloat16 on CUDA, as in Jordan et al., and in `dtype`, by default
    float32, elsewhere. Weights sharded by FSDP2 are all-gathered a stack at a time; each rank
    orthogonalizes full matrices and keeps its shard. `compiled`: the functions of the update run
    through torch.compile.
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
        functions: list[Any] = [update_momentum, update_direction, update_weights]
        if compiled:
            functions = [torch.compile(function, dynamic=True) for function in functions]
        self._update_momentum, self._update_direction, self._update_weights = functions

    @contextmanager
    def _adamw_groups(self) -> Iterator[None]:
        """Hide Muon's groups."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if ROWS not in group]
        try:
            yield
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW expects its own state in all groups that it sees."""
        self.__dict__.update(state)
        with self._adamw_groups():
            super().__setstate__({})  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        skip = self.skip_or_found_inf()
        with self._adamw_groups():
            loss = super().step(closure)
        for group in self.param_groups:
            if ROWS in group:
                self._update_group(group, skip)
        return loss

    def _update_group(self, group: dict[str, Any], skip: Tensor | None) -> None:
        """Update a group of Muon's, a stack at a time."""
        used = [p for p in group["params"] if p.grad is not None]
        used.sort(key=lambda p: tuple(p.shape))
        for p in used:
            if not self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        for shape, same in groupby(used, lambda p: p.shape):
            parameters = list(same)
            size = max(1, STACK // shape.numel())
            for start in range(0, len(parameters), size):
                self._update_stack(group, parameters[start : start + size], skip)

    def _update_stack(
        self, group: dict[str, Any], parameters: list[nn.Parameter], skip: Tensor | None
    ) -> None:
        """Update parameters of one shape."""
        device = local_shard(parameters[0]).device
        enabled = torch.ones((), dtype=torch.bool, device=device) if skip is None else skip == 0
        lr, decay, momentum = (
            torch.full((), value, device=device)  # no copy from the host, and no recompilation
            for value in (group["lr"], group["lr"] * group["weight_decay"], group["momentum"])
        )
        stack = gather_matrices(self._gradient_estimates(parameters, momentum, enabled), parameters)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        stack = self._update_direction(stack, group[ROWS], group["scale"], self.dtype or dtype)
        direction = shard_like(parameters[0], stack)
        weights = [local_shard(p) for p in parameters]
        new = self._update_weights(
            torch.stack(weights), direction, lr, decay, enabled, group["cautious"]
        )
        torch._foreach_copy_(weights, list(new.unbind()))

    def _gradient_estimates(
        self, parameters: list[nn.Parameter], momentum: Tensor, enabled: Tensor
    ) -> Tensor:
        """Update the momentum buffers; returns Nesterov's estimates of the gradients, stacked.

        A function of its own so that its stacks are freed before the matrices are orthogonalized.
        """
        buffers = [local_shard(self.state[p][MOMENTUM]) for p in parameters]
        gradients = torch.stack([local_shard(p.grad) for p in parameters if p.grad is not None])
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:  # of a loss scaler that did not unscale the gradients
            gradients = gradients / grad_scale
        new, estimates = self._update_momentum(torch.stack(buffers), gradients, momentum, enabled)
        torch._foreach_copy_(buffers, list(new.unbind()))
        stacked: Tensor = estimates
        return stacked


def gather_matrices(stack: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """All-gather stacked shards of `parameters` into full matrices (N, R, C)."""
    like = parameters[0]
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(parameters), *like.shape))
    stride = (like.shape.numel(), *like.stride())
    placements = stacked_placements(like)
    sharded = DTensor.from_local(stack, like.device_mesh, placements, shape=shape, stride=stride)
    return sharded.full_tensor()


def shard_like(like: Tensor, stack: Tensor) -> Tensor:
    """This rank's shards of full matrices (N, R, C) where `like` is sharded, else the matrices."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import distribute_tensor

    placements = stacked_placements(like)
    return distribute_tensor(stack, like.device_mesh, placements, src_data_rank=None).to_local()


def stacked_placements(like: "DTensor") -> list[Any]:
    """Placements of a stack of tensors that are sharded as `like`."""
    from torch.distributed.tensor import Shard

    return [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
