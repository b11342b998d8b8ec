"""Build the optimizer and its parameter groups. Each group has its own peak learning rate."""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import require
from accel_gpt.optim.adamw import GuardedAdamW
from accel_gpt.optim.muon import MOMENTUM, ROWS, MuonAdamW, muon_weights
from accel_gpt.optim.schedule import lr_fraction, momentum_at
from accel_gpt.own_code import unexpected

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PEAK = "peak_lr"
OPTIONS = "options"  # in a group of --code: what its optimizer was made with
DECAYED = "decayed"
PART = "part"  # of the model, in a group with its own learning rate
EMBEDDING = "embedding"
HEAD = "head"
RESIDUAL = "residual"


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    compiled: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> GuardedAdamW:
    """Build AdamW, or Muon for the matrices of the blocks with AdamW for the other parameters.

    Weight decay applies to matrices and embeddings, not to vectors (Loshchilov & Hutter 2019; the
    groups of minGPT). With `embedding_lr` or `head_lr`, embeddings and head are separate groups.
    With `residual_lr_factor`, so are the projections onto the residual stream. AdamW's groups come
    first.

    `compiled` compiles Muon's update with torch.compile. The ranks of `mesh` hold the same weights
    and divide Muon's work among them.
    """
    matrices = muon_weights(model) if config.name == "muon" else {}
    parts = parts_with_rates(model, config)
    part_of = {id(weight): part for part, weights in parts.items() for weight in weights}
    of_muon = {id(weight) for weights in matrices.values() for weight in weights}
    others = [
        p
        for p in model.parameters()
        if p.requires_grad and id(p) not in of_muon and id(p) not in part_of
    ]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], DECAYED: True},
        {"params": [p for p in others if p.dim() < 2], DECAYED: False},
    ]
    for part, weights in parts.items():
        by_adamw = [weight for weight in weights if id(weight) not in of_muon]
        groups.append({"params": by_adamw, DECAYED: True, PART: part})
    for rows, weights in matrices.items():
        group = {"params": weights, DECAYED: True, ROWS: rows or None}
        residual = [weight for weight in weights if id(weight) in part_of]
        if residual:
            groups.append(group | {"params": residual, PART: RESIDUAL})
            group["params"] = [weight for weight in weights if id(weight) not in part_of]
        groups.append(group)
    groups = [group for group in groups if group["params"]]
    optimizer: GuardedAdamW
    if config.name == "muon":
        require(
            bool(matrices),
            "optim.name is muon, but no layer of the model has the attribute muon_rows, which "
            "says that Muon updates its weight; set optim.name to adamw",
        )
        optimizer = MuonAdamW(groups, lr=config.lr, compiled=compiled, mesh=mesh)
    else:
        optimizer = GuardedAdamW(groups, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def parts_with_rates(model: nn.Module, config: OptimConfig) -> dict[str, list[Tensor]]:
    """Find the weights of the parts of the model that have their own learning rate.

    The parts are `EMBEDDING`, `HEAD` and `RESIDUAL`, the projections onto the residual stream.
    Raises `UserError` for a `head_lr` if the head shares the weights of the embedding.
    """
    parts: dict[str, list[Tensor]] = {}
    if config.embedding_lr is not None or config.head_lr is not None:
        parts[EMBEDDING] = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        shared = {id(weight) for weight in parts[EMBEDDING]}
        heads = [m.get_parameter("weight") for m in model.modules() if getattr(m, "is_head", False)]
        parts[HEAD] = [weight for weight in heads if id(weight) not in shared]
        require(
            bool(parts[HEAD]) or config.head_lr is None,
            f"optim.head_lr is {config.head_lr} but model.tie_embeddings is true: the head shares "
            "the weights of the embedding; set optim.embedding_lr",
        )
    if config.residual_lr_factor is not None:
        parts[RESIDUAL] = [
            m.get_parameter("weight") for m in model.modules() if getattr(m, "onto_residual", False)
        ]
    return {part: [w for w in weights if w.requires_grad] for part, weights in parts.items()}


def configure(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Write the options of `config` into every group.

    Call this after a resume too: a checkpoint restores the options that it was saved with. An
    optimizer of --code keeps its own options.
    """
    for group in optimizer.param_groups:
        if OPTIONS in group:
            continue
        if ROWS in group:
            own_decay = config.muon_weight_decay
            group[PEAK] = config.muon_peak
            group["weight_decay"] = config.weight_decay if own_decay is None else own_decay
            group["momentum"] = config.muon_momentum
            group["scale"] = config.muon_scale
            group["cautious"] = config.muon_cautious_decay
        else:
            own_lr = {EMBEDDING: config.embedding_lr, HEAD: config.head_lr}.get(group.get(PART, ""))
            group[PEAK] = config.lr if own_lr is None else own_lr
            group["weight_decay"] = config.weight_decay if group[DECAYED] else 0.0
            group["betas"] = (config.beta1, config.beta2)
            group["eps"] = config.eps
        if group.get(PART) == RESIDUAL and config.residual_lr_factor is not None:
            # the product of both, by which weights shrink in a step, stays the same
            group[PEAK] *= config.residual_lr_factor
            group["weight_decay"] /= config.residual_lr_factor


def state_names(group: dict[str, Any]) -> set[str] | None:
    """Return the names of the state tensors that each parameter of a group has.

    Returns None for an optimizer of --code, which may keep any values.
    """
    if OPTIONS in group:
        return None
    if ROWS in group:
        return {MOMENTUM}
    return {"step", "exp_avg", "exp_avg_sq"}


def logged_peak(optimizer: torch.optim.Optimizer, config: OptimConfig) -> float:
    """Return the peak of train/lr: optim.lr, or the rate of an own optimizer's first group."""
    group = optimizer.param_groups[0]
    return float(group[PEAK]) if OPTIONS in group else config.lr


def set_rates(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, fraction: float, step: int
) -> None:
    """Set the learning rates and momenta for the next update, after `step` completed updates.

    `fraction`: of the peak of each group; see `fraction_at`.
    """
    set_lr(optimizer, fraction)
    for group in optimizer.param_groups:
        if ROWS in group:
            group["momentum"] = momentum_at(step, optim.muon_momentum, optim.muon_momentum_warmup)


def fraction_at(step: int, config: Config, plan: Plan) -> float:
    """Compute the learning rate after `step` completed updates, as a share of its peak.

    The share is the same for all groups. It is what `lr()` in the file of --code returns, or else
    the schedule.
    """
    if config.own.lr is None:
        floor = config.schedule.min_lr / config.optim.lr
        return lr_fraction(step=step, name=config.schedule.name, plan=plan, floor=floor)
    returned = config.own.lr(step=step, config=config, plan=plan)
    fraction = math.nan
    with contextlib.suppress(TypeError, ValueError):
        fraction = float(returned)
    if not math.isfinite(fraction):
        raise unexpected(config.own.lr.place, returned, "a finite number")
    return fraction


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Set the learning rate of every group to `fraction` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
