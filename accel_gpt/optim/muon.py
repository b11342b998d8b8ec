"""Muon for the matrices of the blocks and AdamW for the other parameters, as one optimizer.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). The tests compare the update with
`torch.optim.Muon`. The estimates of the gradients of matrices of one shape are stacked, so that
batched products orthogonalize them together. Everything else is done in place, weight by weight.

Shapes: N weights of R rows and C columns. A fused weight holds several matrices, stacked along its
rows.
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
from accel_gpt.model.sharding import first_row, is_sharded, local_shard
from accel_gpt.optim.adamw import GuardedAdamW, undecorated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

ROWS = "rows"  # key in Muon's groups: rows of each matrix in a fused weight; None: one matrix
MOMENTUM = "momentum_buffer"
# Jordan et al. 2024, as in torch.optim.Muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7  # smallest norm that a matrix is divided by


def muon_weights(model: nn.Module) -> dict[tuple[int, ...], list[Tensor]]:
    """Find the weights that Muon updates, grouped by the rows of each matrix in a weight.

    They are the weights of modules with an attribute `muon_rows`, as in `model.layers.Matrix`.
    Queries, keys and values are three matrices in one weight; gate and up of a SwiGLU are two. Each
    matrix is orthogonalized separately. The key () is for weights that are one matrix.
    """
    by_rows: dict[tuple[int, ...], list[Tensor]] = {}
    for module in model.modules():
        rows = getattr(module, "muon_rows", None)
        if rows is not None and module.get_parameter("weight").requires_grad:
            by_rows.setdefault(rows, []).append(module.get_parameter("weight"))
    return by_rows


# --------------------------------------------------------------------------- the update


def orthogonalize(stack: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices of `stack` (N, R, C), in the same shape.

    Five steps of the Newton-Schulz iteration with a quintic polynomial give singular values of 0.7
    to 1.2.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack  # wide: the Gram matrix then has the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def lr_scale(rows: int, columns: int, rule: str) -> float:
    """Compute the factor on the learning rate of a matrix.

    With match_rms_adamw, updates are as large as AdamW's (Liu et al. 2025, arXiv 2502.16982,
    equation 4). The other rule, original, is from Jordan et al. 2024.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def update_direction(estimates: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Orthogonalize each matrix of the gradient estimates (N, R, C).

    `rows` are the rows of each matrix in a weight; None if a weight is one matrix.
    """
    _, R, C = estimates.shape
    if rows is None:
        rows = (R,)
    # consecutive matrices with the same number of rows become one stack
    runs = [(height, len(list(same))) for height, same in groupby(rows)]
    chunks = estimates.split_with_sizes([height * count for height, count in runs], dim=1)
    directions = []
    for chunk, (height, count) in zip(chunks, runs, strict=True):
        matrices = chunk.reshape(-1, height, C)  # (N * count, height, C)
        direction = orthogonalize(matrices)
        directions.append(direction.reshape(-1, height * count, C))
    return concatenate(directions, dim=1)


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate `parts`; return a single part without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def update_momentum(
    buffer: Tensor,
    gradient: Tensor,
    estimate: Tensor,
    momentum: Tensor,
    divisor: Tensor | None,
    enabled: Tensor,
) -> None:
    """Update a momentum buffer, and write Nesterov's estimate of the gradient to `estimate`.

    All three are (R, C). The momentum buffer is a moving average of the gradient, which is first
    divided by `divisor` (). If `enabled` is false, the buffer stays unchanged.
    """
    if divisor is not None:
        gradient = gradient / divisor
    new = torch.lerp(buffer, gradient, 1 - momentum)
    estimate.copy_(torch.lerp(gradient, new, momentum))
    buffer.copy_(torch.where(enabled, new, buffer))


def update_weight(
    weight: Tensor,
    direction: Tensor,
    scale: Tensor,
    lr: Tensor,
    decay: Tensor,
    enabled: Tensor,
    cautious: bool,
) -> None:
    """Update a weight (R, C) in place. If `enabled` is false, it stays unchanged.

    `scale` (R, 1) is the `lr_scale` of the matrix that a row belongs to; `decay` is the learning
    rate times the weight decay. Cautious decay applies only to weights that the update also makes
    smaller (Chen et al. 2025, arXiv 2510.12402, algorithm 1).
    """
    scaled = direction.to(weight.dtype) * scale
    decayed = weight * decay
    if cautious:
        decayed = torch.where(scaled * weight >= 0, decayed, 0.0)
    weight.copy_(torch.where(enabled, weight - decayed - lr * scaled, weight))


class MuonAdamW(GuardedAdamW):
    """Update the groups that have `rows` by Muon, and the others by fused AdamW.

    Matrices are orthogonalized, and sent between ranks, in bfloat16 on CUDA, as in Jordan et al.,
    and in float32 elsewhere.

    Each matrix is orthogonalized by one rank. If FSDP2 shards the weights, it is one of the ranks
    that hold a shard. If the weights are replicated, it is one of the ranks of `mesh`; without a
    mesh, each rank orthogonalizes all matrices. `compiled` compiles the functions of the update
    with torch.compile.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        compiled: bool = False,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self.mesh = mesh
        self._update_momentum: Any = update_momentum
        self._update_direction: Any = update_direction
        self._update_weight: Any = update_weight
        if compiled:
            self._update_momentum = torch.compile(update_momentum, dynamic=True)
            self._update_direction = torch.compile(update_direction, dynamic=True)
            self._update_weight = torch.compile(update_weight, dynamic=True)

    @contextmanager
    def _adamw_groups(self) -> Iterator[None]:
        """Hide Muon's groups from AdamW, which expects its own state in each group."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if ROWS not in group]
        try:
            yield
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self._adamw_groups():
            super().__setstate__({})  # type: ignore[no-untyped-call]  # torch has no types

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        skip = self.skip_or_found_inf()
        divisor = self.divisor_and_grad_scale()
        with self._adamw_groups():
            loss = undecorated(GuardedAdamW.step)(self, closure)  # hooks run once a step
        for group in self.param_groups:
            if ROWS in group:
                self._update_group(group, skip, divisor)
        return loss

    def _update_group(
        self, group: dict[str, Any], skip: Tensor | None, divisor: Tensor | None
    ) -> None:
        """Update one of Muon's groups, a stack of parameters at a time."""
        parameters = [p for p in group["params"] if p.grad is not None]
        parameters.sort(key=lambda p: tuple(p.shape))
        for p in parameters:
            if not self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        for shape, same_shape in groupby(parameters, lambda p: p.shape):
            same = list(same_shape)
            layout = layout_of(same[0], self.mesh)
            most = max(1, STACK * layout.shards // shape.numel())
            # a multiple of the ranks, so that each rank orthogonalizes equally many matrices
            stack_size = max(layout.ranks, most - most % layout.ranks)
            for start in range(0, len(same), stack_size):
                self._update_stack(
                    group=group,
                    parameters=same[start : start + stack_size],
                    layout=layout,
                    skip=skip,
                    divisor=divisor,
                )

    def _update_stack(
        self,
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        layout: "Layout",
        skip: Tensor | None,
        divisor: Tensor | None,
    ) -> None:
        """Update parameters of one shape: orthogonalize all together, do the rest one by one."""
        weights = [local_shard(p) for p in parameters]
        device = weights[0].device
        enabled = torch.ones((), dtype=torch.bool, device=device) if skip is None else skip == 0
        # filled on the device: no copy from the host, and no recompilation for a new number
        lr = torch.full((), group["lr"], device=device)
        decay = torch.full((), group["lr"] * group["weight_decay"], device=device)
        momentum = torch.full((), group["momentum"], device=device)
        scale = self._row_scales(group, parameters[0])
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        stack = torch.empty((len(weights), *weights[0].shape), dtype=dtype, device=device)
        for p, estimate in zip(parameters, stack.unbind(), strict=True):
            assert p.grad is not None
            self._update_momentum(
                buffer=local_shard(self.state[p][MOMENTUM]),
                gradient=local_shard(p.grad),
                estimate=estimate,
                momentum=momentum,
                divisor=divisor,
                enabled=enabled,
            )
        shape = torch.Size((len(parameters), *parameters[0].shape))  # (N, R, C) over all ranks
        stack = layout.exchange(stack, shape, to_matrices=True)
        if len(stack) > 0:
            stack = self._update_direction(stack, group[ROWS])
        stack = layout.exchange(stack, shape, to_matrices=False)
        for weight, direction in zip(weights, stack.unbind(), strict=True):
            self._update_weight(
                weight=weight,
                direction=direction,
                scale=scale,
                lr=lr,
                decay=decay,
                enabled=enabled,
                cautious=group["cautious"],
            )

    def _row_scales(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Compute the `lr_scale` of each of this rank's rows of `parameter`: (rows, 1)."""
        local = local_shard(parameter)
        R, C = parameter.shape
        scales = [
            torch.full((height, 1), lr_scale(height, C, group["scale"]), device=local.device)
            for height in group[ROWS] or (R,)
        ]
        first = first_row(parameter)
        return concatenate(scales, dim=0)[first : first + len(local)]


# --------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Layout:
    """Describe how a stack of weights (N, R, C) is placed on the ranks that share the work.

    Under FSDP2, each rank holds some rows of all N weights. An all-to-all gives it all rows of some
    weights. With replicated weights (DDP), each rank takes some of the N weights, and an all-gather
    distributes the results. Without a mesh, a rank works alone.
    """

    mesh: "DeviceMesh | None" = None
    by_weights: "Sequence[Placement]" = ()  # placements of gradients and weights
    by_matrices: "Sequence[Placement]" = ()  # placements of whole matrices, some on each rank
    ranks: int = 1  # ranks that share the work
    shards: int = 1  # shards of each weight

    def exchange(self, stack: Tensor, shape: torch.Size, to_matrices: bool) -> Tensor:
        """Exchange this rank's part of all weights for its whole matrices, or back; a collective.

        `shape` (N, R, C) covers all ranks.
        """
        if self.mesh is None:
            return stack
        from torch.distributed.tensor import DTensor

        _, R, C = shape
        source, target = self.by_weights, self.by_matrices
        if not to_matrices:
            source, target = target, source
        tensor = DTensor.from_local(
            stack.contiguous(),
            device_mesh=self.mesh,
            placements=source,
            shape=shape,
            stride=(R * C, C, 1),
        )
        return tensor.redistribute(placements=target).to_local()


def layout_of(weight: Tensor, mesh: "DeviceMesh | None") -> Layout:
    """Describe the layout of a stack of weights like `weight`.

    The ranks of `mesh` share the work if the weight is replicated.
    """
    if mesh is None and not is_sharded(weight):
        return Layout()
    from torch.distributed.tensor import Replicate, Shard

    if not is_sharded(weight):
        assert mesh is not None
        return Layout(
            mesh=mesh,
            by_weights=[Replicate()],
            by_matrices=[Shard(0)],
            ranks=mesh.size(),
        )
    by_weights: list[Placement] = []
    by_matrices: list[Placement] = []
    shards = 1
    for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        if isinstance(placement, Shard):
            by_weights.append(Shard(placement.dim + 1))  # a stack has one more dimension in front
            by_matrices.append(Shard(0))
            shards *= size
        else:
            by_weights.append(placement)
            by_matrices.append(placement)
    return Layout(
        mesh=weight.device_mesh,
        by_weights=by_weights,
        by_matrices=by_matrices,
        ranks=shards,
        shards=shards,
    )
