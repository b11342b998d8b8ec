"""The optimizer and its parameter groups; every group has its own peak learning rate."""

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
PART = "part"  # of a group with a learning rate of its own: embedding, head


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    compiled: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> GuardedAdamW:
    """AdamW with weight decay on matrices and embeddings and none on vectors (Loshchilov & Hutter
    2019; the groups of minGPT), or Muon for the matrices of the blocks and AdamW for the rest.

    AdamW's groups come first. With `embedding_lr` or `head_lr`, embeddings and head are groups of
    their own. `compiled`: Muon's update runs through torch.compile. `mesh`: the ranks with
    the same weights that share it.
    """
    matrices = muon_weights(model) if config.name == "muon" else {}
    parts = embedding_and_head(model, config)
    special = [*matrices.values(), *parts.values()]
    taken = {id(weight) for weights in special for weight in weights}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    decayed = [p for p in parameters if p.dim() >= 2]
    undecayed = [p for p in parameters if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, DECAYED: True},
        {"params": undecayed, DECAYED: False},
    ]
    groups += [{"params": weights, DECAYED: True, PART: part} for part, weights in parts.items()]
    groups += [
        {"params": weights, DECAYED: True, ROWS: rows or None} for rows, weights in matrices.items()
    ]
    filled = [group for group in groups if group["params"]]
    optimizer: GuardedAdamW
    if config.name == "muon":
        require(bool(matrices), "optim.name is muon but the model has no blocks; set it to adamw")
        optimizer = MuonAdamW(filled, config.lr, compiled, mesh=mesh)
    else:
        optimizer = GuardedAdamW(filled, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def embedding_and_head(model: nn.Module, config: OptimConfig) -> dict[str, list[Tensor]]:
    """Weights of the embeddings and of the head, where one of them has its own learning rate.

    Raises `UserError` for `head_lr` where the head's weights are the embedding's.
    """
    if config.embedding_lr is None and config.head_lr is None:
        return {}
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    known = {id(weight) for weight in embeddings}
    heads = [m.weight for m in model.modules() if isinstance(m, Head) and id(m.weight) not in known]
    require(
        bool(heads) or config.head_lr is None,
        f"optim.head_lr is {config.head_lr} but model.tie_embeddings is true: the head has the "
        "weights of the embedding; set optim.embedding_lr",
    )
    parts = {"embedding": embeddings, "head": heads}
    return {part: [w for w in weights if w.requires_grad] for part, weights in parts.items()}


def configure(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Write the config into every group; after a resume, too, which restores the old settings."""
    for group in optimizer.param_groups:
        if ROWS in group:
            decay = config.muon_weight_decay
            group[PEAK] = config.muon_peak
            group["weight_decay"] = config.weight_decay if decay is None else decay
            group["momentum"] = config.muon_momentum
            group["scale"], group["cautious"] = config.muon_scale, config.muon_cautious_decay
        else:
            lrs = {"embedding": config.embedding_lr, "head": config.head_lr}
            group[PEAK] = lrs.get(group.get(PART, "")) or config.lr
            group["weight_decay"] = config.weight_decay if group[DECAYED] else 0.0
            group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps


def state_names(group: dict[str, Any]) -> set[str]:
    """Names of the state tensors of each parameter in a group."""
    return {MOMENTUM} if ROWS in group else {"step", "exp_avg", "exp_avg_sq"}


def set_rates(optimizer: torch.optim.Optimizer, config: Config, plan: Plan, step: int) -> None:
    """Set learning rates and momenta for the update after `step` completed ones."""
    optim = config.optim
    set_lr(optimizer, fraction_at(step, config, plan))
    for group in optimizer.param_groups:
        if ROWS in group:
            group["momentum"] = momentum_at(step, optim.muon_momentum, optim.muon_momentum_warmup)


def fraction_at(step: int, config: Config, plan: Plan) -> float:
    """Learning rates in the update after `step` completed ones, as a fraction of their peaks."""
    return lr_fraction(step, config.schedule.name, plan, config.schedule.min_lr / config.optim.lr)


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Set the learning rate of every group to `fraction` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
