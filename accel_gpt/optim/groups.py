"""The optimizer and its parameter groups. Each group has its own peak learning rate."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import require
from accel_gpt.model.loss import Head
from accel_gpt.optim.adamw import GuardedAdamW
from accel_gpt.optim.muon import MOMENTUM, ROWS, MuonAdamW, muon_weights
from accel_gpt.optim.schedule import lr_fraction, momentum_at

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PEAK = "peak_lr"
DECAYED = "decayed"
PART = "part"  # embedding or head, in a group with its own learning rate


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    compiled: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> GuardedAdamW:
    """Build AdamW, or Muon for the matrices of the blocks with AdamW for the other parameters.

    Weight decay applies to matrices and embeddings, not to vectors (Loshchilov & Hutter 2019; the
    groups of minGPT). With `embedding_lr` or `head_lr`, embeddings and head are separate groups.
    AdamW's groups come first.

    `compiled` compiles Muon's update with torch.compile. The ranks of `mesh` hold the same weights
    and divide Muon's work among them.
    """
    matrices = muon_weights(model) if config.name == "muon" else {}
    parts = embedding_and_head(model, config)
    grouped = {id(weight) for weights in matrices.values() for weight in weights}
    grouped |= {id(weight) for weights in parts.values() for weight in weights}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in grouped]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], DECAYED: True},
        {"params": [p for p in others if p.dim() < 2], DECAYED: False},
    ]
    for part, weights in parts.items():
        groups.append({"params": weights, DECAYED: True, PART: part})
    for rows, weights in matrices.items():
        groups.append({"params": weights, DECAYED: True, ROWS: rows or None})
    groups = [group for group in groups if group["params"]]
    optimizer: GuardedAdamW
    if config.name == "muon":
        require(bool(matrices), "optim.name is muon but the model has no blocks; set it to adamw")
        optimizer = MuonAdamW(groups, lr=config.lr, compiled=compiled, mesh=mesh)
    else:
        optimizer = GuardedAdamW(groups, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def embedding_and_head(model: nn.Module, config: OptimConfig) -> dict[str, list[Tensor]]:
    """Find the weights of the embeddings and the head, if one of them has its own learning rate.

    Raises `UserError` for a `head_lr` if the head shares the weights of the embedding.
    """
    if config.embedding_lr is None and config.head_lr is None:
        return {}
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    shared = {id(weight) for weight in embeddings}
    heads = [
        m.weight for m in model.modules() if isinstance(m, Head) and id(m.weight) not in shared
    ]
    require(
        bool(heads) or config.head_lr is None,
        f"optim.head_lr is {config.head_lr} but model.tie_embeddings is true: the head shares the "
        "weights of the embedding; set optim.embedding_lr",
    )
    return {
        "embedding": [weight for weight in embeddings if weight.requires_grad],
        "head": [weight for weight in heads if weight.requires_grad],
    }


def configure(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Write the options of `config` into every group.

    Call this after a resume too: a checkpoint restores the options that it was saved with.
    """
    for group in optimizer.param_groups:
        if ROWS in group:
            _configure_muon(group, config)
        else:
            _configure_adamw(group, config)


def _configure_muon(group: dict[str, Any], config: OptimConfig) -> None:
    weight_decay = config.muon_weight_decay
    if weight_decay is None:
        weight_decay = config.weight_decay
    group[PEAK] = config.muon_peak
    group["weight_decay"] = weight_decay
    group["momentum"] = config.muon_momentum
    group["scale"] = config.muon_scale
    group["cautious"] = config.muon_cautious_decay


def _configure_adamw(group: dict[str, Any], config: OptimConfig) -> None:
    part_lr = None
    if group.get(PART) == "embedding":
        part_lr = config.embedding_lr
    elif group.get(PART) == "head":
        part_lr = config.head_lr
    group[PEAK] = config.lr if part_lr is None else part_lr
    group["weight_decay"] = config.weight_decay if group[DECAYED] else 0.0
    group["betas"] = (config.beta1, config.beta2)
    group["eps"] = config.eps


def state_names(group: dict[str, Any]) -> set[str]:
    """Return the names of the state tensors that each parameter of a group has."""
    if ROWS in group:
        return {MOMENTUM}
    return {"step", "exp_avg", "exp_avg_sq"}


def set_rates(optimizer: torch.optim.Optimizer, config: Config, plan: Plan, step: int) -> None:
    """Set the learning rates and momenta for the next update, after `step` completed updates."""
    set_lr(optimizer, fraction_at(step, config, plan))
    for group in optimizer.param_groups:
        if ROWS in group:
            group["momentum"] = momentum_at(
                step, config.optim.muon_momentum, config.optim.muon_momentum_warmup
            )


def fraction_at(step: int, config: Config, plan: Plan) -> float:
    """Compute the learning rate after `step` completed updates, as a share of its peak.

    The share is the same for all groups.
    """
    floor = config.schedule.min_lr / config.optim.lr
    return lr_fraction(step=step, name=config.schedule.name, plan=plan, floor=floor)


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Set the learning rate of every group to `fraction` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
