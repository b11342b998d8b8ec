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
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_gpt.config.optim import STACK
from accel_gpt.model.layers import MLP, CausalSelfAttention
from accel_gpt.model.sharding import first_row, is_sharded, local_shard
from accel_gpt.optim.adamw import GuardedAdamW

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

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


def orthogonalize(stack: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices (N, R, C): singular values of 0.7 to 1.2.

    Five steps of the Newton-Schulz iteration with a quintic polynomial.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack  # the Gram matrix is that of the shorter side
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


def update_direction(estimates: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Orthogonalize each matrix of the gradient estimates (N, R, C); `rows` of each."""
    _, R, C = estimates.shape
    directions = []
    runs = [(height, len(list(same))) for height, same in groupby(rows or (R,))]
    chunks = estimates.split_with_sizes([height * count for height, count in runs], 1)
    for chunk, (height, count) in zip(chunks, runs, strict=True):
        matrices = chunk.reshape(-1, height, C)  # matrices of one height are one stack
        directions.append(orthogonalize(matrices).reshape(-1, height * count, C))
    return joined(directions, 1)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate; without a copy where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def update_momentum(
    buffers: Tensor, gradients: Tensor, momentum: Tensor, enabled: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The new momentum buffers, a moving average, and Nesterov's gradient estimates in `dtype`; all
    (N, R, C).

    The buffers stay as they are unless `enabled`.
    """
    new = torch.lerp(buffers, gradients, 1 - momentum)
    estimates = torch.lerp(gradients, new, momentum).to(dtype)
    return torch.where(enabled, new, buffers), estimates


def update_weights(
    weights: Tensor,
    direction: Tensor,
    scale: Tensor,
    lr: Tensor,
    decay: Tensor,
    enabled: Tensor,
    cautious: bool,
) -> Tensor:
    """The new weights (N, R, C), unchanged unless `enabled`. `scale` (R, 1) is that of the matrix
    that a row belongs to; `decay` is lr times weight decay.

    Cautious: decay only where the update makes a weight smaller, too (Chen et al. 2025, arXiv
    2510.12402, algorithm 1).
    """
    direction = direction.to(weights.dtype).mul_(scale)
    decayed = weights * decay
    if cautious:
        decayed = torch.where(direction * weights >= 0, decayed, 0.0)
    return torch.where(enabled, weights - decayed - lr * direction, weights)


class MuonAdamW(GuardedAdamW):
    """Fused AdamW whose groups that have `rows` are updated by Muon.

    Matrices are orthogonalized, and travel between ranks, in bfloat16 on CUDA, as in Jordan et al.,
    and in `dtype`, by default float32, elsewhere. Each is orthogonalized by one rank: weights
    sharded by FSDP2 by one of those that hold a shard, replicated ones by one of `mesh` (None: all
    by every rank). `compiled`: the functions of the update run through torch.compile.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self.dtype, self.mesh = dtype, mesh
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
            layout = Layout.of(parameters[0], self.mesh)
            size = max(1, STACK * layout.shards // shape.numel())
            step = max(layout.ranks, size - size % layout.ranks)
            for start in range(0, len(parameters), step):
                self._update_stack(group, parameters[start : start + step], layout, size, skip)

    def _update_stack(
        self,
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        layout: "Layout",
        size: int,
        skip: Tensor | None,
    ) -> None:
        """Update parameters of one shape, `size` at a time but for their orthogonalization."""
        device = local_shard(parameters[0]).device
        enabled = torch.ones((), dtype=torch.bool, device=device) if skip is None else skip == 0
        R, C = parameters[0].shape
        numbers = (group["lr"], group["lr"] * group["weight_decay"], group["momentum"])
        lr, decay, momentum = (
            torch.full((), number, device=device)  # no copy from the host, and no recompilation
            for number in numbers
        )
        heights, first = group[ROWS] or (R,), first_row(parameters[0])
        scales = [
            torch.full((height, 1), lr_scale(height, C, group["scale"]), device=device)
            for height in heights
        ]
        scale = joined(scales, 0)[first : first + len(local_shard(parameters[0]))]
        chunks = [parameters[start : start + size] for start in range(0, len(parameters), size)]
        stack = joined([self._gradient_estimates(chunk, momentum, enabled) for chunk in chunks], 0)
        shape = torch.Size((len(parameters), R, C))
        stack = layout.redistribute(stack, shape, layout.held, layout.split)
        if len(stack):
            stack = self._update_direction(stack, group[ROWS])
        stack = layout.redistribute(stack, shape, layout.split, layout.held)
        for chunk, direction in zip(chunks, torch.split(stack, size), strict=True):
            weights = [local_shard(p) for p in chunk]
            new = self._update_weights(
                torch.stack(weights), direction, scale, lr, decay, enabled, group["cautious"]
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
        dtype = self.dtype or (torch.bfloat16 if gradients.is_cuda else torch.float32)
        stacked: Tensor
        new, stacked = self._update_momentum(
            torch.stack(buffers), gradients, momentum, enabled, dtype
        )
        torch._foreach_copy_(buffers, list(new.unbind()))
        return stacked


@dataclass(frozen=True)
class Layout:
    """How a stack of weights of one shape, (N, R, C), lies on the ranks that share the work.

    Under FSDP2 each holds rows of all N matrices, and gets all rows of some by an all-to-all; with
    replicated weights, DDP, each takes some of the matrices, and the results are all-gathered.
    """

    mesh: "DeviceMesh | None" = None
    held: "Sequence[Placement]" = ()  # as gradients and weights are
    split: "Sequence[Placement]" = ()  # by matrices
    ranks: int = 1  # that share the work
    shards: int = 1  # of each weight

    @classmethod
    def of(cls, like: Tensor, mesh: "DeviceMesh | None") -> "Layout":
        """The layout of weights like `like`; replicated ones are shared by the ranks of `mesh`."""
        if not is_sharded(like):
            if mesh is None:
                return cls()
            from torch.distributed.tensor import Replicate, Shard

            return cls(mesh, [Replicate()], [Shard(0)], mesh.size())
        from torch.distributed.tensor import Shard

        held = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
        split = [Shard(0) if isinstance(p, Shard) else p for p in like.placements]
        sizes = zip(like.device_mesh.shape, like.placements, strict=True)
        ranks = math.prod(size for size, p in sizes if isinstance(p, Shard))
        return cls(like.device_mesh, held, split, ranks, ranks)

    def redistribute(
        self,
        stack: Tensor,
        shape: torch.Size,
        source: "Sequence[Placement]",
        target: "Sequence[Placement]",
    ) -> Tensor:
        """This rank's part of a stack of `shape` in another placement; a collective."""
        if self.mesh is None:
            return stack
        from torch.distributed.tensor import DTensor

        stride = (shape[1] * shape[2], shape[2], 1)
        stack = stack.contiguous()
        tensor = DTensor.from_local(stack, self.mesh, source, shape=shape, stride=stride)
        return tensor.redistribute(placements=target).to_local()
