"""Define the options of the optimizer. No torch."""

from dataclasses import dataclass
from typing import Literal

from accel_gpt.config.options import Section, option

MUON_LR = 0.02  # Jordan et al. 2024, with muon_scale original
STACK = 2**24
"""Elements that Muon updates at once on a rank: 64 MiB in float32. A single weight may have more.
This keeps the temporary memory of an update independent of the number of blocks."""


@dataclass(frozen=True)
class OptimConfig(Section, prefix="optim."):
    """The optimizer."""

    name: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw: AdamW. muon: Muon (Jordan et al. 2024) for the matrices of attention and MLP, and "
        "AdamW for embeddings, head and vectors.",
        resume="refuse",
    )
    lr: float = option(
        6e-4,
        "Peak learning rate of AdamW.",
        above=0,
        essential=True,
    )
    embedding_lr: float | None = option(
        None,
        "Peak learning rate of the embeddings, and of the head if it shares their weights. "
        "null: lr.",
        above=0,
        null_is_another_run=True,
    )
    head_lr: float | None = option(
        None,
        "Peak learning rate of the output head, if it does not share the weights of the "
        "embeddings. null: lr.",
        above=0,
        null_is_another_run=True,
    )
    lr_factor: float = option(
        1.0,
        "Factor on all learning rates that follow from model.depth. Tune it at a small depth and "
        "keep it at a large one.",
        above=0,
        resume="free",
    )
    residual_lr_factor: float | None = option(
        None,
        "Factor on the learning rate of the matrices that project onto the residual stream: the "
        "last matrix of attention and the last of the MLP. Their weight decay is divided by the "
        "factor. null: 1.",
        above=0,
        null_is_another_run=True,
    )
    beta1: float = option(
        0.9,
        "Decay rate of AdamW's first moment.",
        at_least=0,
        below=1,
    )
    beta2: float = option(
        0.95,
        "Decay rate of AdamW's second moment.",
        at_least=0,
        below=1,
    )
    eps: float = option(
        1e-8,
        "Constant added to the root of the second moment, for numerical stability.",
        above=0,
    )
    weight_decay: float = option(
        0.1,
        "Decoupled weight decay of matrices, multiplied by the learning rate. Vectors do not "
        "decay.",
        at_least=0,
        essential=True,
    )
    grad_clip: float = option(
        1.0,
        "Clip the global gradient norm to this value. 0: no clipping.",
        at_least=0,
    )
    muon_lr: float | None = option(
        None,
        "Peak learning rate of Muon, on the same schedule as lr. null: 0.02 if muon_scale is "
        "original, else lr.",
        above=0,
        used_with=("name", ("muon",)),
    )
    muon_scale: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "Factor on muon_lr by the shape of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, "
        "columns)), which makes updates as large as AdamW's (Liu et al. 2025). original: "
        "sqrt(max(1, rows / columns)).",
        used_with=("name", ("muon",)),
    )
    muon_weight_decay: float | None = option(
        None,
        "Decoupled weight decay of Muon's matrices. null: weight_decay.",
        at_least=0,
        used_with=("name", ("muon",)),
    )
    muon_momentum: float = option(
        0.95,
        "Nesterov momentum of Muon.",
        at_least=0,
        below=1,
        used_with=("name", ("muon",)),
    )
    muon_momentum_warmup: int = option(
        0,
        "Number of steps in which the momentum rises from 0.85 to muon_momentum. 0: no warm-up.",
        at_least=0,
        used_with=("name", ("muon",)),
    )
    muon_cautious_decay: bool = option(
        False,
        "Decay a weight only if Muon's update also makes it smaller (Chen et al. 2025).",
        used_with=("name", ("muon",)),
    )

    @property
    def muon_peak(self) -> float:
        """Peak learning rate of Muon: muon_lr or its default."""
        if self.muon_lr:
            return self.muon_lr
        return MUON_LR if self.muon_scale == "original" else self.lr
