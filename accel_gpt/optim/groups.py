"""The optimizer and its parameter groups; every group carries its own peak learning rate."""

from typing import Any

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import require
from accel_gpt.model.head import Head
from accel_gpt.optim.adamw import GuardedAdamW
from accel_gpt.optim.muon import MOMENTUM, ROWS, MuonAdamW, hidden_matrices
from accel_gpt.optim.schedule import lr_fraction, momentum_at

PEAK = "peak_lr"
DECAYED = "decayed"
PART = "part"  # of a group with a learning rate of its own: embedding, head


def make_optimizer(model: nn.Module, config: OptimConfig, compiled: bool = False) -> GuardedAdamW:
    """AdamW with weight decay on matrices and embeddings and none on vectors; with `muon` the
    matrices of the blocks are Muon's, whose steps are `compiled` or not.

    Loshchilov & Hutter 2019; the groups are those of minGPT and its descendants. AdamW's come
    first. With `embedding_lr` or `head_lr` embeddings and head are groups of their own.
    """
    matrices = hidden_matrices(model) if config.name == "muon" else {}
    parts = own_parts(model, config)
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
        optimizer = MuonAdamW(filled, config.lr, compiled)
    else:
        optimizer = GuardedAdamW(filled, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def own_parts(model: nn.Module, config: OptimConfig) -> dict[str, list[Tensor]]:
    """Embeddings and head, where the config gives one of them its learning rate.

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
    """Write the config into every group; also after a resume, which restores those of the past."""
    for group in optimizer.param_groups:
        if ROWS in group:
            decay = config.muon_weight_decay
            group[PEAK] = config.muon_peak
            group["weight_decay"] = config.weight_decay if decay is None else decay
            group["momentum"] = config.muon_momentum
            group["scale"], group["cautious"] = config.muon_scale, config.muon_cautious_decay
        else:
            own = {"embedding": config.embedding_lr, "head": config.head_lr}
            group[PEAK] = own.get(group.get(PART, "")) or config.lr
            group["weight_decay"] = config.weight_decay if group[DECAYED] else 0.0
            group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps


def state_names(group: dict[str, Any]) -> set[str]:
    """What the optimizer keeps of each parameter of a group."""
    return {MOMENTUM} if ROWS in group else {"step", "exp_avg", "exp_avg_sq"}


def set_rates(optimizer: torch.optim.Optimizer, config: Config, plan: Plan, step: int) -> None:
    """Learning rates and momenta of the update that follows `step` completed ones."""
    optim = config.optim
    set_lr(optimizer, fraction_at(step, config, plan))
    for group in optimizer.param_groups:
        if ROWS in group:
            group["momentum"] = momentum_at(step, optim.muon_momentum, optim.muon_momentum_warmup)


def fraction_at(step: int, config: Config, plan: Plan) -> float:
    """Share of their peaks that all rates have in the update that follows `step` completed ones."""
    return lr_fraction(step, config.schedule.name, plan, config.schedule.min_lr / config.optim.lr)


def set_lr(optimizer: torch.optim.Optimizer, fraction: float) -> None:
    """Give every group `fraction` of its own peak.

    Reads `param_groups` anew each time: `Accelerator.prepare` and `load_state` replace them.
    """
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * fraction
