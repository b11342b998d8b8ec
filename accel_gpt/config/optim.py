"""The options of the optimizer, with units and checks. No torch."""

from dataclasses import dataclass, fields
from typing import Literal

from accel_gpt.config.checks import BelowOne, NotNegative, Positive, Section
from accel_gpt.errors import require

MUON_LR = 0.02  # Jordan et al. 2024, for the original scale
STACK = 2**24
"""Elements of a rank that Muon updates at once, unless one weight has more: 64 MiB in float32, so
that what an update needs besides its state does not grow with the number of blocks."""


@dataclass(frozen=True)
class OptimConfig(Section, prefix="optim."):
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon (Jordan et al. 2024) for the matrices of attention and MLP, AdamW for
    embeddings, head and vectors."""
    lr: Positive[float] = 6e-4
    """Peak learning rate of AdamW."""
    embedding_lr: Positive[float | None] = None
    """Peak learning rate of the embeddings, and of a head that shares their weights. null: lr."""
    head_lr: Positive[float | None] = None
    """Peak learning rate of an output head with its own weights. null: lr."""
    beta1: BelowOne[float] = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: BelowOne[float] = 0.95
    """Decay rate of AdamW's second moment."""
    eps: Positive[float] = 1e-8
    """Added to the root of the second moment for numerical stability."""
    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay of matrices, multiplied by the learning rate. Vectors do not decay."""
    grad_clip: NotNegative[float] = 1.0
    """Clip the global gradient norm to this value. 0: no clipping."""
    muon_lr: Positive[float | None] = None
    """Peak learning rate of Muon, on the same schedule. null: lr, or with muon_scale original
    0.02."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on muon_lr by the shape of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)),
    which makes updates as large as AdamW's (Liu et al. 2025). original: sqrt(max(1, rows /
    columns))."""
    muon_weight_decay: NotNegative[float | None] = None
    """Decoupled weight decay of Muon's matrices. null: weight_decay."""
    muon_momentum: BelowOne[float] = 0.95
    """Nesterov momentum of Muon."""
    muon_momentum_warmup: NotNegative[int] = 0
    """Number of steps in which the momentum rises from 0.85 to muon_momentum. 0: none."""
    muon_cautious_decay: bool = False
    """Decay a weight only where Muon's update also makes it smaller (Chen et al. 2025)."""

    @property
    def muon_peak(self) -> float:
        """Peak learning rate of muon, given or not."""
        return self.muon_lr or (MUON_LR if self.muon_scale == "original" else self.lr)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [
            f.name
            for f in fields(self)
            if f.name.startswith("muon_") and getattr(self, f.name) != f.default
        ]
        require(
            self.name == "muon" or not given,
            f"optim.{given[0] if given else ''} is set but optim.name is {self.name}; "
            "leave it out, or set optim.name to muon",
        )
